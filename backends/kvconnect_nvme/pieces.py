"""From objects at store addresses to pieces of I/O: merged, bounced or sliced.

Neighbouring objects that lie one after another in the file become one piece. Objects whose
memory O_DIRECT cannot take go through a bounce buffer; one larger than a buffer is sliced.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Op
from kvconnect_nvme.engine import IOV_MAX, Piece, Views
from kvconnect_nvme.memory import CHUNK, BatchMemory, BouncePool, copy_in, copy_out
from kvconnect_nvme.slabs import Slabs
from kvconnect_nvme.state import padded


@dataclass(frozen=True, slots=True)
class Placed:
    """Object `index` of the batch lies at store address `address`."""

    index: int
    address: int


@dataclass(frozen=True, slots=True)
class Work:
    """A piece and the objects it moves; `whole` tells that it moves them completely."""

    piece: Piece
    objects: tuple[int, ...]
    whole: bool


class PieceMaker:
    """Builds the pieces of one batch."""

    def __init__(
        self,
        op: Op,
        memory: BatchMemory,
        aligned: NDArray[np.bool_],
        slabs: Slabs,
        bounce: BouncePool,
        check: Callable[[int, Views], None],
    ) -> None:
        """`check(index, views)` runs beside the I/O: before a store, after a load."""
        self._op, self._memory, self._slabs, self._bounce = op, memory, slabs, bounce
        self._aligned, self._check = aligned, check

    def make(self, placed: Sequence[Placed]) -> list[Work]:
        """Return the pieces; objects are taken in order of address."""
        out: list[Work] = []
        group: list[Placed] = []
        for one in sorted(placed, key=lambda p: p.address):
            if group and not self._joins(group, one):
                out += self._close(group)
                group = []
            group.append(one)
        return out + (self._close(group) if group else [])

    def _direct(self, index: int) -> bool:
        return bool(self._aligned[index]) and self._memory.runs(index) <= IOV_MAX

    def _joins(self, group: Sequence[Placed], one: Placed) -> bool:
        last, sizes = group[-1], self._memory.sizes
        if self._direct(last.index) != self._direct(one.index):
            return False
        chained = last.address + padded(sizes[last.index]) == one.address
        if not chained or one.address % self._slabs.slab_bytes == 0:
            return False
        whole = one.address + padded(sizes[one.index]) - group[0].address
        if not self._direct(one.index):
            return whole <= CHUNK
        runs = sum(self._memory.runs(p.index) for p in (*group, one))
        # Without a gap on disk only: a direct piece has nothing to fill the padding with.
        gapless = sizes[last.index] == padded(sizes[last.index])
        return gapless and whole <= CHUNK and runs <= IOV_MAX

    def _close(self, group: list[Placed]) -> list[Work]:
        if self._direct(group[0].index):
            return [self._direct_piece(group)]
        if padded(self._memory.sizes[group[0].index]) <= CHUNK:
            return [self._bounced_piece(group)]
        return self._slices(group[0])

    def _direct_piece(self, group: list[Placed]) -> Work:
        objects = tuple(p.index for p in group)
        fd, offset = self._file(group[0].address)
        nbytes = sum(self._memory.sizes[i] for i in objects)

        def memory() -> Views:
            views = [(i, self._memory.views(i)) for i in objects]
            if self._op is Op.STORE:
                for index, runs in views:
                    self._check(index, runs)
            return [run for _, runs in views for run in runs]

        def after(_: Views) -> None:
            for index in objects:
                self._check(index, self._memory.views(index))

        load = self._op is Op.LOAD
        return Work(Piece(fd, offset, nbytes, memory, after if load else None), objects, whole=True)

    def _bounced_piece(self, group: list[Placed]) -> Work:
        objects = tuple(p.index for p in group)
        starts = [p.address - group[0].address for p in group]
        fd, offset = self._file(group[0].address)
        nbytes = starts[-1] + padded(self._memory.sizes[objects[-1]])
        held: list[mmap.mmap] = []

        def memory() -> Views:
            held.append(self._bounce.take())
            buffer = memoryview(held[0])[:nbytes]
            if self._op is Op.STORE:
                self._fill(objects, starts, buffer)
            return [buffer]

        def after(views: Views) -> None:
            for index, start in zip(objects, starts, strict=True):
                inside = views[0][start : start + self._memory.sizes[index]]
                self._check(index, [inside])
                copy_out(inside, self._memory.views(index))

        def finish() -> None:
            if held:
                self._bounce.give(held.pop())

        load = self._op is Op.LOAD
        piece = Piece(fd, offset, nbytes, memory, after if load else None, finish)
        return Work(piece, objects, whole=True)

    def _fill(self, objects: Sequence[int], starts: Sequence[int], buffer: memoryview) -> None:
        for index, start in zip(objects, starts, strict=True):
            views, size = self._memory.views(index), self._memory.sizes[index]
            copy_in(views, buffer[start : start + size])
            # Zeros, not what an earlier page left in the buffer, fill up the last block.
            buffer[start + size : start + padded(size)] = bytes(padded(size) - size)
            self._check(index, [buffer[start : start + size]])

    def _slices(self, one: Placed) -> list[Work]:
        """Move one large object through several buffers; it is checked as a whole elsewhere."""
        size = self._memory.sizes[one.index]
        return [
            self._slice(one, at, min(CHUNK, padded(size) - at), min(CHUNK, size - at))
            for at in range(0, size, CHUNK)
        ]

    def _slice(self, one: Placed, at: int, nbytes: int, filled: int) -> Work:
        fd, offset = self._file(one.address)
        held: list[mmap.mmap] = []

        def memory() -> Views:
            held.append(self._bounce.take())
            buffer = memoryview(held[0])[:nbytes]
            if self._op is Op.STORE:
                copy_in(cut(self._memory.views(one.index), at, at + filled), buffer)
                buffer[filled:] = bytes(nbytes - filled)
            return [buffer]

        def after(views: Views) -> None:
            copy_out(views[0], cut(self._memory.views(one.index), at, at + filled))

        def finish() -> None:
            if held:
                self._bounce.give(held.pop())

        load = self._op is Op.LOAD
        piece = Piece(fd, offset + at, nbytes, memory, after if load else None, finish)
        return Work(piece, (one.index,), whole=False)

    def _file(self, address: int) -> tuple[int, int]:
        number, offset = self._slabs.place(address)
        return self._slabs.fd(number), offset


def cut(views: Views, start: int, stop: int) -> Views:
    """Return the bytes [start, stop) of an object as views."""
    out, at = [], 0
    for view in views:
        low, high = max(start - at, 0), min(stop - at, len(view))
        if low < high:
            out.append(view[low:high])
        at += len(view)
    return out
