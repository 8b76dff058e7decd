"""The embedded NVMe store: preallocated slabs for payloads, LMDB for the index.

Nothing to start and nothing to configure beyond a folder and a capacity; several processes
share one store. Payloads are written and synced first, one index transaction publishes after,
so a kill at any instant leaves either the whole object or none. Loads verify checksum and
identity, and look the entry up again after reading, so that no eviction by any process can
make them return other bytes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Backend, Batch, Capabilities, Closing, Op, Registration, Status
from kvconnect.config import parse_options
from kvconnect.errors import (
    ClosedError,
    ConfigError,
    KVConnectError,
    RegistrationError,
    TransferTimeoutError,
)
from kvconnect.metrics import Metrics
from kvconnect.region import Region
from kvconnect.registrations import Registrations
from kvconnect.transfers import BatchTransfer
from kvconnect_nvme import maintenance
from kvconnect_nvme.engine import ThreadsEngine
from kvconnect_nvme.entry import (
    ENTRY_NBYTES,
    pack_keys,
    sizes_and_expiry,
    unpack_key,
)
from kvconnect_nvme.failures import from_os, status_of
from kvconnect_nvme.jobs import LoadJob, Parts, StoreJob
from kvconnect_nvme.memory import BouncePool
from kvconnect_nvme.options import NvmeOptions
from kvconnect_nvme.owner import Owner
from kvconnect_nvme.room import Limits, Room
from kvconnect_nvme.setup_store import check_free, find_place, open_index, superblock
from kvconnect_nvme.slabs import Slabs
from kvconnect_nvme.state import read_state
from kvconnect_nvme.visited import Visited

log = logging.getLogger("kvconnect.nvme")

JOBS = 4
"""Batches worked on at once: one can hash or publish while another writes."""
RECORD_LIMIT = 64 << 10


class NvmeBackend(Closing):
    """A `Backend` on a folder or block device; see the module. Safe to use from many threads."""

    name = "nvme"

    def __init__(self, location: str, options: NvmeOptions) -> None:
        """Open or create the store at `location`."""
        self.options = options
        self.place = find_place(location, options)
        self._index = open_index(self.place, options)
        try:
            block, capacity = superblock(self._index, self.place, options)
            self._owner = Owner(self.place.folder / "owners")
            self._visited = Visited(self.place.folder / "visited.map", capacity)
        except BaseException:
            self._index.close()
            raise
        self._slabs = Slabs(self.place.location, block.slab_bytes, direct=options.direct)
        self._counters = Metrics()
        limits = Limits(capacity, options.high, options.low, options.evict)
        room = Room(self._index, self._slabs, self._owner, self._visited, limits)
        self._parts = Parts(
            index=self._index,
            slabs=self._slabs,
            room=room,
            engine=ThreadsEngine(options.io_threads),
            bounce=BouncePool(options.bounce),
            checksum=options.checksum,
            sync=options.durability != "none",
            counters=self._counters,
        )
        self._jobs = ThreadPoolExecutor(JOBS, thread_name_prefix="kvconnect-nvme-job")
        self._registrations = Registrations(self.name, self._drain)
        self._under_way: set[BatchTransfer] = set()
        self._closed = False
        self._start(block.slab_bytes, capacity)

    def _start(self, slab_bytes: int, capacity: int) -> None:
        self._parts.room.sweep()
        with self._index.read() as txn:
            state = read_state(txn, self._index.db.meta)
        if warning := check_free(self.place, capacity, state.total):
            log.warning("nvme: %s", warning)
        log.info("nvme: %r, slabs of %d B, %d B there", self, slab_bytes, state.total)

    @property
    def capabilities(self) -> Capabilities:
        """Any run goes; short ones are better repacked by the connector than copied here."""
        return Capabilities(
            min_run_bytes=4096,
            durable=self.options.durability != "none",
            max_runs_per_object=1 << 16,
        )

    def register(self, regions: Sequence[Region]) -> Registration:
        """Make regions known; threads need no pinning, so this is only the bounds check."""
        self._check_open("register")
        for region in regions:
            if region.device not in self.capabilities.devices:
                raise RegistrationError(
                    f"nvme: {region} is on device {region.device!r}; this engine reads and writes "
                    f"host memory (cpu): stage through a host pool"
                )
        return self._registrations.add(regions)

    def exists(self, keys: Sequence[str], nbytes: Sequence[int]) -> NDArray[np.bool_]:
        """Tell which keys are present with exactly these sizes: one index look-up for all."""
        self._check_open("exists")
        if len(keys) != len(nbytes):
            raise ConfigError(f"nvme: exists got {len(keys)} keys and {len(nbytes)} sizes")
        packed, entries = pack_keys(keys), self._index.db.entries
        with self._index.read() as txn:
            get = txn.get
            found = [get(key, b"", entries) for key in packed]
        # What is damaged or has another length is no hit; a load checks the rest.
        there = np.array([len(data) == ENTRY_NBYTES for data in found], dtype=np.bool_)
        size, expiry = sizes_and_expiry([d for d in found if len(d) == ENTRY_NBYTES])
        wanted = np.asarray(nbytes, dtype=np.uint64)[there]
        there[there] = (size == wanted) & ((expiry == 0) | (expiry > time.time()))
        return there

    def submit(self, batch: Batch) -> BatchTransfer:
        """Start a batch on a job thread and return at once."""
        transfer = BatchTransfer(batch, self.options.timeout)
        with self._registrations.lock:
            self._check_open("submit")
            self._registrations.check(batch)
            self._under_way.add(transfer)
            self._jobs.submit(self._run, transfer)
        return transfer

    def _run(self, transfer: BatchTransfer) -> None:
        batch = transfer.batch
        try:
            if len(batch):
                kind = StoreJob if batch.op is Op.STORE else LoadJob
                kind(self._parts, batch, transfer).run()
        except (KVConnectError, OSError) as error:
            self._fail(transfer, from_os("nvme", error) if isinstance(error, OSError) else error)
        except BaseException as error:
            self._fail(transfer, error)
            log.exception("nvme: a batch failed in a way nobody foresaw")
        finally:
            self._under_way.discard(transfer)
            transfer.finish()

    def _fail(self, transfer: BatchTransfer, error: BaseException) -> None:
        """Settle what the job had not: nothing of it is stored, or loaded for certain."""
        status = transfer.wait(0).status
        for index in np.flatnonzero(status == Status.TIMEOUT):
            transfer.settle(int(index), status_of(error), str(error), dirty=True)

    def remove(self, keys: Sequence[str]) -> NDArray[np.bool_]:
        """Remove keys; True where one was there."""
        self._check_open("remove")
        packed = pack_keys(keys)
        return np.array(maintenance.remove(self._parts.room, packed), dtype=np.bool_)

    def list_keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with `prefix`, sorted."""
        self._check_open("list_keys")
        return sorted(unpack_key(k) for k in maintenance.matching(self._parts.room, prefix))

    def clear(self, prefix: str) -> int:
        """Remove all keys that begin with `prefix`; `ConfigError` if it is empty."""
        self._check_open("clear")
        if not prefix:
            raise ConfigError("clear: an empty prefix would remove every namespace of the store")
        return sum(
            sum(maintenance.remove(self._parts.room, part))
            for part in maintenance.portions(maintenance.matching(self._parts.room, prefix))
        )

    def put_record(self, name: str, value: bytes) -> None:
        """Store or replace a named record."""
        self._check_open("put_record")
        if len(value) > RECORD_LIMIT or not 0 < len(name.encode()) <= 400:
            raise ConfigError(
                f"record {name[:40]!r}: {len(value)} B; at most {RECORD_LIMIT} B and 400 B of name"
            )
        self._index.update(lambda txn: txn.put(name.encode(), value, db=self._index.db.records))

    def records(self) -> dict[str, bytes]:
        """Return all records."""
        self._check_open("records")
        with self._index.read() as txn:
            return {k.decode(): bytes(v) for k, v in txn.cursor(db=self._index.db.records)}

    def stats(self) -> dict[str, int | float | str]:
        """Return sizes in bytes, counts and settings."""
        self._check_open("stats")
        return maintenance.stats(self._parts) | {
            "durability": self.options.durability,
            "bounce_limit_bytes": self.options.bounce,
            "under_way": len(self._under_way),
        }

    def verify(self, *, repair: bool = True) -> maintenance.Report:
        """Read every object and check it; bad ones are removed where `repair` is true."""
        self._check_open("verify")
        return maintenance.verify(self._parts, repair=repair)

    def compact(self) -> maintenance.Report:
        """Move objects to the front and give empty slabs back to the file system."""
        self._check_open("compact")
        return maintenance.compact(self._parts)

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise ClosedError(f"{what} on a closed nvme store {self.place.location}")

    def _drain(self) -> None:
        deadline = time.monotonic() + self.options.timeout
        for transfer in list(self._under_way):
            if not transfer.settled(max(deadline - time.monotonic(), 0.0)):
                raise TransferTimeoutError(
                    f"nvme: {transfer} is still under way after {self.options.timeout:g} s; its "
                    f"memory must stay allocated, close again later"
                )

    def close(self) -> None:
        """Refuse new calls, wait for transfers, release everything; safe to call twice."""
        with self._registrations.lock:
            already, self._closed = self._closed, True
        self._drain()
        if already:
            return
        self._jobs.shutdown(wait=True)
        self._parts.engine.close()
        self._parts.bounce.close()
        self._release_holds()
        self._owner.close()
        self._slabs.close()
        self._visited.close()
        self._index.close()

    def _release_holds(self) -> None:
        try:
            maintenance.release_owner(self._parts.room)
        except KVConnectError as error:
            # The next process to open the store finds the lock free and returns them.
            log.warning("nvme: held room stays for the next sweep: %s", error)

    def __repr__(self) -> str:
        limits = self._parts.room.limits
        return (
            f"NvmeBackend({os.fspath(self.place.location)!r}, capacity {limits.capacity} B, "
            f"durability={self.options.durability}, io={self._parts.engine.name})"
        )


_: type[Backend] = NvmeBackend


def open_backend(location: str, options: Mapping[str, str]) -> NvmeBackend:
    """Open the store that ``nvme://location?options`` names."""
    return NvmeBackend(location, parse_options(options, NvmeOptions, "nvme"))
