"""`memory://`: objects in a dict, copied under a lock by one worker thread.

Why it exists: it is the reference. Every line is meant to be obviously right, so that other
backends can be compared with it and connector tests need no disk. It is asynchronous like the
real ones: `submit` returns before a byte has moved.
"""

from __future__ import annotations

import ctypes
import math
import queue
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Backend, Batch, Capabilities, Closing, Op, Registration, Status
from kvconnect.config import Bytes, parse_options
from kvconnect.errors import ClosedError, ConfigError, RegistrationError, TransferTimeoutError
from kvconnect.memory.objects import ObjectStore, checksum
from kvconnect.region import Region
from kvconnect.registrations import Registrations
from kvconnect.store_front import need_distinct, need_prefix
from kvconnect.transfers import BatchTransfer


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """Options of `memory://`: `capacity` in bytes of payload, `deadline` in seconds."""

    capacity: Bytes | None = None
    deadline: float = 30.0

    def __post_init__(self) -> None:
        """Refuse what can hold nothing or wait for ever."""
        if self.capacity is not None and self.capacity < 1:
            raise ConfigError(f"memory: capacity={self.capacity} B; it must be at least 1 B")
        if not 0 < self.deadline < math.inf:
            raise ConfigError(f"memory: deadline={self.deadline} s; it must be above 0 and finite")


class MemoryBackend(Closing):
    """A store in this process's memory.

    Invariants: batches run one after the other, in the order they were submitted; a key's
    bytes are copied while the store's lock is held, so a load sees one version of it; after
    `close` returns no memory of the caller is touched.
    """

    def __init__(self, objects: ObjectStore | None = None, *, deadline: float = 30.0) -> None:
        """Open on `objects` (shared with other backends) or on an empty store of its own.

        `deadline` bounds every wait, in seconds.
        """
        self.name = "memory"
        self.capabilities = Capabilities()
        self.objects = objects if objects is not None else ObjectStore()
        self._deadline = deadline
        self._closed = False
        self._registrations = Registrations(self.name, lambda: self._under_way, self._deadline)
        self._under_way: list[BatchTransfer] = []
        self._work: queue.SimpleQueue[BatchTransfer | None] = queue.SimpleQueue()
        arguments = (self._work, self.objects)
        self._worker = threading.Thread(target=_work, args=arguments, name="memory", daemon=True)
        self._worker.start()
        # A backend that was dropped without close must not leave its thread behind.
        self._stop = weakref.finalize(self, self._work.put, None)

    def register(self, regions: Sequence[Region]) -> Registration:
        """Register host memory; see `kvconnect.backend.Backend.register`."""
        self._check_open("register")
        for region in regions:
            if region.device not in self.capabilities.devices:
                raise RegistrationError(
                    f"memory: {region} is on device {region.device!r}; only host memory (cpu) "
                    f"can be copied: stage through a host buffer"
                )
        return self._registrations.add(regions)

    def exists(self, keys: Sequence[str], nbytes: Sequence[int]) -> NDArray[np.bool_]:
        """Tell which keys are present with exactly these sizes: (keys,) bool."""
        self._check_open("exists")
        if len(keys) != len(nbytes):
            raise ConfigError(f"memory: exists got {len(keys)} keys and {len(nbytes)} sizes")
        sizes = self.objects.sizes(keys)
        pairs = zip(sizes, nbytes, strict=True)
        return np.array([has is not None and has == want for has, want in pairs], dtype=np.bool_)

    def submit(self, batch: Batch) -> BatchTransfer:
        """Queue a batch; see `kvconnect.backend.Backend.submit`."""
        need_distinct("memory", batch)
        transfer = BatchTransfer(batch, self._deadline)
        with self._registrations.lock:
            self._check_open(batch.op.value)
            self._registrations.check(batch)
            self._under_way = [t for t in self._under_way if not t.done()]
            self._under_way.append(transfer)
            self._work.put(transfer)
        return transfer

    def close(self) -> None:
        """Cancel what is queued, wait for what is moving, forget the store."""
        with self._registrations.lock:
            self._closed = True
            under_way = list(self._under_way)
        for transfer in under_way:
            transfer.cancel()
        self._stop()
        self._worker.join(self._deadline)
        if self._worker.is_alive():
            raise TransferTimeoutError(
                f"memory: close waited {self._deadline} s for {len(under_way)} transfers; their "
                f"memory is still leased: close again later"
            )

    def remove(self, keys: Sequence[str]) -> NDArray[np.bool_]:
        """Remove keys; True where one was there: (keys,) bool."""
        self._check_open("remove")
        return np.array([self.objects.remove(key) for key in keys], dtype=np.bool_)

    def list_keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with `prefix`, sorted."""
        self._check_open("list_keys")
        return self.objects.keys(prefix)

    def clear(self, prefix: str) -> int:
        """Remove all keys that begin with `prefix`; `ConfigError` if it is empty."""
        self._check_open("clear")
        need_prefix("memory", prefix)
        return sum(self.objects.remove(key) for key in self.objects.keys(prefix))

    def put_record(self, name: str, value: bytes) -> None:
        """Store or replace a record of at most 64 KiB."""
        self._check_open("put_record")
        self.objects.put_record(name, value)

    def records(self) -> dict[str, bytes]:
        """Return all records."""
        self._check_open("records")
        return self.objects.records()

    def stats(self) -> dict[str, int | float | str]:
        """Return objects, bytes, capacity and counts of evictions and expiries."""
        self._check_open("stats")
        return self.objects.stats()

    def __repr__(self) -> str:
        return f"MemoryBackend({self.objects!r}{', closed' if self._closed else ''})"

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise ClosedError(f"memory: {operation} after close; open the store again")


def _work(work: queue.SimpleQueue[BatchTransfer | None], objects: ObjectStore) -> None:
    # Not a method: a thread that holds the backend would keep it from being collected. The
    # one wait without a deadline, and it always ends: the finalizer puts the None. Nothing
    # follows the None, because `submit` refuses once `close` has begun.
    while (transfer := work.get()) is not None:
        _run(transfer, objects)


def _run(transfer: BatchTransfer, objects: ObjectStore) -> None:
    move = _store if transfer.batch.op is Op.STORE else _load
    own = frozenset(transfer.batch.keys)
    for index in range(len(transfer.batch)):
        if transfer.cancelled:
            transfer.settle(index, Status.CANCELLED)
            continue
        try:
            with objects.lock:
                move(transfer, index, objects, own)
        except Exception as error:  # noqa: BLE001 - one key's failure is data, not a crash
            transfer.settle(index, Status.BACKEND_ERROR, repr(error), dirty=True)
    transfer.finish()


def _runs(batch: Batch, index: int) -> list[tuple[int, int]]:
    """Return (address, nbytes) of each run of object `index`, in order."""
    rows = slice(int(batch.first[index]), int(batch.first[index + 1]))
    return list(zip(batch.address[rows].tolist(), batch.nbytes[rows].tolist(), strict=True))


def _store(transfer: BatchTransfer, index: int, objects: ObjectStore, own: frozenset[str]) -> None:
    batch = transfer.batch
    data = b"".join(_read(address, nbytes) for address, nbytes in _runs(batch, index))
    if not data:
        transfer.settle(index, Status.SIZE_MISMATCH, "0 B; an object has at least one byte")
        return
    # The batch's own keys are not victims: what this call reports as stored must be there
    # when it returns.
    status = objects.put(batch.keys[index], data, ttl=batch.ttl, pin=batch.pin, keep=own)
    cause = f"{len(data)} B do not fit: {objects!r}" if status is Status.NO_SPACE else ""
    transfer.settle(index, status, cause)


def _load(transfer: BatchTransfer, index: int, objects: ObjectStore, _own: frozenset[str]) -> None:
    key, runs = transfer.batch.keys[index], _runs(transfer.batch, index)
    found, want = objects.find(key), sum(nbytes for _, nbytes in runs)
    if found is None:
        transfer.settle(index, Status.ABSENT)
    elif len(found.data) != want:
        cause = f"{len(found.data)} B stored, {want} B asked for"
        transfer.settle(index, Status.SIZE_MISMATCH, cause)
    elif checksum(key, found.data) != found.checksum:
        # Dropped, so that the next store of the same bytes repairs it.
        objects.remove(key)
        transfer.settle(index, Status.CHECKSUM, f"{want} B are not what was stored; dropped")
    else:
        _scatter(found.data, runs)
        objects.touch(key)
        late = objects.expired(found)
        transfer.settle(index, Status.LEASE_EXPIRED if late else Status.OK, dirty=late)


def _scatter(data: bytes, runs: list[tuple[int, int]]) -> None:
    at = 0
    for address, nbytes in runs:
        ctypes.memmove(address, data[at : at + nbytes], nbytes)
        at += nbytes


def _read(address: int, nbytes: int) -> bytes:
    # memmove, not ctypes.string_at: the latter takes a C int and wraps at 2 GiB.
    data = ctypes.create_string_buffer(nbytes)
    ctypes.memmove(data, address, nbytes)
    return data.raw


_shared: dict[str, ObjectStore] = {}
_shared_lock = threading.Lock()


def open_backend(location: str, options: Mapping[str, str]) -> Backend:
    """Open `memory://` (a store of its own) or `memory://NAME`.

    Every open of one NAME in this process sees the same store, which lives until the process
    ends. Raises `ConfigError` for an unknown option or a capacity that disagrees with it.
    """
    parsed = parse_options(options, MemoryOptions, "memory")
    if not location:
        return MemoryBackend(ObjectStore(parsed.capacity), deadline=parsed.deadline)
    with _shared_lock:
        objects = _shared.setdefault(location, ObjectStore(parsed.capacity))
    if parsed.capacity not in {None, objects.capacity}:
        raise ConfigError(
            f"memory://{location}: capacity={parsed.capacity} B, but the store is open with "
            f"{objects.capacity} B; leave the option out or use another name"
        )
    return MemoryBackend(objects, deadline=parsed.deadline)


_: type[Backend] = MemoryBackend
