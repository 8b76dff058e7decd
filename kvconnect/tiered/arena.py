"""`Arena`: registered memory of the tiered store's own, for copies between tiers.

Bounded and registered once: a copy never holds the caller's memory, and nothing is registered
per transfer.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Batch, Closing, Op
from kvconnect.first_fit import FirstFit
from kvconnect.hostmem import allocate
from kvconnect.region import Region

ALIGN = 4096


class Arena(Closing):
    """`nbytes` handed out first-fit in page-aligned pieces.

    Invariant: pieces handed out are disjoint and stay inside the region.
    """

    def __init__(self, name: str, nbytes: int) -> None:
        """Map the memory; it takes room only once it is touched."""
        self.nbytes = -(-nbytes // ALIGN) * ALIGN
        self._memory = allocate(self.nbytes, name, pin=False)
        self.region = Region(name, self._memory.address, self.nbytes)
        self._parts = FirstFit(self.nbytes)
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Bytes handed out."""
        return self._parts.out

    def take(self, nbytes: int) -> tuple[int, int] | None:
        """Return (address, bytes) of a piece of at least `nbytes`; None if there is no room."""
        size = max(-(-nbytes // ALIGN), 1) * ALIGN
        with self._lock:
            offset = self._parts.take(size)
        return None if offset is None else (self.region.address + offset, size)

    def give(self, piece: tuple[int, int]) -> None:
        """Take a piece back."""
        with self._lock:
            self._parts.give(piece[0] - self.region.address, piece[1])

    def close(self) -> None:
        """Unmap; nothing may be handed out any more."""
        self._memory.close()

    def __repr__(self) -> str:
        return f"Arena({self.region.name}, {self.used} of {self.nbytes} B)"


def padded(sizes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Round sizes up to what each object takes in a piece: (keys,) uint64."""
    unit = np.uint64(ALIGN)
    return np.asarray((sizes + unit - np.uint64(1)) // unit * unit)


def packed(
    op: Op,
    keys: list[str],
    sizes: NDArray[np.uint64],
    address: int,
    ttl: float | None = None,
    *,
    pin: bool = False,
) -> Batch:
    """Describe objects of one run each that lie one after another from `address`, padded."""
    ends = np.cumsum(padded(sizes), dtype=np.uint64)
    starts = np.concatenate((np.zeros(1, np.uint64), ends[:-1])) + np.uint64(address)
    return Batch(op, keys, starts, sizes, np.arange(len(keys) + 1, dtype=np.int64), ttl, pin)
