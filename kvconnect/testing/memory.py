"""Guarded memory: buffers that notice every byte written where none should be.

A canary that repeats would miss data that is shifted by its period, so each byte depends on
its position in a way that does not.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Batch, Op
from kvconnect.region import Region

GUARD_BYTES = 4096
_numbers = itertools.count()
_recent: collections.deque[mmap.mmap] = collections.deque(maxlen=64)
# A test that fails drops its memory, perhaps under a transfer that should not be there: kept
# a little longer, that is a failed test and not a segmentation fault of the whole run.


def payload(seed: str, nbytes: int) -> bytes:
    """Return `nbytes` that depend on all of `seed`, the same in every process.

    >>> payload("a", 4) == payload("a", 4), payload("a", 4) == payload("b", 4)
    (True, False)
    """
    return hashlib.shake_128(seed.encode()).digest(nbytes)


def canary(nbytes: int) -> NDArray[np.uint8]:
    """Return the guard pattern: (nbytes,) uint8."""
    place = np.arange(nbytes, dtype=np.uint64)
    mixed = (place + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(56)).astype(np.uint8)


class GuardedBuffer:
    """`nbytes` of page-aligned memory, `offset` bytes in, with guards before and after.

    The whole allocation begins as canary. `region` is what to register, `view` its bytes.
    """

    def __init__(self, nbytes: int, offset: int = 0) -> None:
        """`offset` shifts the region off the page boundary, to test unaligned bases."""
        self.offset = GUARD_BYTES + offset
        total = self.offset + nbytes + GUARD_BYTES
        memory = mmap.mmap(-1, total)
        _recent.append(memory)
        self._all = np.frombuffer(memory, dtype=np.uint8)
        self._canary = canary(total)
        self._all[:] = self._canary
        self.view = self._all[self.offset : self.offset + nbytes]
        name = f"guarded{next(_numbers)}"
        self.region = Region(name, int(self._all.ctypes.data) + self.offset, nbytes)

    def canaries(self) -> NDArray[np.bool_]:
        """Tell which bytes of the region still are canary: (nbytes,) bool."""
        inside = slice(self.offset, self.offset + len(self.view))
        return np.asarray(self.view == self._canary[inside])

    def check(self, used: Sequence[tuple[int, int]] = ()) -> None:
        """Raise AssertionError if a canary changed outside `used`: (offset, nbytes) ranges.

        Offsets count from the region's start; without `used` the region itself is free to
        change and only the guards are looked at.
        """
        allowed = np.zeros(len(self._all), dtype=np.bool_)
        for start, nbytes in used or [(0, len(self.view))]:
            allowed[self.offset + start : self.offset + start + nbytes] = True
        wrong = np.flatnonzero((self._all != self._canary) & ~allowed)
        if len(wrong):
            first = int(wrong[0]) - self.offset
            raise AssertionError(
                f"{self.region}: {len(wrong)} guard bytes changed, the first at offset {first}"
            )


class Objects:
    """Objects laid out in one guarded buffer, canary between all their runs.

    The runs lie in memory in another order than the objects have them, so that a backend that
    sorts or merges runs wrongly returns wrong bytes.
    """

    def __init__(self, runs: Sequence[Sequence[int]], *, offset: int = 0, gap: int = 64) -> None:
        """Place `runs`, the bytes of each run of each object, `gap` canary bytes apart."""
        self.runs = [list(sizes) for sizes in runs]
        self.sizes = [sum(sizes) for sizes in self.runs]
        self.places: list[list[int]] = [[0] * len(sizes) for sizes in self.runs]
        order = [(o, r) for o, sizes in enumerate(self.runs) for r in range(len(sizes))]
        at = gap
        for o, r in sorted(order, key=lambda pair: payload(f"{pair}", 8)):
            self.places[o][r] = at
            at += self.runs[o][r] + gap
        self.buffer = GuardedBuffer(at, offset)
        self.used = [
            (place, size)
            for places, sizes in zip(self.places, self.runs, strict=True)
            for place, size in zip(places, sizes, strict=True)
        ]

    @property
    def region(self) -> Region:
        """The region to register."""
        return self.buffer.region

    def __len__(self) -> int:
        return len(self.runs)

    def batch(
        self,
        op: Op,
        keys: Sequence[str],
        objects: Sequence[int] | None = None,
        *,
        ttl: float | None = None,
        pin: bool = False,
    ) -> Batch:
        """Describe `objects` (by default the first ones) under `keys`."""
        chosen = range(len(keys)) if objects is None else objects
        base = self.region.address
        address = [base + place for o in chosen for place in self.places[o]]
        nbytes = [size for o in chosen for size in self.runs[o]]
        first = [0, *itertools.accumulate(len(self.runs[o]) for o in chosen)]
        return Batch(
            op,
            list(keys),
            np.array(address, dtype=np.uint64),
            np.array(nbytes, dtype=np.uint64),
            np.array(first, dtype=np.int64),
            ttl,
            pin,
        )

    def write(self, index: int, data: bytes) -> None:
        """Put `data` into the runs of object `index`."""
        at = 0
        for place, size in zip(self.places[index], self.runs[index], strict=True):
            self.buffer.view[place : place + size] = np.frombuffer(data[at : at + size], np.uint8)
            at += size

    def read(self, index: int) -> bytes:
        """Return the bytes of object `index`."""
        pairs = zip(self.places[index], self.runs[index], strict=True)
        return b"".join(self.buffer.view[place : place + size].tobytes() for place, size in pairs)

    def untouched(self, index: int) -> bool:
        """Tell whether every byte of object `index` still is canary."""
        canaries = self.buffer.canaries()
        pairs = zip(self.places[index], self.runs[index], strict=True)
        return all(bool(canaries[place : place + size].all()) for place, size in pairs)

    def check(self) -> None:
        """Raise AssertionError if a byte outside all runs changed."""
        self.buffer.check(self.used)
