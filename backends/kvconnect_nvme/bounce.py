"""Bounce buffers: aligned memory for what cannot be moved in place, one bounded allocation.

The address range is reserved at the first use and its pages are touched only as needed, from
the bottom up; it is never given back, because faulting pages in anew costs more than the copy.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvconnect.errors import CapacityError, TransferTimeoutError
from kvconnect.first_fit import FirstFit
from kvconnect.region import Region
from kvconnect_nvme.engine import NoSlotError
from kvconnect_nvme.options import BLOCK, down, up


def aligned(nbytes: int) -> memoryview:
    """Return anonymous memory at a page boundary."""
    return memoryview(mmap.mmap(-1, nbytes))


def address_of(view: memoryview) -> int:
    """Return the address of writable memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Slot:
    """A piece of the pool: `view` and its `address`, a multiple of 4096."""

    __slots__ = ("address", "offset", "view")

    def __init__(self, view: memoryview, address: int, offset: int) -> None:
        """`offset`: bytes from the start of the pool."""
        self.view, self.address, self.offset = view, address, offset


class BouncePool:
    """Hands out slots, first fit from the bottom.

    Invariants: slots do not overlap; their addresses are multiples of 4096. A holder of a
    slot never waits for another one, so that waiting always ends.
    """

    def __init__(
        self, limit: int, timeout: float, made: Callable[[Region], object] = lambda _: None
    ) -> None:
        """`limit`: bytes of all slots together; `timeout`: seconds to wait for one.

        `made` is told of the memory once, before its first use.
        """
        self.limit, self._timeout, self._made = down(limit), timeout, made
        self._memory: memoryview | None = None
        self._base = 0
        self._parts = FirstFit(self.limit)
        self._changed = threading.Condition()

    @property
    def touched(self) -> int:
        """Bytes of the pool that were ever used."""
        return self._parts.touched

    @contextmanager
    def slot(self, nbytes: int, *, wait: bool = True) -> Iterator[Slot]:
        """Lend a slot of at least `nbytes`.

        Raises `CapacityError` if the pool is smaller, `TransferTimeoutError` if none came free,
        `NoSlotError` if none is and `wait` is false.
        """
        need = up(nbytes)
        if need > self.limit:
            raise CapacityError(
                f"nvme: {nbytes} B must pass through a bounce buffer, bounce={self.limit} B; "
                f"raise bounce= or align the memory to {BLOCK} B"
            )
        offset = self._acquire(need, wait=wait)
        try:
            memory = self._memory
            if memory is None:
                raise CapacityError("nvme: the bounce pool has no memory")
            yield Slot(memory[offset : offset + need], self._base + offset, offset)
        finally:
            self._release(offset, need)

    def _acquire(self, need: int, *, wait: bool) -> int:
        until = time.monotonic() + self._timeout
        with self._changed:
            if self._memory is None:
                memory = aligned(self.limit)
                self._base = address_of(memory)
                self._made(Region("bounce", self._base, self.limit))
                self._memory = memory
            while (offset := self._parts.take(need)) is None:
                if not wait:
                    raise NoSlotError
                if not self._changed.wait(until - time.monotonic()) and time.monotonic() >= until:
                    raise TransferTimeoutError(
                        f"nvme: no bounce buffer of {need} B came free in {self._timeout} s; "
                        f"raise bounce={self.limit} B"
                    )
            return offset

    def _release(self, offset: int, nbytes: int) -> None:
        with self._changed:
            self._parts.give(offset, nbytes)
            self._changed.notify_all()
