"""Views on registered memory, and bounce buffers for what O_DIRECT cannot take as it is."""

from __future__ import annotations

import ctypes
import mmap
import queue
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Batch, Closing
from kvconnect.errors import CapacityError

CHUNK = 8 << 20
"""Most bytes in one piece of I/O: large enough for full disk speed, small enough to overlap."""

PATIENCE = 60.0
"""Seconds to wait for a bounce buffer; they are freed as pieces finish, so this never passes
unless the disk hangs."""


def view_at(address: int, nbytes: int) -> memoryview:
    """Return a writable view of foreign memory that the caller keeps alive."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


class BatchMemory:
    """The runs of a batch as Python ints (read once) and as views."""

    __slots__ = ("_address", "_first", "_nbytes", "sizes")

    def __init__(self, batch: Batch) -> None:
        """Take the rows of `batch`."""
        self._address: list[int] = batch.address.tolist()
        self._nbytes: list[int] = batch.nbytes.tolist()
        self._first: list[int] = batch.first.tolist()
        self.sizes: list[int] = batch.object_nbytes().tolist()

    def views(self, index: int) -> list[memoryview]:
        """Return the runs of one object, in order."""
        rows = range(self._first[index], self._first[index + 1])
        return [view_at(self._address[row], self._nbytes[row]) for row in rows]

    def runs(self, index: int) -> int:
        """Return how many runs one object has."""
        return self._first[index + 1] - self._first[index]


def aligned_objects(batch: Batch, alignment: int) -> NDArray[np.bool_]:
    """Tell which objects O_DIRECT takes as they are: (keys,) bool.

    Address and length of every run must be multiples of `alignment`.
    """
    if alignment <= 1:
        return np.ones(len(batch), dtype=np.bool_)
    wrong = (batch.address | batch.nbytes) % np.uint64(alignment) != 0
    return np.asarray(np.add.reduceat(wrong.astype(np.int64), batch.first[:-1]) == 0)


class BouncePool(Closing):
    """Page-aligned buffers of `CHUNK` bytes, at most `limit` bytes of them, made when needed."""

    def __init__(self, limit: int) -> None:
        """Bound the pool; `limit` must hold at least one buffer."""
        self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(max(limit // CHUNK, 1)):
            self._room.put(None)
        self.nbytes = 0

    def take(self) -> mmap.mmap:
        """Return a buffer; `CapacityError` if none is free for a long time."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            pass
        try:
            self._room.get_nowait()
        except queue.Empty:
            try:
                return self._free.get(timeout=PATIENCE)
            except queue.Empty:
                raise CapacityError(f"no bounce buffer in {PATIENCE:g} s; raise bounce=") from None
        self.nbytes += CHUNK
        return mmap.mmap(-1, CHUNK)

    def give(self, buffer: mmap.mmap) -> None:
        """Return a buffer that no I/O touches any more."""
        self._free.put(buffer)

    def close(self) -> None:
        """Drop free buffers; the second call does nothing."""
        while True:
            try:
                self._free.get_nowait()
            except queue.Empty:
                return


def copy_in(views: Sequence[memoryview], target: memoryview) -> None:
    """Copy runs, one after another, to the start of `target`."""
    at = 0
    for view in views:
        target[at : at + len(view)] = view
        at += len(view)


def copy_out(source: memoryview, views: Sequence[memoryview]) -> None:
    """Copy the start of `source` to runs, one after another."""
    at = 0
    for view in views:
        view[:] = source[at : at + len(view)]
        at += len(view)
