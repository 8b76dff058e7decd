"""Slots: the memory that objects pass through on their way between pool and server.

Why they exist: an object is one request with its trailer, and the trailer is not beside the page.
It also is what keeps pages safe: NIXL cannot cancel, so what a stalled server sends at last lands
in a slot that is not given out again before, and never in a page.
"""

from __future__ import annotations

import ctypes
import mmap
import threading

from kvconnect.backend import Closing
from kvconnect.first_fit import FirstFit
from kvconnect.region import Region

STEP = 4096
"""Bytes that slots begin at multiples of."""


class Slot:
    """A piece of the pool: `view` of its bytes, and their `address`."""

    __slots__ = ("address", "offset", "view")

    def __init__(self, view: memoryview, address: int, offset: int) -> None:
        """`offset`: bytes from the start of the pool."""
        self.view, self.address, self.offset = view, address, offset

    @property
    def region(self) -> Region:
        """The slot as a region, for copying."""
        return Region("slot", self.address, len(self.view))


class SlotPool(Closing):
    """Hands out slots of one mapping, first fit from the bottom; pages are touched as needed.

    Invariant: slots that are out do not overlap.
    """

    def __init__(self, nbytes: int) -> None:
        """Map `nbytes`, rounded up to whole steps."""
        self.nbytes = _up(nbytes)
        self._memory = memoryview(mmap.mmap(-1, self.nbytes))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._parts = FirstFit(self.nbytes)
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Slot | None:
        """Return a slot of `nbytes`, or None where none is free now."""
        with self._lock:
            offset = self._parts.take(_up(nbytes))
        if offset is None:
            return None
        return Slot(self._memory[offset : offset + nbytes], self.address + offset, offset)

    def give(self, slot: Slot) -> None:
        """Take a slot back; nothing may write to it any more."""
        with self._lock:
            self._parts.give(slot.offset, _up(len(slot.view)))

    def close(self) -> None:
        """Return the memory to the system, whoever still holds this object."""
        self._memory = memoryview(b"")

    @property
    def out(self) -> int:
        """Bytes of the slots that are out."""
        return self._parts.out

    @property
    def touched(self) -> int:
        """Bytes of the mapping that were ever used."""
        return self._parts.touched


def _up(nbytes: int) -> int:
    return -(-nbytes // STEP) * STEP
