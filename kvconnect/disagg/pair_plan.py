"""The plan of one (source rank, target rank) pair: which runs move, for any pages.

A piece is the slots that pages of both sides are made of (all of a page where page sizes are
equal). The runs of piece 0 and their strides say everything; `PairPlan.expand` moves them to
any pages by a few broadcasts. Runs that are adjacent on both sides are joined: inside a piece
when the plan is made, across pieces (a layer-first pool, whole pages) when it is expanded.

The plan depends only on the two pools' layouts and placements, never on a request, so a pair
keeps one per layer range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvconnect.disagg.blocks import Block, block_of
from kvconnect.disagg.conform import (
    Side,
    check_components,
    common_slots,
    cut_slots,
    head_steps,
    narrow_layers,
)
from kvconnect.errors import LayoutError, PageIndexError
from kvconnect.layout import Layout
from kvconnect.page_index import U64
from kvconnect.placement import Placement
from kvconnect.reshard import plan_copy


@dataclass(frozen=True, slots=True)
class PairPlan:
    """The runs of piece 0, (rows,) uint64 each, and how they move with page and part.

    `src`, `dst` are addresses; `*_page`, `*_part` the bytes between pages and between the parts
    of a page; `src_parts`, `dst_parts` the pieces of a page on each side. Rows are sorted by
    source address, and no two of them are adjacent on both sides. `blocks` are the same runs as
    loops, for who copies them instead of listing them.
    """

    src: U64
    dst: U64
    nbytes: U64
    src_page: U64
    src_part: U64
    dst_page: U64
    dst_part: U64
    src_parts: int
    dst_parts: int
    blocks: tuple[Block, ...]

    @property
    def piece_nbytes(self) -> int:
        """Bytes moved for one piece."""
        return int(self.nbytes.sum())

    @property
    def shortest(self) -> int:
        """Bytes of the shortest run before pieces are joined."""
        return int(self.nbytes.min())

    def pieces(self, src_pages: U64, dst_pages: U64) -> int:
        """Return how many pieces the pages hold; `PageIndexError` unless both sides agree.

        The side with the larger pages may have its last page partly filled.
        """
        source, target = len(src_pages) * self.src_parts, len(dst_pages) * self.dst_parts
        self._check(source, target, min(source, target))
        return min(source, target)

    def _check(self, source: int, target: int, pieces: int) -> None:
        if not (0 <= source - pieces < self.src_parts and 0 <= target - pieces < self.dst_parts):
            raise PageIndexError(
                f"{source // self.src_parts} source pages of {self.src_parts} parts and "
                f"{target // self.dst_parts} target pages of {self.dst_parts} parts do not hold "
                f"the same: {source} and {target} parts, {pieces} wanted"
            )

    def expand(
        self, src_pages: U64, dst_pages: U64, pieces: int | None = None
    ) -> tuple[U64, U64, U64]:
        """Return (source addresses, target addresses, nbytes) of all runs: (runs,) uint64.

        `src_pages`, `dst_pages` are page ids in the order of the sequence; `pieces` of them
        move (None: as many as both hold).
        """
        if pieces is None:
            pieces = self.pieces(src_pages, dst_pages)
        self._check(len(src_pages) * self.src_parts, len(dst_pages) * self.dst_parts, pieces)
        source = _at(src_pages, self.src_parts, pieces)
        target = _at(dst_pages, self.dst_parts, pieces)
        joins = self._joins
        parts = []
        if not joins.all():
            parts.append(self._every(~joins, source, target))
        if joins.any():
            parts.append(self._joined(joins, source, target))
        if len(parts) == 1:
            return parts[0]
        return tuple(np.concatenate(column) for column in zip(*parts, strict=True))  # type: ignore[return-value]

    @property
    def _joins(self) -> NDArray[np.bool_]:
        """Which rows continue from one piece into the next, on both sides."""
        source = _linear(self.src_page, self.src_part, self.src_parts)
        target = _linear(self.dst_page, self.dst_part, self.dst_parts)
        joins: NDArray[np.bool_] = source & target
        joins &= self.src_part == self.nbytes
        joins &= self.dst_part == self.nbytes
        return joins

    def _every(
        self, rows: NDArray[np.bool_], source: tuple[U64, U64], target: tuple[U64, U64]
    ) -> tuple[U64, U64, U64]:
        src = _broadcast(self.src, self.src_page, self.src_part, self.src_parts, rows, source)
        dst = _broadcast(self.dst, self.dst_page, self.dst_part, self.dst_parts, rows, target)
        nbytes = np.tile(self.nbytes[rows], len(source[0]))
        return src.reshape(-1), dst.reshape(-1), nbytes

    def _joined(
        self, rows: NDArray[np.bool_], source: tuple[U64, U64], target: tuple[U64, U64]
    ) -> tuple[U64, U64, U64]:
        """Expand rows of pages that follow one another as one run: (streaks, rows) of them."""
        one = np.uint64(1)
        place_src = source[0] * np.uint64(self.src_parts) + source[1]
        place_dst = target[0] * np.uint64(self.dst_parts) + target[1]
        breaks = (np.diff(place_src) != one) | (np.diff(place_dst) != one)
        first = np.concatenate(([0], np.flatnonzero(breaks) + 1)).astype(np.intp)
        length = np.diff(np.append(first, len(place_src))).astype(np.uint64)
        step = self.nbytes[rows]
        src = self.src[rows] + place_src[first, None] * step
        dst = self.dst[rows] + place_dst[first, None] * step
        return src.reshape(-1), dst.reshape(-1), (length[:, None] * step).reshape(-1)


def _at(pages: U64, parts: int, pieces: int) -> tuple[U64, U64]:
    """Return (page id, part) of each piece."""
    if parts == 1:
        return pages[:pieces], np.zeros(pieces, dtype=np.uint64)
    number = np.arange(pieces, dtype=np.uint64)
    return pages[(number // np.uint64(parts)).astype(np.intp)], number % np.uint64(parts)


def _linear(page: U64, part: U64, parts: int) -> NDArray[np.bool_]:
    return np.asarray(part * np.uint64(parts) == page)


def _broadcast(
    base: U64,
    page: U64,
    part: U64,
    parts: int,
    rows: NDArray[np.bool_],
    places: tuple[U64, U64],
) -> U64:
    stride = page[rows]
    if (stride == stride[:1]).all():
        # One multiplication per piece in place of one per run.
        moved: Any = (places[0] * stride[0])[:, None]
    else:
        moved = places[0][:, None] * stride
    out: U64 = moved + base[rows]
    if parts > 1:
        out += places[1][:, None] * part[rows]
    return out


def plan_pair(source: Side, target: Side, part: Placement) -> PairPlan:
    """Plan what `source` sends to `target`: the global ranges of `part`, all components.

    `part` lies inside both placements (`kvconnect.disagg.pairs.shares`). Raises `LayoutError`
    where components, element sizes, forms or dims differ, naming both.
    """
    slots = common_slots(source.pool, target.pool)
    blocks = tuple(
        block
        for component in check_components(source.pool, target.pool)
        for block in _component_blocks(source, target, part, component, slots)
    )
    table = np.concatenate([_table(block) for block in blocks], axis=1)
    table = _join_adjacent(table[:, np.argsort(table[0], kind="stable")])
    src, dst, nbytes, src_page, src_part, dst_page, dst_part = table
    return PairPlan(
        src,
        dst,
        nbytes,
        src_page,
        src_part,
        dst_page,
        dst_part,
        src_parts=source.pool.page_size // slots,
        dst_parts=target.pool.page_size // slots,
        blocks=blocks,
    )


def _component_blocks(
    source: Side, target: Side, part: Placement, component: str, slots: int
) -> list[Block]:
    planes = source.plane_of(component), target.plane_of(component)
    layouts = []
    for side, plane in zip((source, target), planes, strict=True):
        held, layers = side.placement.layers, part.layers
        layout = narrow_layers(
            plane.select(component), layers.start - held.start, layers.extent, held.extent
        )
        layouts.append(cut_slots(layout, slots, side.pool.page_size))
    if any("head" not in layout for layout in layouts):
        _check_whole_heads(source, target, component)
        pairs = [(layouts[0], layouts[1])]
    else:
        starts = [part.heads.start - s.placement.heads.start for s in (source, target)]
        pairs = list(head_steps(layouts[0], starts[0], layouts[1], starts[1], part.heads.extent))
    bases = planes[0].region.address, planes[1].region.address
    parts = source.pool.page_size // slots, target.pool.page_size // slots
    try:
        return [
            block_of(plan_copy(a, b, ("page", "part")), bases, (_steps(a), _steps(b)), parts)
            for a, b in pairs
        ]
    except LayoutError as error:
        raise LayoutError(f"component {component!r} cannot move: {error}") from None


def _check_whole_heads(source: Side, target: Side, component: str) -> None:
    if source.placement.heads != target.placement.heads:
        raise LayoutError(
            f"component {component!r} has no head axis and cannot be cut by heads: source holds "
            f"{source.placement.heads}, target {target.placement.heads}"
        )


def _table(block: Block) -> U64:
    """Return the runs of a block as columns, in the order of the fields of `PairPlan`."""
    src, dst = block.rows(block.source), block.rows(block.target)
    halves = block.source, block.target
    numbers = (block.run, *(n for half in halves for n in (half.page, half.part)))
    return np.stack([src, dst, *(np.full(len(src), n, dtype=np.uint64) for n in numbers)])


def _steps(layout: Layout) -> tuple[int, int]:
    """Return the bytes between pages and between parts; a lone part steps with its page."""
    page, part = layout.axis("page"), layout.axis("part")
    return page.stride, part.stride if part.extent > 1 else page.stride


def _join_adjacent(table: U64) -> U64:
    """Join rows that touch on both sides and move alike; `table` is sorted by source."""
    src, dst, nbytes = table[0], table[1], table[2]
    touch = (src[:-1] + nbytes[:-1] == src[1:]) & (dst[:-1] + nbytes[:-1] == dst[1:])
    alike = (table[3:, :-1] == table[3:, 1:]).all(axis=0)
    first = np.concatenate(([0], np.flatnonzero(~(touch & alike)) + 1)).astype(np.intp)
    joined = table[:, first].copy()
    joined[2] = np.add.reduceat(nbytes, first)
    return joined
