"""The peer-transport protocol: moving runs between two ranks' registered memory.

Memory model. Each side registers its own memory once. `describe` gives bytes that the control
channel carries to the peer; `connect` turns them into a `Peer`, whose `grants` are the only
memory of the other side that may be named. From `submit` until `PeerTransfer.done()` the local
runs are leased and the remote runs may be read or written at any time, also after a time-out,
a failure or `cancel()`: a failure is not quiescence.

Lifecycle. 1 `register`, 2 `describe` and `connect`, 3 `submit`, poll `done()` or `wait`,
4 `Peer.close()`, 5 `Registration.close()`, 6 `PeerTransport.close()`. Closes are idempotent.

Generations. Metadata carries a generation that no other start of any transport has. A peer that
restarted on the same address is another peer: what was connected before fails, it never reaches
the new process's memory by an old address.

Threading. Every method may be called from any thread.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Closable, Registration
from kvconnect.errors import ConfigError
from kvconnect.hostmem import HostMemory
from kvconnect.region import Region, RegionTable


class Way(enum.Enum):
    """Direction as the caller sees it: PUSH writes the peer's memory, PULL reads it."""

    PUSH = "push"
    PULL = "pull"


class PeerStatus(enum.IntEnum):
    """What became of a batch; only OK means that every byte has landed."""

    OK = 0
    FAILED = 1
    TIMEOUT = 2
    CANCELLED = 3
    PEER_GONE = 4


@dataclass(frozen=True, slots=True)
class PeerOutcome:
    """The end of a batch: `nbytes` are confirmed bytes, all of them or none."""

    status: PeerStatus
    nbytes: int = 0
    cause: str = ""

    @property
    def ok(self) -> bool:
        """Whether every byte has landed."""
        return self.status is PeerStatus.OK


@dataclass(frozen=True, slots=True)
class Runs:
    """A batch: run i moves nbytes[i] bytes between local[i] and remote[i]; (runs,) uint64."""

    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]

    def __post_init__(self) -> None:
        """Check the shapes once."""
        if not len(self.local) == len(self.remote) == len(self.nbytes):
            raise ConfigError(
                f"runs: {len(self.local)} local, {len(self.remote)} remote addresses and "
                f"{len(self.nbytes)} sizes; all three must agree"
            )

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total(self) -> int:
        """Bytes of all runs."""
        return int(self.nbytes.sum())

    def filled(self) -> Runs:
        """Return the runs that have any bytes."""
        keep = self.nbytes > 0
        if keep.all():
            return self
        return Runs(self.local[keep], self.remote[keep], self.nbytes[keep])

    def part(self, start: int, stop: int) -> Runs:
        """Return runs [start, stop)."""
        cut = slice(start, stop)
        return Runs(self.local[cut], self.remote[cut], self.nbytes[cut])


@dataclass(frozen=True, slots=True)
class PeerCapabilities:
    """What a transport takes and what it costs.

    `max_entries`, `max_bytes` bound one batch. A batch costs about `run_seconds` per run and
    `byte_seconds` per byte: planners stage where runs are so short that the first term rules.
    """

    ways: tuple[Way, ...] = (Way.PUSH, Way.PULL)
    max_entries: int = 1 << 20
    max_bytes: int = 1 << 30
    max_region_bytes: int | None = None
    devices: tuple[str, ...] = ("cpu",)
    run_seconds: float = 1e-6
    byte_seconds: float = 2e-10

    def seconds(self, runs: int, nbytes: int) -> float:
        """Return about how long a batch takes."""
        return runs * self.run_seconds + nbytes * self.byte_seconds


class PeerTransfer(Protocol):
    """A batch under way."""

    def done(self) -> bool:
        """Tell, without blocking, whether both sides' memory is free of this batch."""

    def wait(self, timeout: float) -> PeerOutcome:
        """Wait at most `timeout` seconds; TIMEOUT where it is not over by then.

        Returns as soon as the outcome is known, for a failure perhaps long before `done`; OK
        means done. Never waits beyond the batch's own deadline.
        """

    def cancel(self) -> None:
        """Ask to stop early. Does not wait; `done` says when it is quiet."""


class Peer(Closable, Protocol):
    """The other side, as connected: one generation of it."""

    @property
    def generation(self) -> str:
        """Which start of the other side this is."""

    @property
    def grants(self) -> RegionTable:
        """The peer's memory that may be named."""

    def alive(self) -> bool:
        """Tell, without blocking, whether the peer may still touch anything."""


@runtime_checkable
class SupportsReach(Protocol):
    """A transport whose peers' memory is mapped in this process."""

    def reach(self, peer: Peer, address: int, nbytes: int) -> NDArray[np.uint8]:
        """Return granted memory of a peer, mapped as long as the array lives.

        What is written there has arrived, if the peer is alive afterwards. Raises
        `RegistrationError` where it was not granted, `UnavailableError` where the peer is gone.
        """


class PeerTransport(Closable, Protocol):
    """One rank's end of a peer-to-peer transport."""

    @property
    def name(self) -> str:
        """Short name, as in options."""

    @property
    def capabilities(self) -> PeerCapabilities:
        """What it takes."""

    @property
    def generation(self) -> str:
        """Which start of this side this is."""

    def register(self, regions: Sequence[Region]) -> Registration:
        """Register local memory, all or nothing; refcounted. `RegistrationError` on failure."""

    def allocate(self, nbytes: int, label: str) -> HostMemory:
        """Allocate host memory that peers can reach once it is registered."""

    def describe(self) -> bytes:
        """Return what a peer needs to connect: generation, how to reach us, granted regions."""

    def connect(self, metadata: bytes, timeout: float) -> Peer:
        """Connect to the side that `metadata` describes.

        Raises `ConfigError` on metadata that cannot be and `UnavailableError` when the side is
        not there (any more).
        """

    def submit(self, peer: Peer, way: Way, runs: Runs, timeout: float) -> PeerTransfer:
        """Start moving; returns at once. `timeout` seconds until it ends as TIMEOUT.

        Raises `RegistrationError` before anything moves where a run is not inside registered
        memory here or granted memory there.
        """
