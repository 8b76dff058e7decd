"""The NIXL engine: groups as transfers between registered memory and registered slabs.

Each group is a transfer of its own, several are under way at once. NIXL has one status for all
descriptors of a transfer, so a group is as fine as its errors get; what failed is then moved
again by system calls, whose errors say which block it was and why.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

import numpy as np

from kvconnect.backend import Closable, Closing, Op
from kvconnect.region import Region
from kvconnect_nixl.agent import Agent
from kvconnect_nixl.library import Library
from kvconnect_nixl.posted import Posted
from kvconnect_nixl.rows import U64, plain, split
from kvconnect_nvme.engine import Group, IoEngine, Lent, Work
from kvconnect_nvme.nixl_plans import Plan, SlabIds
from kvconnect_nvme.nixl_run import Run
from kvconnect_nvme.slabs import Slabs
from kvconnect_nvme.threads import Nothing, ThreadsEngine

T = TypeVar("T")
R = TypeVar("R")

log = logging.getLogger("kvconnect.nvme")


class NixlEngine(Closing):
    """Moves groups by one NIXL plugin.

    Invariants: memory and slabs are registered once, never per transfer; no more than
    `plan.depth` descriptors are under way; a group's memory is given back only when all its
    transfers have ended.
    """

    def __init__(
        self,
        plan: Plan,
        slabs: Slabs,
        threads: int,
        *,
        reason: str = "",
        timeout: float = 60.0,
        library: Library | None = None,
    ) -> None:
        """Make the agent; `threads`: groups under way in one batch, and threads that hash.

        Raises `UnavailableError` where NIXL or the plugin does not load.
        """
        self.name, self.plan, self.window = plan.label, plan, threads
        self._reason, self._timeout = reason, timeout
        self._agent = Agent({plan.plugin: plan.parameters}, library=library, timeout=timeout)
        self._ids = SlabIds(self._agent, plan, slabs)
        self._threads = ThreadsEngine(threads)
        self._room = plan.depth
        self._fallbacks = 0
        self._lock = threading.Lock()

    @property
    def in_place(self) -> bool:
        """Whether the plugin may see callers' memory."""
        return self.plan.in_place

    @property
    def group_bytes(self) -> int:
        """Bytes per group that it moves best."""
        return self.plan.group

    def register(self, region: Region, *, own: bool = False) -> Closable:
        """Make host memory known to the plugin, callers' only where it leaves it alone."""
        if not own and not self.plan.in_place:
            return Nothing()
        rows = plain(region.address, region.nbytes, self.plan.device)
        with self.plan.guard(region, self._timeout):
            return self._agent.register(self.plan.plugin, "DRAM", rows)

    def run(self, op: Op, groups: Sequence[Group], work: Work) -> list[Exception | None]:
        """Move all groups; return each one's error. All memory is quiet on return."""
        return Run(self, op, work).move(groups)

    def chunks(self, group: Group, lent: Lent) -> list[tuple[U64, U64]]:
        """Return the group's descriptors, a transfer each: (memory rows, slab rows)."""
        rows = split(lent.rows(), self.plan.piece)
        local = plain(rows[:, 0], rows[:, 1], self.plan.device)
        remote = plain(rows[:, 2] + np.uint64(group.offset), rows[:, 1], self._ids.of(group))
        steps = range(0, len(rows), self.plan.chunk)
        return [(local[i : i + self.plan.chunk], remote[i : i + self.plan.chunk]) for i in steps]

    def post(self, op: Op, chunk: tuple[U64, U64]) -> Posted | None:
        """Post a chunk, or return None while too many descriptors are under way."""
        local, remote = chunk
        with self._lock:
            if self._room < len(local):
                return None
            self._room -= len(local)
        try:
            plan = self.plan
            return self._agent.submit(plan.plugin, op, ("DRAM", local), (plan.remote, remote))
        except BaseException:
            self.ended(len(local))
            raise

    def ended(self, descriptors: int) -> None:
        """Note that a transfer of so many descriptors is over."""
        with self._lock:
            self._room += descriptors

    def fell_back(self, group: Group, error: Exception) -> None:
        """Note that a group failed and is moved by system calls."""
        with self._lock:
            self._fallbacks += 1
            first = self._fallbacks == 1
        if first:
            text = "nvme: %s failed for %d B of slab %d (%s); system calls move what it cannot"
            log.warning(text, self.name, group.nbytes, group.slab, error)

    def start(self, call: Callable[[], R]) -> Future[R]:
        """Call on one of the threads that hash."""
        return self._threads.start(call)

    def each(self, call: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Call for every item on threads; nothing of this is NIXL's."""
        return self._threads.each(call, items)

    def stats(self) -> Mapping[str, int | str]:
        """Say which engine it is and why, how often it needed help, and what NIXL holds."""
        return {
            "io": self.name,
            "io_reason": self._reason,
            "io_fallbacks": self._fallbacks,
            "nixl_held": self._agent.held,
            "nixl_under_way": self._agent.under_way,
        }

    def close(self) -> None:
        """Drop the agent; `TransferTimeoutError` while NIXL still moves bytes."""
        self._threads.close()
        self._agent.close()


_: type[IoEngine] = NixlEngine
