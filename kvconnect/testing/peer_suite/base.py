"""What the parts of the suite share: hooks, guarded memory, two connected transports."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvconnect.backend import Closing
from kvconnect.disagg.transport import Peer, PeerOutcome, PeerTransport, Runs, Way
from kvconnect.disagg.transports import open_transport
from kvconnect.region import Region
from kvconnect.testing.peer_suite.rank import CANARY, GUARD, Rank

WAIT = 30.0
"""Seconds that anything may take which is not expected to end by a deadline."""

Bytes = NDArray[np.uint8]


class Block(Closing):
    """Memory that a peer can reach: `data` is registered, canaries lie on both sides of it."""

    def __init__(self, transport: PeerTransport, nbytes: int, *, register: bool = True) -> None:
        """Allocate it with the transport; register it unless told not to."""
        self._memory = transport.allocate(nbytes + 2 * GUARD, "suite")
        self._whole: Bytes = np.ndarray(
            [nbytes + 2 * GUARD], dtype=np.uint8, buffer=self._memory.keep_alive()
        )
        self._whole[:] = CANARY
        self.data = self._whole[GUARD : GUARD + nbytes]
        self.region = Region("suite", int(self.data.ctypes.data), nbytes)
        self.handle = transport.register([self.region]) if register else None

    @property
    def address(self) -> int:
        """Where `data` begins."""
        return self.region.address

    def intact(self) -> bool:
        """Tell whether the canaries are."""
        return bool(
            (self._whole[:GUARD] == CANARY).all() and (self._whole[-GUARD:] == CANARY).all()
        )

    def close(self) -> None:
        """Unregister it and let it go."""
        if self.handle is not None:
            self.handle.close()
        self._memory.close()


def runs_of(local: ArrayLike, remote: ArrayLike, nbytes: ArrayLike) -> Runs:
    """Return runs of three arrays or scalars."""
    columns = [np.atleast_1d(np.asarray(c, dtype=np.uint64)) for c in (local, remote, nbytes)]
    return Runs(*(np.ascontiguousarray(c) for c in np.broadcast_arrays(*columns)))


def whole(block: Block, address: int, *, piece: int | None = None) -> Runs:
    """Return runs of `piece` bytes that cover a block and as many bytes at the peer."""
    size = piece or block.region.nbytes
    at = np.arange(0, block.region.nbytes, size, dtype=np.uint64)
    return runs_of(at + np.uint64(block.address), at + np.uint64(address), size)


def until(condition: Callable[[], bool], seconds: float = WAIT) -> float:
    """Wait for a condition; returns the seconds it took, fails after `seconds`."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() < started + seconds, f"not so after {seconds} s"
        time.sleep(0.005)
    return time.monotonic() - started


class SuiteBase:
    """Hooks and declared differences."""

    transport = ""
    """Name for `open_transport`."""
    options: Mapping[str, object] = {}
    rounds = 2
    """Rounds of each test that kills a process."""
    stops = 1
    """Rounds of each test that stops one for some seconds."""
    bulk = 32 << 20
    """Bytes of a batch that is to be under way when something happens."""

    def open(self) -> PeerTransport:
        """Open the transport in this process."""
        return open_transport(self.transport, self.options)

    def rank(self, nbytes: int) -> Rank:
        """Start a rank in another process; it must use the same transport."""
        return Rank(self.transport, self.options, nbytes)

    @contextlib.contextmanager
    def two(self, nbytes: int) -> Iterator[tuple[PeerTransport, Peer, Block, Block]]:
        """Yield a transport, its peer in this process, and a block of each, random bytes."""
        rng = np.random.default_rng(7)
        with self.open() as ours, self.open() as theirs:
            mine, other = Block(ours, nbytes), Block(theirs, nbytes)
            for block in (mine, other):
                block.data[:] = rng.integers(0, 256, nbytes, dtype=np.uint8)
            with mine, other, ours.connect(theirs.describe(), WAIT) as peer:
                yield ours, peer, mine, other
                assert mine.intact()
                assert other.intact()

    @staticmethod
    def move(ours: PeerTransport, peer: Peer, way: Way, runs: Runs) -> PeerOutcome:
        """Move to the end and return the outcome, which must be quiet."""
        transfer = ours.submit(peer, way, runs, WAIT)
        outcome = transfer.wait(WAIT)
        assert transfer.done(), outcome
        return outcome
