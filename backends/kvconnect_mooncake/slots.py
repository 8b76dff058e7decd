"""The side buffer: registered once, cut into slots of one trailer each.

A slot belongs to a transfer until the library is quiet, as the caller's memory does.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections import deque

from kvconnect.region import Region
from kvconnect_mooncake.trailer import SLOT


class SlotPool:
    """Slots of `SLOT` bytes in one allocation; thread-safe.

    Invariant: an address is free or taken, never both; nothing is allocated after the start.
    """

    def __init__(self, nbytes: int) -> None:
        """Allocate `nbytes`, whole slots of it."""
        self._memory = mmap.mmap(-1, nbytes)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.region = Region("mooncake trailers", base, nbytes)
        self.total = nbytes // SLOT
        self._free = deque(base + SLOT * i for i in range(self.total))
        self._changed = threading.Condition()

    def take(self, count: int, until: float) -> list[int] | None:
        """Return `count` addresses, or None if they are not free by `until` (monotonic)."""
        with self._changed:
            left = until - time.monotonic()
            if count > self.total or not self._changed.wait_for(
                lambda: len(self._free) >= count, max(left, 0)
            ):
                return None
            return [self._free.popleft() for _ in range(count)]

    def give(self, addresses: list[int]) -> None:
        """Give slots back that the library has let go of."""
        with self._changed:
            self._free.extend(addresses)
            self._changed.notify_all()

    @property
    def used(self) -> int:
        """Slots taken now."""
        return self.total - len(self._free)


def write(address: int, data: bytes) -> None:
    """Copy `data` to a slot."""
    ctypes.memmove(address, data, len(data))


def read(address: int, nbytes: int) -> bytes:
    """Return the first bytes of a slot."""
    return ctypes.string_at(address, nbytes)
