"""`MooncakeBackend`: objects in Mooncake Store, moved straight from and to pool memory.

What a reader may rely on: a load that is OK returned exactly the bytes that were stored under
this key, in time. What a writer may: OK means that these bytes are what readers will find.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Backend, Batch, Capabilities, Closing, Op, Registration
from kvconnect.errors import (
    BackendError,
    CapabilityError,
    ClosedError,
    ConfigError,
    TransferTimeoutError,
)
from kvconnect.region import Region
from kvconnect.registrations import Registrations
from kvconnect_mooncake import catalog, moving, report
from kvconnect_mooncake.job import Chunk, Job, cut
from kvconnect_mooncake.master import MasterProcess
from kvconnect_mooncake.memory import Memory
from kvconnect_mooncake.opening import close_core, open_core
from kvconnect_mooncake.options import MAX_ENTRIES, MooncakeOptions, parse, parse_local

log = logging.getLogger("kvconnect.mooncake")


class MooncakeBackend(Closing):
    """A client of one Mooncake Store, and of its own master if it was opened so.

    Invariants: nothing moves from or to memory that is not registered; memory is leased until
    the library is quiet, not only until it has returned; after `close` nothing is touched.
    """

    def __init__(
        self, location: str, options: MooncakeOptions, master: MasterProcess | None = None
    ) -> None:
        """Connect; see `kvconnect_mooncake.open_backend` for what may be raised."""
        self.name = "mooncake"
        self.location, self.options = location, options
        self.capabilities = Capabilities(
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
        client = self.core.client
        self._memory = Memory(table, client.register, client.unregister, options.max_region_bytes)
        log.info("mooncake: %r", self)

    def register(self, regions: Sequence[Region]) -> Registration:
        """Register host memory; see `kvconnect.backend.Backend.register`."""
        self._check_open("register")
        return self._memory.add(regions)

    def exists(self, keys: Sequence[str], nbytes: Sequence[int]) -> NDArray[np.bool_]:
        """Tell which keys are present with exactly these sizes: (keys,) bool."""
        self._check_open("exists")
        return catalog.exists(self.core, keys, nbytes)

    def submit(self, batch: Batch) -> Job:
        """Start a batch; see `kvconnect.backend.Backend.submit`."""
        self._check_open(batch.op.value)
        if len(set(batch.keys)) != len(batch.keys):
            raise ConfigError(f"mooncake: {len(batch)} keys are not distinct; ask for each once")
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

    def remove(self, keys: Sequence[str]) -> NDArray[np.bool_]:
        """Remove keys; True where one was there: (keys,) bool."""
        self._check_open("remove")
        return catalog.remove(self.core, keys)

    def list_keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with `prefix`, sorted."""
        self._check_open("list_keys")
        return catalog.list_keys(self.core, prefix)

    def clear(self, prefix: str) -> int:
        """Remove all keys that begin with `prefix`; `ConfigError` if it is empty."""
        self._check_open("clear")
        if not prefix:
            raise ConfigError("mooncake: clear needs a prefix; an empty one would drop everything")
        return catalog.clear(self.core, prefix)

    def put_record(self, name: str, value: bytes) -> None:
        """Store or replace a record of at most 64 KiB."""
        self._check_open("put_record")
        catalog.put_record(self.core, name, value)

    def records(self) -> dict[str, bytes]:
        """Return all records."""
        self._check_open("records")
        return catalog.records(self.core)

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
            if not close_core(self.core, self.options.timeout):
                raise TransferTimeoutError(
                    f"mooncake: a call of the library did not return in {self.options.timeout} s"
                )
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
    except BackendError:
        master.close()
        raise


_: type[Backend] = MooncakeBackend
