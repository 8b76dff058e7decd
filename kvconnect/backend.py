"""The backend protocol: what a store must do, and the values that cross the boundary.

Backends see descriptors (address, nbytes) inside registered regions, never layouts.

Memory model. The caller owns every byte. From `submit` until `Transfer.done()` is true the
described memory is leased to the backend: it may be read (store) or written (load) at any
time, also after a time-out or `cancel()`. Nothing of it may be reused before.

Lifecycle. 1 `register` regions, 2 `submit` batches, 3 poll `done()` or `wait(timeout)`,
4 `Registration.close()`, 5 `Backend.close()`. Both closes are idempotent.

Threading. Every method of a backend may be called from any thread at any time.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvconnect.errors import ConfigError
from kvconnect.region import Region


class Status(enum.IntEnum):
    """What became of one key. Everything but OK is a miss (load) or not stored (store)."""

    OK = 0
    ABSENT = 1
    SIZE_MISMATCH = 2
    CHECKSUM = 3
    IDENTITY = 4
    TIMEOUT = 5
    BACKEND_ERROR = 6
    CANCELLED = 7
    NO_SPACE = 8
    LEASE_EXPIRED = 9
    PARTIAL = 10
    """Another object of the same page is missing (page level only)."""
    NOT_WRITER = 11
    """A replica that is not the elected writer did not store (page level only)."""


class Op(enum.Enum):
    """Direction of a batch: STORE reads the described memory, LOAD writes it."""

    STORE = "store"
    LOAD = "load"


@dataclass(frozen=True, slots=True)
class Batch:
    """Objects to move, as compressed rows: key i owns the runs first[i]:first[i+1].

    `address`, `nbytes`: (runs,) uint64; `first`: (keys + 1,) int64, from 0 to runs, strictly
    rising. The bytes of an object are its runs in order. Keys are distinct strings.
    """

    op: Op
    keys: Sequence[str]
    address: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]
    first: NDArray[np.int64]
    ttl: float | None = None
    """Seconds until a stored object may be dropped; None keeps it until evicted."""
    pin: bool = False
    """Keep stored objects until removed: eviction skips them."""

    def __post_init__(self) -> None:
        """Check the shapes once, so that backends need not."""
        if len(self.first) != len(self.keys) + 1:
            raise ConfigError(f"batch: {len(self.keys)} keys need {len(self.keys) + 1} row bounds")
        if len(self.address) != len(self.nbytes) or int(self.first[-1]) != len(self.address):
            raise ConfigError(
                f"batch: {len(self.address)} addresses, {len(self.nbytes)} sizes, rows end at "
                f"{int(self.first[-1])}; all three must agree"
            )
        if len(self.keys) and (int(self.first[0]) != 0 or (np.diff(self.first) < 1).any()):
            raise ConfigError("batch: every key needs at least one run, rows start at 0")

    def __len__(self) -> int:
        return len(self.keys)

    def object_nbytes(self) -> NDArray[np.uint64]:
        """Bytes of each object: (keys,) uint64."""
        if not len(self.keys):
            return np.zeros(0, dtype=np.uint64)
        return np.add.reduceat(self.nbytes, self.first[:-1])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of each key of a batch.

    `status`: (keys,) uint8 of `Status`; `causes`: words for the keys that have more to say;
    `nbytes`: bytes confirmed, counting whole objects with status OK only;
    `dirty`: (keys,) bool, True where a load that is not OK may have written its destination.
    """

    status: NDArray[np.uint8]
    nbytes: int
    causes: Mapping[int, str] = field(default_factory=dict)
    dirty: NDArray[np.bool_] | None = None

    @property
    def ok(self) -> NDArray[np.bool_]:
        """Which keys are OK: (keys,) bool."""
        return np.asarray(self.status == Status.OK)

    @property
    def prefix(self) -> int:
        """How many leading keys are OK."""
        bad = np.flatnonzero(self.status != Status.OK)
        return int(bad[0]) if len(bad) else len(self.status)

    def counts(self) -> dict[str, int]:
        """Count keys by status name, zero counts left out."""
        values, numbers = np.unique(self.status, return_counts=True)
        return {Status(int(v)).name: int(n) for v, n in zip(values, numbers, strict=True)}

    def __repr__(self) -> str:
        words = ", ".join(f"{name} {n}" for name, n in self.counts().items())
        return f"Outcome({words or 'empty'}, prefix {self.prefix}, {self.nbytes} B)"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can take, consulted before a plan is made.

    `max_runs_per_object` 1 means no scatter-gather. Runs below `min_run_bytes` are staged.
    `alignment` (bytes) is what address and size must be multiples of for zero-copy; a backend
    that copes with any address says 1. `max_region_bytes` bounds one registration.
    """

    scatter_gather: bool = True
    max_runs_per_object: int = 1 << 20
    min_run_bytes: int = 1
    alignment: int = 1
    devices: tuple[str, ...] = ("cpu",)
    atomic_store: bool = True
    durable: bool = False
    range_read: bool = False
    max_region_bytes: int | None = None
    lease_seconds: float | None = None
    """How long what `exists` or a load has seen stays readable; a load that took longer is a
    miss whatever it returned. None where objects cannot vanish under a reader."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where the bytes of one object lie, for people who look after a store.

    `offset` and `nbytes` are bytes inside the file or device `path`, a contiguous range.
    `intact`: whether what lies there is what was stored, None where nothing proves it.
    `expires`: seconds since 1970, None for never.
    """

    path: str
    offset: int
    nbytes: int
    intact: bool | None
    pinned: bool = False
    expires: float | None = None


class Closable(Protocol):
    """Closes twice safely, and is a context manager."""

    def close(self) -> None:
        """Release everything; the second call does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Closing:
    """Context-manager half of `Closable`: inherit it and define `close`."""

    def close(self) -> None:
        """Release everything; the second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Registration(Closable, Protocol):
    """Regions a backend may touch, until closed."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions as registered (after chunking)."""


class Transfer(Protocol):
    """A batch under way."""

    def done(self) -> bool:
        """Tell, without blocking, whether the backend has let go of the memory."""

    def wait(self, timeout: float | None = None) -> Outcome:
        """Wait at most `timeout` seconds for the outcome.

        Keys not confirmed by then have status TIMEOUT (dirty, for loads); the memory stays
        leased until `done()`. None means the backend's own deadline, never for ever.
        """

    def cancel(self) -> None:
        """Ask to stop early; keys not moved become CANCELLED. Does not wait."""


@runtime_checkable
class Backend(Closable, Protocol):
    """A store of immutable objects under fixed-length keys."""

    @property
    def name(self) -> str:
        """Short name for messages and metrics."""

    @property
    def capabilities(self) -> Capabilities:
        """What this backend can take."""

    def register(self, regions: Sequence[Region]) -> Registration:
        """Register all regions or raise `RegistrationError` with none registered.

        The same region may be registered again by another caller (refcounted).
        """

    def exists(self, keys: Sequence[str], nbytes: Sequence[int]) -> NDArray[np.bool_]:
        """Tell which keys are present with exactly these sizes: (keys,) bool. Touches no data.

        Raises `UnavailableError` if the store cannot be asked.
        """

    def submit(self, batch: Batch) -> Transfer:
        """Start a batch and return at once.

        Raises `RegistrationError` if a run lies outside every registered region and
        `ClosedError` after `close`. Storing a key that exists: same bytes are OK without
        writing, other bytes replace the object. A key is visible only after all its bytes are.
        """


@runtime_checkable
class SupportsDelete(Protocol):
    """Objects can be removed one by one."""

    def remove(self, keys: Sequence[str]) -> NDArray[np.bool_]:
        """Remove keys; True where one was there."""


@runtime_checkable
class SupportsListing(Protocol):
    """Keys can be enumerated by prefix."""

    def list_keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with `prefix`, sorted."""


@runtime_checkable
class SupportsClear(Protocol):
    """A namespace (a key prefix) can be dropped at once."""

    def clear(self, prefix: str) -> int:
        """Remove all keys that begin with `prefix` (not empty); return how many."""


@runtime_checkable
class SupportsRecords(Protocol):
    """Small named records beside the objects: each namespace keeps its identity here."""

    def put_record(self, name: str, value: bytes) -> None:
        """Store or replace a record of at most 64 KiB; it survives as objects do."""

    def records(self) -> dict[str, bytes]:
        """Return all records."""


@runtime_checkable
class SupportsStats(Protocol):
    """Numbers about the store."""

    def stats(self) -> dict[str, int | float | str]:
        """Return flat counters and sizes in bytes."""


@runtime_checkable
class SupportsLocate(Protocol):
    """Objects are ranges of files or devices, which can be named."""

    def locate(self, keys: Sequence[str]) -> list[Location | None]:
        """Return where each key's bytes are; None where it is absent. May read all of them."""
