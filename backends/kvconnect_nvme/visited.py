"""One visited mark per object, shared by all processes and written without a lock.

Eviction wants to know what was read since it last came by; an index transaction per read
would cost more than the read. So marks are bytes of a memory-mapped file, at a hash of the
object's address. Two objects may share a mark: then one is spared once too often, no more.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Closing
from kvconnect_nvme.failures import translated

_PRIME = 0x9E3779B97F4A7C15


class Visited(Closing):
    """The marks of a store with `capacity` bytes."""

    def __init__(self, path: Path, capacity: int) -> None:
        """Map the file, one mark per 64 KiB of capacity, from 64 KiB to 16 MiB of marks."""
        wanted = max(capacity >> 16, 1).bit_length()
        self._bits = min(max(wanted, 16), 24)
        with translated(f"visited marks {path}"):
            fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                if os.fstat(fd).st_size < 1 << self._bits:
                    os.posix_fallocate(fd, 0, 1 << self._bits)
                self._map: mmap.mmap | None = mmap.mmap(fd, 1 << self._bits)
            finally:
                os.close(fd)
        self._marks: NDArray[np.uint8] | None = np.frombuffer(self._map, dtype=np.uint8)

    def mark(self, addresses: list[int]) -> None:
        """Note that the objects at these addresses were read."""
        if self._marks is not None and addresses:
            at = np.array(addresses, dtype=np.uint64) >> np.uint64(12)
            self._marks[self._slot(at)] = 1

    def take(self, address: int) -> bool:
        """Return whether the object was read since the last call, and clear its mark."""
        if self._marks is None:
            return False
        at = (((address >> 12) * _PRIME) & (2**64 - 1)) >> (64 - self._bits)
        seen = bool(self._marks[at])
        self._marks[at] = 0
        return seen

    def _slot(self, blocks: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return (blocks * np.uint64(_PRIME)) >> np.uint64(64 - self._bits)

    def close(self) -> None:
        """Unmap; the second call does nothing."""
        self._marks = None
        if self._map is not None:
            self._map.close()
            self._map = None
