"""`MooncakeBackend`: objects in Mooncake Store, moved straight from and to pool memory.

What a reader may rely on: a load that is OK returned exactly the bytes that were stored under
this key, in time. What a writer may: OK means that these bytes are what readers will find.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import ClassVar

from kvconnect.backend import Backend, Batch, Capabilities, Op, Registration
from kvconnect.errors import (
    CapabilityError,
    ClosedError,
    TransferTimeoutError,
)
from kvconnect.region import Region
from kvconnect.registering import Memory
from kvconnect.registrations import Registrations
from kvconnect.store_front import Catalog, StoreFront, need_distinct
from kvconnect_mooncake import catalog, moving, report
from kvconnect_mooncake.core import Core
from kvconnect_mooncake.job import Chunk, Job, cut
from kvconnect_mooncake.master import MasterProcess
from kvconnect_mooncake.opening import leave_core, open_core, stop_core
from kvconnect_mooncake.options import MAX_ENTRIES, MooncakeOptions, parse, parse_local

log = logging.getLogger("kvconnect.mooncake")


class MooncakeBackend(StoreFront[Core]):
    """A client of one Mooncake Store, and of its own master if it was opened so.

    Invariants: nothing moves from or to memory that is not registered; memory is leased until
    the library is quiet, not only until it has returned; after `close` nothing is touched.
    """

    catalog: ClassVar[Catalog[Core]] = catalog

    def __init__(
        self, location: str, options: MooncakeOptions, master: MasterProcess | None = None
    ) -> None:
        """Connect; see `kvconnect_mooncake.open_backend` for what may be raised."""
        self.name = "mooncake"
        self.location, self.options = location, options
        self._capabilities = Capabilities(
            max_runs_per_object=MAX_ENTRIES - 1,
            min_run_bytes=options.smallest_run,
            max_region_bytes=options.max_region_bytes,
            lease_seconds=options.lease,
        )
        self._master = master
        self._closed = self._released = False
        self._closing = threading.Lock()
        self._under_way: list[Job] = []
        table = Registrations(self.name, lambda: self._under_way, options.timeout)
        self._table = table
        self.core = open_core(location, options)
        hold = self.core.client.hold
        self._memory = Memory(self.name, table, hold, options.max_region_bytes)
        log.info("mooncake: %r", self)

    @property
    def capabilities(self) -> Capabilities:
        """What it can take; a limit on regions is learnt when the library refuses one."""
        if self._capabilities.max_region_bytes != self._memory.most:
            limit = self._memory.most
            self._capabilities = replace(self._capabilities, max_region_bytes=limit)
        return self._capabilities

    def register(self, regions: Sequence[Region]) -> Registration:
        """Register host memory; see `kvconnect.backend.Backend.register`."""
        self._check_open("register")
        return self._memory.add(regions)

    def submit(self, batch: Batch) -> Job:
        """Start a batch; see `kvconnect.backend.Backend.submit`."""
        self._check_open(batch.op.value)
        need_distinct(self.name, batch)
        if batch.op is Op.STORE and batch.ttl is not None and not self.options.checksum:
            raise CapabilityError(
                "mooncake: ttl= is kept in the trailer, which checksum=false leaves out"
            )
        with self._table.lock:
            self._check_open(batch.op.value)
            self._table.check(batch)
            job = Job(batch, self.options.timeout)
            trailers = 1 if self.options.checksum else 0
            chunks = cut(job, self.options.call_entries, trailers, self.core.names.names)
            self._under_way = [one for one in self._under_way if not one.done()]
            self._under_way.append(job)
        job.start(len(chunks))
        for chunk in chunks:
            self._start(chunk)
        return job

    def _start(self, chunk: Chunk) -> None:
        # Not a bound method: a thread that holds the backend would keep it from being collected.
        core = self.core
        core.movers.submit(lambda: moving.run(core, chunk))

    def stats(self) -> dict[str, int | float | str]:
        """Return sizes in bytes, counts and states of this client."""
        self._check_open("stats")
        return report.stats(self.core, self._memory, self._under_way)

    def close(self) -> None:
        """Cancel what is queued, wait until all is quiet, leave the store, end an own master.

        Raises `TransferTimeoutError` while the library still holds memory; close again later.
        """
        with self._table.lock:
            self._closed = True
            under_way = list(self._under_way)
        if self._released:
            return
        for job in under_way:
            job.cancel()
        self._table.drain()
        # One at a time: a client that is closed twice ends the process.
        with self._closing, ExitStack() as stack:
            if self._released:
                return
            if self._master is not None:
                stack.callback(self._master.close)
            if not stop_core(self.core, self.options.timeout):
                raise TransferTimeoutError(
                    f"mooncake: a call of the library did not return in {self.options.timeout} s"
                )
            # First, so that nothing of the caller's is held by what leaving may leave behind.
            self._memory.close()
            leave_core(self.core)
            self._released = True

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise ClosedError(f"mooncake: {operation} after close; open {self.location} again")

    def __repr__(self) -> str:
        state = "closed" if self._closed else report.describe(self.core)
        return f"MooncakeBackend({self.location}, {state})"


def open_store(location: str, options: Mapping[str, str]) -> MooncakeBackend:
    """Connect; see `kvconnect_mooncake.open_backend`."""
    return MooncakeBackend(location, parse(options))


def open_own(location: str, options: Mapping[str, str]) -> MooncakeBackend:
    """Start a master and connect; see `kvconnect_mooncake.open_local`."""
    parsed = parse_local(options)
    master = MasterProcess(location or None, lease=parsed.lease, ssd=parsed.ssd is not None)
    try:
        return MooncakeBackend(master.address, master.known_to(parsed), master)
    except BaseException:
        master.close()
        raise


_: type[Backend] = MooncakeBackend
