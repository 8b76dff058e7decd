"""One batch through the NIXL engine: a window of groups, posted and polled by one thread.

While one group is hashed, the disk moves the others; POSIX starts more I/O only when it is
polled, so polling goes on between the groups.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvconnect.backend import Op
from kvconnect_nixl.posted import POLL_SECONDS, Posted
from kvconnect_nixl.rows import U64
from kvconnect_nvme.engine import Group, Lent, NoSlotError, Work
from kvconnect_nvme.threads import move

if TYPE_CHECKING:
    from kvconnect_nvme.nixl_engine import NixlEngine


@dataclass(slots=True)
class _Flight:
    """One group on its way: chunks still to post, transfers under way, the first error."""

    at: int
    group: Group
    lent: Lent
    memory: ExitStack
    chunks: list[tuple[U64, U64]]
    posted: list[tuple[Posted, int]] = field(default_factory=list)
    error: Exception | None = None

    @property
    def over(self) -> bool:
        """Whether nothing of it is under way or will be."""
        return not self.posted and (not self.chunks or self.error is not None)


class Run:
    """Moves the groups of one batch; used once."""

    def __init__(self, engine: NixlEngine, op: Op, work: Work) -> None:
        """Nothing moves yet."""
        self._engine, self._op, self._work = engine, op, work
        self._filling: Future[_Flight | Exception] | None = None
        self._flying: list[_Flight] = []
        self._landed: deque[_Flight] = deque()
        self._errors: list[Exception | None] = []

    def move(self, groups: Sequence[Group]) -> list[Exception | None]:
        """Move all groups; return each one's error. All memory is quiet on return."""
        self._errors = [None] * len(groups)
        todo = deque(enumerate(groups))
        try:
            while todo or self._flying or self._landed:
                self._poll()
                # A new group first: the disk works on it while a landed one is verified.
                if not self._start(todo):
                    if self._landed:
                        self._land(self._landed.popleft())
                    else:
                        self._pause()
        finally:
            self._quiet()
        return self._errors

    def _start(self, todo: deque[tuple[int, Group]]) -> bool:
        """Post the next group if it is ready; tell whether that is settled."""
        window = self._engine.window
        if not todo or len(self._flying) >= window or len(self._landed) >= window:
            return False
        filled = self._next(*todo[0])
        if filled is None or isinstance(filled, NoSlotError):
            return False
        at, _ = todo.popleft()
        if isinstance(filled, Exception):
            self._errors[at] = filled
            return True
        self._flying.append(filled)
        if todo:
            self._ahead(*todo[0])
        self._pump(filled)
        return True

    def _next(self, at: int, group: Group) -> _Flight | Exception | None:
        """Return the next group when it is ready: filled ahead, or at once if all is idle."""
        if self._filling is None:
            if not (self._flying or self._landed):
                return self._fill(at, group, wait=True)
            self._ahead(at, group)
            return None
        if not self._filling.done():
            return None
        filled, self._filling = self._filling.result(), None
        return filled

    def _ahead(self, at: int, group: Group) -> None:
        # Who holds a bounce buffer does not wait for one: others may be waiting for his.
        self._filling = self._engine.start(partial(self._fill, at, group, wait=False))

    def _fill(self, at: int, group: Group, *, wait: bool) -> _Flight | Exception:
        """Make a group ready to be posted, on a thread: hashing goes on while others are posted."""
        with ExitStack() as memory:
            try:
                self._work.check()
                lent = memory.enter_context(self._work.lend(group, wait=wait))
                chunks = self._engine.chunks(group, lent)
            except Exception as error:  # noqa: BLE001 - one group's failure is data
                return error
            return _Flight(at, group, lent, memory.pop_all(), chunks)

    def _pause(self) -> None:
        if self._filling is None:
            time.sleep(POLL_SECONDS)
        else:
            futures.wait([self._filling], POLL_SECONDS)

    def _quiet(self) -> None:
        """Wait until nothing moves, however long it takes: until its end a transfer may write."""
        while self._flying:
            self._poll()
            time.sleep(POLL_SECONDS)
        if self._filling is not None and isinstance(filled := self._filling.result(), _Flight):
            filled.memory.close()

    def _pump(self, flight: _Flight) -> None:
        """Post what there is room for."""
        while flight.chunks and flight.error is None:
            try:
                posted = self._engine.post(self._op, flight.chunks[0])
            except Exception as error:  # noqa: BLE001 - kept for when the rest has ended
                flight.error = error
                return
            if posted is None:
                return
            flight.posted.append((posted, len(flight.chunks.pop(0)[0])))

    def _poll(self) -> None:
        """Let NIXL make progress; note what has ended."""
        for flight in self._flying:
            for posted, size in [one for one in flight.posted if one[0].poll()]:
                flight.posted.remove((posted, size))
                self._engine.ended(size)
                flight.error = flight.error or posted.error
            self._pump(flight)
        self._landed.extend(flight for flight in self._flying if flight.over)
        self._flying = [flight for flight in self._flying if not flight.over]

    def _land(self, flight: _Flight) -> None:
        try:
            with flight.memory:
                if flight.error is not None:
                    self._engine.fell_back(flight.group, flight.error)
                    move(self._op, flight.group, flight.lent.views())
                self._work.landed(flight.group, flight.lent)
        except Exception as error:  # noqa: BLE001 - one group's failure is data
            self._errors[flight.at] = error
