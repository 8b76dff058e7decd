"""The runs of a page: enumerated once per pool, moved to any page by one addition.

A pool's pages differ only by where they start, so the runs of page 0 and how each moves with
the page id say everything. Two orders exist: the engine's own (`engine_rows`), for callers that
replace an engine's call, and by object (`object_rows`), where the runs of what one key names
lie together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvconnect.cover import cover
from kvconnect.layout import Layout
from kvconnect.page_index import I64, U64

if TYPE_CHECKING:
    from kvconnect.pool import Pool

_FEW_ROWS = 16
"""Below this many runs a page, addresses are filled column by column: numpy's inner loop then
runs over pages instead of over a handful of runs."""

_CACHED_RUNS = 1 << 17
"""Constant size arrays up to this length (1 MiB) are kept and handed out as read-only slices."""


@dataclass(frozen=True)
class PageRows:
    """The runs of page 0 and how each moves with the page id: three (runs,) uint64 arrays."""

    address: U64
    page_stride: U64
    nbytes: U64

    def expand(self, page_ids: U64) -> tuple[U64, U64]:
        """Return the runs of all pages, page-major: (addresses, nbytes), (pages * runs,).

        `nbytes` may be a shared read-only array.
        """
        return self._addresses(page_ids).reshape(-1), self._sizes(len(page_ids))

    def _addresses(self, page_ids: U64) -> U64:
        stride = self._one_stride
        if len(self.address) <= _FEW_ROWS:
            address = np.empty((len(page_ids), len(self.address)), dtype=np.uint64)
            base = None if stride is None else page_ids * stride
            for at in range(len(self.address)):
                moved = page_ids * self.page_stride[at] if base is None else base
                np.add(moved, self.address[at], out=address[:, at])
            return address
        if stride is not None:
            outer: U64 = np.add.outer(page_ids * stride, self.address)
            return outer
        address = page_ids[:, None] * self.page_stride[None, :]
        address += self.address
        return address

    def _sizes(self, pages: int) -> U64:
        runs = pages * len(self.nbytes)
        if runs > _CACHED_RUNS:
            return np.tile(self.nbytes, pages)
        cached: U64 | None = self.__dict__.get("_tiled")
        if cached is None or len(cached) < runs:
            cached = np.tile(self.nbytes, max(pages, 1))
            cached.flags.writeable = False
            self.__dict__["_tiled"] = cached
        return cached[:runs]

    @cached_property
    def _one_stride(self) -> np.uint64 | None:
        same = len(self.page_stride) and (self.page_stride == self.page_stride[0]).all()
        return self.page_stride[0] if same else None


@dataclass(frozen=True)
class ObjectRows:
    """Rows of a page grouped by object.

    Object i of a page owns the rows first[i]:first[i+1] ((objects + 1,) int64), in ascending
    address order per component, and is called names[i] (``k[0:2]``: heads 0 and 1 of K).
    """

    rows: PageRows
    first: I64
    names: tuple[str, ...]
    one_run: bool
    """Whether every component of every object is one run."""

    @property
    def most_runs(self) -> int:
        """Runs of the object that has most."""
        return int(np.diff(self.first).max())

    def bounds(self, pages: int) -> I64:
        """Return the row bounds of all pages' objects: (pages * objects + 1,) int64."""
        runs = int(self.first[-1])
        starts = np.arange(pages, dtype=np.int64)[:, None] * runs + self.first[None, :-1]
        return np.append(starts.reshape(-1), pages * runs)


_AXES = ("head_block", "layer", "slot", "head")
"""How engines order the runs of a page, outermost first; components come last."""


@dataclass(frozen=True)
class _Table:
    """Columns of one row per run of page 0, not yet in any order."""

    rows: PageRows
    index: dict[str, NDArray[np.intp]]
    component: NDArray[np.intp]
    segment: NDArray[np.intp]
    heads: NDArray[np.intp]
    """The first head of the run, -1 for a component without heads."""


def engine_rows(pool: Pool, head_group: int | None = None) -> PageRows:
    """Enumerate a page's runs in the order engines use.

    Whole pages (`head_group` None): layer by layer, then component. In groups of `head_group`
    heads: group by group, then component.
    """
    if head_group is not None:
        return object_rows(pool, head_group).rows
    table = _collect(pool, None)
    fused = np.array([len(s) > 1 for s in segments(pool)])[table.segment]
    joins = np.where(fused, table.segment, -1 - np.arange(len(fused)))
    rows, kept = _coalesce(table.rows, np.lexsort([table.rows.address, table.segment]), joins)
    keys = [table.component[kept], *(table.index[name][kept] for name in reversed(_AXES))]
    order = np.lexsort(keys)
    return PageRows(rows.address[order], rows.page_stride[order], rows.nbytes[order])


def object_rows(pool: Pool, head_group: int | None, *, join: bool = False) -> ObjectRows:
    """Enumerate a page's runs by object: head group by head group, then component.

    `head_group` heads go to an object, None for all. Components that interleave inside a page
    are one object; with `join` all of a head group are. A component without heads is an object
    of its own (or the last joined one), after the head groups.
    """
    table = _collect(pool, head_group)
    names, groups = segments(pool), pool.heads // head_group if head_group else 1
    group = np.zeros(len(table.heads), dtype=np.intp)
    if head_group is not None:
        group = np.where(table.heads < 0, groups, table.heads // head_group)
    cell = group * len(names) + table.segment
    order = np.lexsort([table.rows.address, cell])
    rows, kept = _coalesce(table.rows, order, cell)
    cells = cell[kept]
    owner = cells // len(names) if join else cells
    starts = np.flatnonzero(np.diff(owner, prepend=-1))
    held = np.unique(cells)
    labels = tuple(
        _label(names, part, head_group, groups)
        for part in np.split(held, np.searchsorted(held, cells[starts[1:]]))
    )
    whole = len(held) == len(cells)
    return ObjectRows(rows, np.append(starts, len(cells)).astype(np.int64), labels, whole)


def _label(names: list[tuple[str, ...]], cells: I64, group: int | None, groups: int) -> str:
    number = int(cells[0]) // len(names)
    parts = "+".join(name for cell in cells for name in names[int(cell) % len(names)])
    if group is None or number >= groups:
        return parts
    return f"{parts}[{number * group}:{(number + 1) * group}]"


def segments(pool: Pool) -> list[tuple[str, ...]]:
    """Group the components that interleave inside a page; the others stand alone.

    Two components interleave where their bytes of page 0 lie between each other's: one run
    then holds both, and naming them apart would cost a run per layer.
    """
    spans = sorted(_spans(pool))
    merged: list[tuple[list[str], int]] = []
    for low, high, name in spans:
        if merged and low < merged[-1][1]:
            merged[-1][0].append(name)
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append(([name], high))
    rank = {name: at for at, name in enumerate(pool.components)}
    found = [tuple(sorted(names, key=rank.__getitem__)) for names, _ in merged]
    return sorted(found, key=lambda names: rank[names[0]])


def _spans(pool: Pool) -> list[tuple[int, int, str]]:
    spans = []
    for plane in pool.planes:
        for name in plane.components:
            page = plane.select(name).narrow("page", 0, 1)
            base = plane.region.address
            spans.append((base + page.offset, base + page.end, name))
    return spans


def _collect(pool: Pool, head_group: int | None) -> _Table:
    where = {name: at for at, names in enumerate(segments(pool)) for name in names}
    parts = [
        _runs_of(plane.select(name), plane.region.address, head_group)
        for plane in pool.planes
        for name in plane.components
    ]
    counts = [len(part[0].address) for part in parts]
    component = np.repeat(np.arange(len(parts)), counts)
    segment = np.array([where[name] for name in pool.components], dtype=np.intp)[component]
    rows = PageRows(
        np.concatenate([p[0].address for p in parts]),
        np.concatenate([p[0].page_stride for p in parts]),
        np.concatenate([p[0].nbytes for p in parts]),
    )
    index = {name: np.concatenate([p[1][name] for p in parts]) for name in _AXES}
    heads = np.concatenate([p[2] for p in parts])
    return _Table(rows, index, component, segment, heads)


def _runs_of(
    layout: Layout, base: int, head_group: int | None
) -> tuple[PageRows, dict[str, NDArray[np.intp]], NDArray[np.intp]]:
    """Enumerate the runs of one component's page 0: rows, axis indices, first heads."""
    inner = layout.axis("head").extent if "head" in layout else 0
    cut = {"page"}
    if head_group is not None and inner:
        layout, names = _grouped(layout, head_group)
        cut |= names
    # An axis outside the page never joins a run, not even where the pool has a single page:
    # what a page is made of must not depend on how many there are.
    page = layout.axis("page").stride
    cut |= {axis.name for axis in layout.axes if axis.stride >= page}
    cut |= {name for loop in cover(layout, cut).loops for name in loop.axes}
    found = cover(layout, cut)
    axes = [axis for axis in found.cut if axis.name != "page"]
    extents = [axis.extent for axis in axes]
    grid = np.indices(extents).reshape(len(axes), math.prod(extents))
    strides = np.array([axis.stride for axis in axes], dtype=np.uint64)
    offset = (grid.astype(np.uint64) * strides[:, None]).sum(axis=0, dtype=np.uint64)
    rows = PageRows(
        offset + np.uint64(base + layout.offset),
        np.full(len(offset), page, dtype=np.uint64),
        np.full(len(offset), found.run, dtype=np.uint64),
    )
    none = np.zeros(len(offset), dtype=np.intp)
    index = dict.fromkeys((*_AXES, "head_group"), none)
    index |= {axis.name: grid[at] for at, axis in enumerate(axes)}
    within = index["head_group"] * (head_group or 0) + index["head"]
    heads = index["head_block"] * inner + within if inner else none - 1
    return rows, index, heads


def _grouped(layout: Layout, head_group: int) -> tuple[Layout, set[str]]:
    """Return the layout and the axes to cut so that no run holds heads of two groups."""
    inner = layout.axis("head").extent
    blocks = {"head_block"} & set(layout.names)
    if inner % head_group == 0:
        return layout.split("head", head_group, "head_group", "head"), {"head_group", *blocks}
    # Groups that are no whole part of a block: by blocks if whole, else head by head.
    return layout, blocks if head_group % inner == 0 else {"head", *blocks}


def _coalesce(
    rows: PageRows, order: NDArray[np.intp], joins: NDArray[np.intp]
) -> tuple[PageRows, NDArray[np.intp]]:
    """Put rows in `order` and merge neighbours that touch, move alike and share `joins`.

    Returns the merged rows and, for each, the row it begins with.
    """
    address, stride = rows.address[order], rows.page_stride[order]
    nbytes, join = rows.nbytes[order], joins[order]
    touches = (
        (address[1:] == address[:-1] + nbytes[:-1])
        & (stride[1:] == stride[:-1])
        & (join[1:] == join[:-1])
    )
    starts = np.flatnonzero(np.concatenate([[True], ~touches]))
    merged = PageRows(address[starts], stride[starts], np.add.reduceat(nbytes, starts))
    return merged, order[starts]
