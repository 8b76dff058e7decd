"""Which objects were read since the eviction hand last passed: a byte each, shared by mmap.

A read must not take the writer's lock, so the bit is not in the index. The byte is found by a
hash of the address; two objects may share one, which at worst keeps one of them a turn longer.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Closing
from kvconnect_nvme.foreign import mapped
from kvconnect_nvme.options import BLOCK

SMALLEST, LARGEST = 64 << 10, 16 << 20
_MIX = np.uint64(0x9E3779B97F4A7C15)


class Visited(Closing):
    """The shared bytes. Racing writers are harmless: all of them write the same value."""

    def __init__(self, path: Path, capacity: int) -> None:
        """Map the file at `path`, created for `capacity` bytes of objects if it is missing."""
        wanted = SMALLEST
        while wanted < LARGEST and wanted * 16 * BLOCK < capacity:
            wanted *= 2
        with mapped(f"open {path}"):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                size = os.fstat(fd).st_size
                if size < SMALLEST or size & (size - 1):
                    # Reserved, because a sparse mapping on a full disk ends in SIGBUS.
                    os.posix_fallocate(fd, 0, wanted)
                    os.ftruncate(fd, size := wanted)
                self._map = mmap.mmap(fd, size)
            finally:
                os.close(fd)
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self._shift = np.uint64(64 - size.bit_length() + 1)

    def _slots(self, address: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return (address // np.uint64(BLOCK) * _MIX) >> self._shift

    def mark(self, address: NDArray[np.uint64]) -> None:
        """Note that the objects at these addresses, (objects,) uint64, were used."""
        self._bytes[self._slots(address)] = 1

    def forget(self, address: NDArray[np.uint64]) -> None:
        """Note that these addresses hold new objects, not used yet."""
        self._bytes[self._slots(address)] = 0

    def take(self, address: int) -> bool:
        """Tell whether the object at `address` was used, and forget it."""
        slot = int(self._slots(np.array([address], dtype=np.uint64))[0])
        was = bool(self._bytes[slot])
        self._bytes[slot] = 0
        return was

    def close(self) -> None:
        """Drop the mapping once nothing looks at it any more."""
        self._bytes = np.zeros(len(self._bytes), dtype=np.uint8)
        # Where a thread still looks, the map goes with the last look instead.
        with suppress(BufferError):
            self._map.close()
