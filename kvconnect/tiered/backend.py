"""`TieredBackend`: two or more stores as one, fastest first.

Why it exists: a local disk is fast and small, a remote store large and shared. Reads come from
the fastest tier that has a key, and a tier that fails costs its keys and a bounded time, not
the store.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Backend, Batch, Closing, Registration
from kvconnect.errors import ClosedError, ConfigError, UnavailableError
from kvconnect.region import Region
from kvconnect.registrations import Registrations
from kvconnect.store_front import need_distinct
from kvconnect.tiered.arena import Arena
from kvconnect.tiered.catalog import Catalog
from kvconnect.tiered.combine import combined
from kvconnect.tiered.copier import Copier
from kvconnect.tiered.core import Core, run
from kvconnect.tiered.job import Job
from kvconnect.tiered.late import Late
from kvconnect.tiered.ledger import Ledger
from kvconnect.tiered.options import TieredOptions
from kvconnect.tiered.promote import Promoter
from kvconnect.tiered.registering import Joint, register_everywhere
from kvconnect.tiered.tier import Tier
from kvconnect.tiered.writeback import WriteBack

WORKERS = 16
"""Batches that wait for tiers at once. One that is late waits without a worker."""


class TieredBackend(Closing):
    """A store over `backends`.

    Invariants: no tier is given memory that another may still write; a load that is OK came
    whole from one tier; a key removed or stored anew is never overwritten by an older copy.
    Closing it closes the tiers.
    """

    def __init__(self, backends: Sequence[Backend], options: TieredOptions | None = None) -> None:
        """Take over `backends`, fastest first. Raises `ConfigError`, or what `register` raises."""
        if len(backends) < 2:
            raise ConfigError(f"tiered: {len(backends)} backends; it takes two or more")
        self.options = options or TieredOptions()
        self.name = f"tiered({', '.join(backend.name for backend in backends)})"
        self.capabilities = combined([b.capabilities for b in backends], self.options)
        self._backends = list(backends)
        self._pid = os.getpid()
        self._closed = self._released = False
        self._closing = threading.Lock()
        self._under_way: list[Job] = []
        self._registrations = Registrations(
            self.name, lambda: self._under_way, self.options.timeout + 1
        )
        self._arenas = self._map()
        try:
            mine = [arena.region for arena in self._arenas.values()]
            self._handles = register_everywhere(self._backends, mine) if mine else []
        except BaseException:
            for arena in self._arenas.values():
                arena.close()
            raise
        self.core = self._assemble()
        self._jobs = ThreadPoolExecutor(WORKERS, thread_name_prefix="tiered")
        # Bound into the instance: what one tier lacks, the store must not claim to have.
        for name, method in Catalog(self.core, self._check_open).offered().items():
            setattr(self, name, method)

    def _map(self) -> dict[str, Arena]:
        most = self.capabilities.max_region_bytes
        sizes = {"promote": self.options.promote_bytes}
        if self.options.write == "back":
            sizes["copy"] = self.options.copy_bytes
        bounded = {k: v if most is None else min(v, most) for k, v in sizes.items()}
        return {name: Arena(f"tiered-{name}", n) for name, n in bounded.items() if n}

    def _assemble(self) -> Core:
        late, ledger, options = Late(), Ledger(), self.options
        tiers = [Tier(b, i, options, late) for i, b in enumerate(self._backends, start=1)]
        regions: Callable[[], Sequence[Region]] = lambda: self._registrations.regions  # noqa: E731
        promote, copy = self._arenas.get("promote"), self._arenas.get("copy")
        promoter = Promoter(tiers[0], promote, ledger, late, options, regions)
        writeback = WriteBack(tiers, Copier(tiers, copy, ledger, late, options), options)
        return Core(tiers, options, ledger, late, promoter, writeback)

    def register(self, regions: Sequence[Region]) -> Registration:
        """Register with every tier, or with none; see `kvconnect.backend.Backend.register`."""
        self._check_open("register")
        own = self._registrations.add(regions)
        try:
            return Joint(own, register_everywhere(self._backends, regions))
        except BaseException:
            own.close()
            raise

    def exists(self, keys: Sequence[str], nbytes: Sequence[int]) -> NDArray[np.bool_]:
        """Tell which keys some tier has with exactly these sizes: (keys,) bool.

        A slower tier is asked only for what the faster ones lack. Raises `UnavailableError`
        if no tier answers.
        """
        self._check_open("exists")
        if len(keys) != len(nbytes):
            raise ConfigError(f"tiered: exists got {len(keys)} keys and {len(nbytes)} sizes")
        names, sizes = list(keys), list(nbytes)
        found, answers = np.zeros(len(names), dtype=np.bool_), 0
        for tier in self.core.tiers:
            rest = np.flatnonzero(~found)
            asked = rest.tolist()
            got = self._ask(tier, [names[i] for i in asked], [sizes[i] for i in asked])
            if got is not None:
                answers += 1
                found[rest] = got
        if not answers:
            raise UnavailableError(f"{self.name}: no tier answers exists of {len(keys)} keys")
        return found

    def _ask(self, tier: Tier, names: list[str], sizes: list[int]) -> NDArray[np.bool_] | None:
        over = tier.passed_over(names, sizes)
        if tier.number > 1:
            over |= self.core.writeback.pending(names)
        ask = np.flatnonzero(~over)
        found = np.zeros(len(names), dtype=np.bool_)
        if not len(ask):
            return found if len(names) or not tier.circuit.is_open else None
        keys, wanted = [names[i] for i in ask.tolist()], [sizes[i] for i in ask.tolist()]
        versions = self.core.ledger.versions(keys)
        got = tier.exists(keys, wanted)
        if got is None:
            return None
        found[ask] = got
        gone = np.flatnonzero(~got & self.core.ledger.same(keys, versions))
        tier.absent.note([keys[i] for i in gone.tolist()], [wanted[i] for i in gone.tolist()])
        return found

    def submit(self, batch: Batch) -> Job:
        """Start a batch; see `kvconnect.backend.Backend.submit`."""
        self._check_open(batch.op.value)
        need_distinct("tiered", batch)
        job = Job(batch, self.options.timeout)
        with self._registrations.lock:
            self._check_open(batch.op.value)
            self._registrations.check(batch)
            self._under_way = [one for one in self._under_way if not one.done()]
            self._under_way.append(job)
            self._jobs.submit(run, self.core, job)
        return job

    def flush(self, timeout: float) -> bool:
        """Wait until all that is queued for write-back is in every tier; False if it is not."""
        self._check_open("flush")
        return self.core.writeback.flush(timeout)

    def close(self) -> None:
        """Cancel what is under way, write back what is queued, close the tiers.

        Raises `TransferTimeoutError` if a tier does not let go of memory; close again later.
        """
        if os.getpid() != self._pid:
            return  # a forked child has neither the threads nor anything to give back
        with self._registrations.lock:
            self._closed = True
            under_way = list(self._under_way)
        for job in under_way:
            job.cancel()
        self._registrations.drain()
        with self._closing:
            if self._released:
                return
            self.core.writeback.close(self.options.close_timeout)
            self.core.promoter.close(self.options.timeout + 1)
            self._jobs.shutdown(wait=True)
            with contextlib.ExitStack() as stack:
                for closable in (*self._backends, *self._handles):
                    stack.callback(closable.close)
            # Only now is it certain that no tier touches them.
            for arena in self._arenas.values():
                arena.close()
            self._released = True

    def _check_open(self, operation: str) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"tiered: {operation} in a process that was forked off; open the store there"
            )
        if self._closed:
            raise ClosedError(f"tiered: {operation} after close; open the store again")

    def __repr__(self) -> str:
        tiers = ", ".join(map(repr, self._backends))
        return f"TieredBackend({tiers}, write={self.options.write}{', closed' * self._closed})"


_: type[Backend] = TieredBackend
