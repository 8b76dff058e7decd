"""`cover(layout, cut)`: into how many contiguous runs a plane falls once some axes are cut.

This is the one function behind every capability question. Per page, split heads, per layer,
scatter-gather and "must be staged" are answers of it, none is a branch on a layout's name.

The rule: an object (the axes left whole) is one run iff those axes, taken by ascending
stride, chain exactly from the itemsize, each next stride being the run so far. So an axis can
be cut for free iff every axis that stays whole has a smaller stride.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvconnect.errors import LayoutError
from kvconnect.layout import Axis, Layout


@dataclass(frozen=True, slots=True)
class Loop:
    """`extent` runs, `stride` bytes apart; `axes` are the merged axis names, innermost first."""

    extent: int
    stride: int
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cover:
    """How one object of a plane lies in memory: `runs` runs of `run` bytes each.

    `loops` enumerate the runs of one object, outermost first; `cut` are the enumerated axes.
    `broken` names the first axis that does not chain and the stride it would need, or is None.

    >>> from kvconnect.layout import Layout
    >>> head_major = Layout.packed({"page": 4, "head": 8, "slot": 2, "dim": 16}, 2)
    >>> cover(head_major, {"page", "head"}).run
    64
    """

    run: int
    loops: tuple[Loop, ...]
    cut: tuple[Axis, ...]
    offset: int
    broken: tuple[Axis, int] | None

    @property
    def runs(self) -> int:
        """Runs of one object."""
        return math.prod(loop.extent for loop in self.loops)

    @property
    def nbytes(self) -> int:
        """Bytes of one object."""
        return self.run * self.runs

    def run_offsets(self) -> NDArray[np.uint64]:
        """Return the offsets of one object's runs at cut index 0, ascending: (runs,) uint64."""
        offsets = np.array([self.offset], dtype=np.uint64)
        for loop in self.loops:
            steps = np.arange(loop.extent, dtype=np.uint64) * np.uint64(loop.stride)
            offsets = (offsets[:, None] + steps[None, :]).reshape(-1)
        return offsets

    def why_not_one_run(self) -> str | None:
        """Say which axis breaks the chain and both numbers; None where it is one run."""
        if self.broken is None:
            return None
        axis, expected = self.broken
        return f"{axis.name} stride {axis.stride} B, run ends at {expected} B"


def cover(layout: Layout, cut: Collection[str]) -> Cover:
    """Compute the runs of `layout` once the axes named in `cut` are enumerated.

    Pure; O(axes log axes). `LayoutError` if a cut axis does not exist.
    """
    for name in cut:
        layout.axis(name)
    run, loops, broken = layout.itemsize, list[Loop](), None
    for axis in layout.by_stride():
        if axis.name in cut:
            continue
        if not loops and axis.stride == run:
            run *= axis.extent
        elif loops and axis.stride == loops[-1].extent * loops[-1].stride:
            last = loops.pop()
            loops.append(Loop(last.extent * axis.extent, last.stride, (*last.axes, axis.name)))
        else:
            broken = broken or (axis, run)
            loops.append(Loop(axis.extent, axis.stride, (axis.name,)))
    return Cover(
        run=run,
        loops=tuple(reversed(loops)),
        cut=tuple(axis for axis in layout.axes if axis.name in cut),
        offset=layout.offset,
        broken=broken,
    )


def require_one_run(layout: Layout, cut: Collection[str]) -> Cover:
    """Return the cover, or raise `LayoutError` naming the axis that does not chain."""
    found = cover(layout, cut)
    if (reason := found.why_not_one_run()) is not None:
        raise LayoutError(
            f"cutting {sorted(cut)} out of {layout.order()} leaves {found.runs} runs of "
            f"{found.run} B, not one: {reason}"
        )
    return found
