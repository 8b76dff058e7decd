"""Damage on the wire, for tests: one byte of a batch arrives changed, and no library notices.

TCP's own checksum lets about one damaged segment in 65 536 through, and a network card, a
switch or a driver may do worse. Nothing on a test's network ever does, so it is made here: the
source's byte is changed while the batch is under way and then put back, a pulled byte once it
has landed. Both ends believe what they read and wrote; only an end-to-end checksum knows better.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from typing import Any

from kvconnect.backend import Closing, Registration
from kvconnect.disagg.transport import (
    Peer,
    PeerCapabilities,
    PeerTransfer,
    PeerTransport,
    Runs,
    Way,
)
from kvconnect.hostmem import HostMemory
from kvconnect.region import Region

_QUIET_SECONDS = 60.0
_POLL_SECONDS = 0.01


class Flipping(Closing):
    """A transport that does all that the inner one does, and flips a byte where it is told to."""

    def __init__(self, inner: PeerTransport) -> None:
        """Wrap; the inner one is closed with it."""
        self._inner = inner
        self._left = 0
        self._lock = threading.Lock()

    def flip(self, batches: int) -> None:
        """Damage the next `batches` batches."""
        with self._lock:
            self._left = batches

    @property
    def left(self) -> int:
        """Batches that are still to be damaged."""
        return self._left

    @property
    def name(self) -> str:
        """The inner one's."""
        return self._inner.name

    @property
    def capabilities(self) -> PeerCapabilities:
        """The inner one's."""
        return self._inner.capabilities

    @property
    def generation(self) -> str:
        """The inner one's."""
        return self._inner.generation

    def register(self, regions: Sequence[Region]) -> Registration:
        """Register with the inner one."""
        return self._inner.register(regions)

    def allocate(self, nbytes: int, label: str) -> HostMemory:
        """Allocate from the inner one."""
        return self._inner.allocate(nbytes, label)

    def describe(self) -> bytes:
        """Describe the inner one."""
        return self._inner.describe()

    def connect(self, metadata: bytes, timeout: float) -> Peer:
        """Connect by the inner one."""
        return self._inner.connect(metadata, timeout)

    def submit(self, peer: Peer, way: Way, runs: Runs, timeout: float) -> PeerTransfer:
        """Start moving; a batch that is damaged is quiet, or 60 s old, when this returns."""
        with self._lock:
            damage = self._left > 0 and runs.total > 0
            self._left -= damage
        if not damage:
            return self._inner.submit(peer, way, runs, timeout)
        place: Any = ctypes.c_uint8.from_address(int(runs.filled().local[0]))
        was = place.value
        if way is Way.PUSH:
            place.value = was ^ 0x10
        transfer = self._inner.submit(peer, way, runs, timeout)
        until = time.monotonic() + _QUIET_SECONDS
        while not transfer.done() and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        place.value = was if way is Way.PUSH else place.value ^ 0x10
        return transfer

    def close(self) -> None:
        """Close the inner one."""
        self._inner.close()


_: type[PeerTransport] = Flipping
