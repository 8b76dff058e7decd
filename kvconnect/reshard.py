"""`plan_copy(src, dst)`: the fewest equal runs that move one layout onto another.

Resharding (TP, PP, page size) is the intersection of two placements followed by `plan_copy`:
narrow both layouts to the common global ranges, then plan. Pure numpy; addresses are added by
whoever executes the plan.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvconnect.errors import LayoutError
from kvconnect.layout import Layout
from kvconnect.placement import Placement, Span


@dataclass(frozen=True, slots=True)
class CopyLoop:
    """`extent` runs that advance by `src_stride` at the source and `dst_stride` at the target."""

    extent: int
    src_stride: int
    dst_stride: int


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """`runs` copies of `run` bytes; `loops` (outermost first) enumerate their offsets."""

    run: int
    loops: tuple[CopyLoop, ...]
    src_offset: int
    dst_offset: int

    @property
    def runs(self) -> int:
        """How many copies one object takes."""
        return math.prod(loop.extent for loop in self.loops)

    @property
    def nbytes(self) -> int:
        """Bytes moved."""
        return self.run * self.runs

    def offsets(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return (source, destination) offsets of every run: two (runs,) uint64 arrays."""
        src = np.array([self.src_offset], dtype=np.uint64)
        dst = np.array([self.dst_offset], dtype=np.uint64)
        for loop in self.loops:
            steps = np.arange(loop.extent, dtype=np.uint64)
            src = (src[:, None] + steps * np.uint64(loop.src_stride)).reshape(-1)
            dst = (dst[:, None] + steps * np.uint64(loop.dst_stride)).reshape(-1)
        return src, dst


def plan_copy(src: Layout, dst: Layout, cut: Collection[str] = ()) -> CopyPlan:
    """Plan the copy of one object (all axes but `cut`) from `src` to `dst`.

    The run grows along the axis whose stride equals the run so far on *both* sides; axes are
    distinct in each layout, so at most one qualifies and the result is the longest equal run.
    Raises `LayoutError` when itemsize, form, axes or extents differ; cut axes may differ.

    >>> a = Layout.packed({"slot": 4, "head": 2, "dim": 8}, 2)
    >>> b = Layout.packed({"head": 2, "slot": 4, "dim": 8}, 2)
    >>> plan_copy(a, b).run, plan_copy(a, a).run
    (16, 128)
    """
    _check_same_elements(src, dst, cut)
    whole = [a.name for a in src.axes if a.extent > 1 and a.name not in cut]
    pairs = {
        name: CopyLoop(src.axis(name).extent, src.axis(name).stride, dst.axis(name).stride)
        for name in whole
    }
    run = src.itemsize
    while grown := [n for n, p in pairs.items() if p.src_stride == run == p.dst_stride]:
        run *= pairs.pop(grown[0]).extent
    loops = _merge(sorted(pairs.values(), key=lambda p: (p.dst_stride, p.src_stride)))
    return CopyPlan(run, tuple(reversed(loops)), src.offset, dst.offset)


def _merge(ascending: list[CopyLoop]) -> list[CopyLoop]:
    """Merge loops that nest exactly on both sides, whatever their place in the list."""
    loops = list(ascending)
    at = 0
    while at < len(loops):
        low = loops[at]
        after = (low.src_stride * low.extent, low.dst_stride * low.extent)
        nests = [i for i, h in enumerate(loops) if (h.src_stride, h.dst_stride) == after]
        if not nests or nests[0] == at:
            at += 1
            continue
        high = loops[nests[0]]
        loops[at] = CopyLoop(low.extent * high.extent, low.src_stride, low.dst_stride)
        del loops[nests[0]]
        at = 0
    return loops


def _check_same_elements(src: Layout, dst: Layout, cut: Collection[str]) -> None:
    if src.itemsize != dst.itemsize:
        raise LayoutError(
            f"itemsize differs: {src.itemsize} B at source, {dst.itemsize} B at target"
        )
    if src.form != dst.form:
        raise LayoutError(f"form differs: {src.form!r} at source, {dst.form!r} at target")
    ours = {a.name: a.extent for a in src.axes if a.extent > 1 and a.name not in cut}
    theirs = {a.name: a.extent for a in dst.axes if a.extent > 1 and a.name not in cut}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name, 1) != theirs.get(name, 1):
            raise LayoutError(
                f"axis {name!r} has {ours.get(name, 1)} steps at source, "
                f"{theirs.get(name, 1)} at target"
            )


def narrow_to(layout: Layout, held: Placement, part: Placement) -> Layout:
    """Narrow the local `layout` of a rank that holds `held` to the global ranges of `part`."""
    for name, mine, wanted in (
        ("layer", held.layers, part.layers),
        ("head", held.heads, part.heads),
    ):
        common = mine.meet(wanted)
        if common != wanted:
            raise LayoutError(f"{name} range {wanted} is not held: this rank has {mine}")
        layout = _narrow_axis(layout, name, mine, wanted)
    return layout


def _narrow_axis(layout: Layout, name: str, mine: Span, wanted: Span) -> Layout:
    if name not in layout:
        if wanted != mine:
            raise LayoutError(f"no axis {name!r} to narrow from {mine} to {wanted}")
        return layout
    if layout.axis(name).extent != mine.extent:
        raise LayoutError(
            f"axis {name!r} has {layout.axis(name).extent} steps, the placement {mine}"
        )
    return layout.narrow(name, wanted.start - mine.start, wanted.stop - mine.start)


def reshard(
    src: Layout,
    src_placement: Placement,
    dst: Layout,
    dst_placement: Placement,
    cut: Collection[str] = ("page",),
) -> CopyPlan | None:
    """Plan the copy of what both ranks hold; None where they share nothing.

    The page ids on the two sides are free: `page` is cut, its stride stays with each layout.
    Both layouts must count the same slots to a page; see `same_page_size`.
    """
    part = src_placement.meet(dst_placement)
    if part is None:
        return None
    source = narrow_to(src, src_placement, part)
    target = narrow_to(dst, dst_placement, part)
    return plan_copy(source, target, cut)


def same_page_size(src: Layout, dst: Layout) -> tuple[Layout, Layout]:
    """Cut both layouts into pages of the common slot count gcd(src, dst).

    The larger page's `slot` axis becomes (`part`, `slot`); a smaller page has one `part`.
    Cut both `page` and `part` afterwards: piece i of a sequence lies at page i // parts, part
    i % parts on each side.
    """
    common = math.gcd(src.axis("slot").extent, dst.axis("slot").extent)
    return src.split("slot", common, "part", "slot"), dst.split("slot", common, "part", "slot")
