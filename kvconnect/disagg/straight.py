"""Prefill side: short runs straight from these pages into a peer's, where those are mapped here.

One strided copy per block and piece: nothing is packed or unpacked, and no run is listed.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvconnect.disagg.blocks import Block
from kvconnect.disagg.carry import Carried, stopped
from kvconnect.disagg.transport import Peer, PeerOutcome, PeerStatus, SupportsReach
from kvconnect.errors import UnavailableError
from kvconnect.page_index import U64
from kvconnect.region import Region, RegionTable

_SLICE_BYTES = 8 << 20
"""Copied between two looks at the clock."""

Memory = tuple[int, Any]
"""Where a region begins at its owner, and its bytes as mapped here."""


def carry_straight(
    copier: Callable[[], Straight],
    pages: tuple[U64, U64],
    pieces: int,
    *,
    until: float,
    stop: threading.Event,
) -> Carried:
    """Copy `pieces` pieces of `pages` (own, the peer's); a worker's job, see `carry`."""
    first = nbytes = 0
    try:
        straight = copier()
        while first < pieces:
            if (failure := stopped(until, stop)) is not None:
                return Carried(nbytes, failure)
            count = min(max(_SLICE_BYTES // straight.nbytes, 1), pieces - first)
            straight.copy(pages, first, count)
            first += count
            nbytes = first * straight.nbytes
    except UnavailableError as error:
        return Carried(nbytes, PeerOutcome(PeerStatus.PEER_GONE, 0, str(error)))
    return Carried(nbytes)


class Straight:
    """The blocks of a plan, with the memory of both sides."""

    def __init__(
        self,
        transport: SupportsReach,
        peer: Peer,
        blocks: Sequence[Block],
        regions: tuple[Sequence[Region], Sequence[Region]],
    ) -> None:
        """`regions` of the own pool and of the peer's.

        Raises `UnavailableError` where the peer is gone, `RegistrationError` on memory that was
        not granted.
        """
        self._peer, self._blocks = peer, blocks
        own, theirs = (RegionTable(each) for each in regions)
        here = [(ctypes.c_uint8 * r.nbytes).from_address(r.address) for r in own.regions]
        there = [transport.reach(peer, r.address, r.nbytes).data for r in theirs.regions]
        self._memory = [
            (_place(own, here, b.source.address), _place(theirs, there, b.target.address))
            for b in blocks
        ]
        self.nbytes = sum(block.nbytes for block in blocks)

    def copy(self, pages: tuple[U64, U64], first: int, count: int) -> None:
        """Copy `count` pieces from `first` on; `UnavailableError` where the peer is gone."""
        for block, (own, theirs) in zip(self._blocks, self._memory, strict=True):
            unit = _unit(block, own[0], theirs[0])
            shape = (*block.extents, block.run // unit)
            halves = (block.source, own, pages[0]), (block.target, theirs, pages[1])
            sides = [
                _views(half.places(ids, first, count), memory, shape, (*half.strides, unit))
                for half, memory, ids in halves
            ]
            for source, target in zip(*sides, strict=True):
                target[...] = source
        # What landed in the memory of a process that ended before it was told is worth nothing.
        if not self._peer.alive():
            raise UnavailableError("the peer has closed or died")


def _views(
    places: list[int], memory: Memory, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Iterator[NDArray[Any]]:
    base, data = memory
    for address in places:
        yield np.ndarray(shape, f"u{strides[-1]}", data, address - base, strides)


def _unit(block: Block, *bases: int) -> int:
    """Return the widest word in which every run of the block can be copied."""
    halves = block.source, block.target
    steps = [step for h in halves for step in (h.address, h.page, h.part, *h.strides)]
    return math.gcd(8, block.run, *bases, *steps)


def _place(table: RegionTable, memory: Sequence[Any], address: int) -> Memory:
    at = int(table.locate(np.array([address], dtype=np.uint64), np.ones(1, dtype=np.uint64))[0])
    return table.regions[at].address, memory[at]
