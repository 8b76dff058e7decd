"""Blocks: the runs of a piece as nested loops, and copying them to and from a packed buffer.

A block is what `plan_copy` says about one component and head range: equal runs, enumerated by
loops that have a stride on each side. Packed, a piece is its blocks one after another, each in
the order of its loops. Both sides of a transfer know the same blocks, so what one packs the
other unpacks, whatever their layouts are.

Copying a piece is one strided copy per block; listing the runs and copying each by its address
would cost some forty times as much where they are short.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvconnect.errors import LayoutError
from kvconnect.page_index import U64
from kvconnect.region import Region
from kvconnect.reshard import CopyPlan


@dataclass(frozen=True, slots=True)
class Half:
    """One side of a block: `address` at piece 0, bytes between pages, parts, and loop steps."""

    address: int
    page: int
    part: int
    parts: int
    strides: tuple[int, ...]

    def places(self, pages: U64, first: int, pieces: int) -> list[int]:
        """Return the address of the block in each of `pieces` pieces from `first` on."""
        number = np.arange(first, first + pieces, dtype=np.uint64)
        page = pages[(number // np.uint64(self.parts)).astype(np.intp)]
        part = number % np.uint64(self.parts)
        out = page * np.uint64(self.page) + part * np.uint64(self.part)
        found: list[int] = (out + np.uint64(self.address)).tolist()
        return found


@dataclass(frozen=True, slots=True)
class Block:
    """Equal runs of `run` bytes, enumerated by `extents` (outermost first), on both sides."""

    run: int
    extents: tuple[int, ...]
    source: Half
    target: Half

    @property
    def nbytes(self) -> int:
        """Bytes of one piece of the block."""
        return self.run * math.prod(self.extents)

    def rows(self, half: Half) -> U64:
        """Return the addresses of all runs of piece 0 on one side: (runs,) uint64."""
        out = np.array([half.address], dtype=np.uint64)
        for extent, stride in zip(self.extents, half.strides, strict=True):
            steps = np.arange(extent, dtype=np.uint64) * np.uint64(stride)
            out = (out[:, None] + steps).reshape(-1)
        return out


def block_of(
    copy: CopyPlan,
    bases: tuple[int, int],
    steps: tuple[tuple[int, int], tuple[int, int]],
    parts: tuple[int, int],
) -> Block:
    """Build a block from a copy plan; `bases` are the regions' addresses, `steps` (page, part)."""
    loops = copy.loops
    source = Half(
        bases[0] + copy.src_offset, *steps[0], parts[0], tuple(loop.src_stride for loop in loops)
    )
    target = Half(
        bases[1] + copy.dst_offset, *steps[1], parts[1], tuple(loop.dst_stride for loop in loops)
    )
    return Block(copy.run, tuple(loop.extent for loop in loops), source, target)


class Packer:
    """Packs and unpacks one side's pieces; the memory is this process's own."""

    def __init__(
        self, blocks: Sequence[Block], halves: Sequence[Half], regions: Sequence[Region]
    ) -> None:
        """`halves` are that side of the blocks. `LayoutError` where memory is not on the host."""
        self.nbytes = sum(block.nbytes for block in blocks)
        self._blocks = list(zip(blocks, halves, strict=True))
        self._memory = [_memory(_region_of(half, regions)) for half in halves]

    def pack(self, pages: U64, first: int, buffer: NDArray[np.uint8]) -> None:
        """Copy pieces from `first` on into `buffer`, as many as fill it."""
        self._copy(pages, first, buffer, into_buffer=True)

    def unpack(self, pages: U64, first: int, buffer: NDArray[np.uint8]) -> None:
        """Copy a packed buffer into the pieces from `first` on."""
        self._copy(pages, first, buffer, into_buffer=False)

    def _copy(
        self, pages: U64, first: int, buffer: NDArray[np.uint8], *, into_buffer: bool
    ) -> None:
        pieces = len(buffer) // self.nbytes
        rows = buffer.reshape(pieces, self.nbytes)
        at = 0
        for (block, half), (base, memory) in zip(self._blocks, self._memory, strict=True):
            unit = _unit(block, half, base, self.nbytes, at)
            shape, strides = (*block.extents, block.run // unit), (*half.strides, unit)
            packed = _typed(rows[:, at : at + block.nbytes], unit).reshape(pieces, *shape)
            for number, address in enumerate(half.places(pages, first, pieces)):
                there: NDArray[Any] = np.ndarray(
                    shape, f"u{unit}", memory, offset=address - base, strides=strides
                )
                if into_buffer:
                    packed[number] = there
                else:
                    there[...] = packed[number]
            at += block.nbytes


def _region_of(half: Half, regions: Sequence[Region]) -> Region:
    for region in regions:
        if region.address <= half.address < region.end:
            if region.device != "cpu":
                raise LayoutError(f"{region} is on {region.device}; only host memory is packed")
            return region
    raise LayoutError(f"address {half.address:#x} lies in none of the pool's regions")


def _memory(region: Region) -> tuple[int, Any]:
    return region.address, (ctypes.c_uint8 * region.nbytes).from_address(region.address)


def _unit(block: Block, half: Half, base: int, nbytes: int, at: int) -> int:
    """Return the widest word in which every run of the block can be copied."""
    return math.gcd(
        8, block.run, nbytes, at, base, half.address, half.page, half.part, *half.strides
    )


def _typed(array: NDArray[np.uint8], unit: int) -> NDArray[Any]:
    """See the rows of a 2-d byte array as words of `unit` bytes, without a copy."""
    return array.view(f"u{unit}")
