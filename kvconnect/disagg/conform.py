"""Bringing two planes to common axes: the same heads, layers and slots on both sides.

The sides of a transfer may count differently: pages of 16 and of 64 slots, heads as one axis
or in blocks. Everything is cut to the common step here, so that `plan_copy` sees equal axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kvconnect.errors import LayoutError
from kvconnect.layout import Axis, Layout
from kvconnect.placement import Placement
from kvconnect.pool import Plane, Pool, narrow_heads


@dataclass(frozen=True, slots=True)
class Side:
    """One rank's pool and what it holds of the model; addresses may be another process's."""

    pool: Pool
    placement: Placement

    def plane_of(self, component: str) -> Plane:
        """Return the plane that holds a component."""
        return self.pool.plane_of(component)


def common_slots(source: Pool, target: Pool) -> int:
    """Return the slots of a piece: the largest count that both page sizes are made of."""
    return math.gcd(source.page_size, target.page_size)


def check_components(source: Pool, target: Pool) -> tuple[str, ...]:
    """Return the components to move, in the target's order; `LayoutError` if they differ."""
    ours, theirs = set(source.components), set(target.components)
    if ours != theirs:
        raise LayoutError(
            f"components differ: source {sorted(ours)}, target {sorted(theirs)}; both pools "
            f"must hold the same"
        )
    return tuple(target.components)


def head_steps(
    source: Layout, src_start: int, target: Layout, dst_start: int, heads: int
) -> Iterator[tuple[Layout, Layout]]:
    """Yield both layouts narrowed to head ranges that are one strided axis on both sides.

    `src_start`, `dst_start` are local heads; `heads` their common count. One pair where both
    sides keep heads in one axis, else one pair per common block.
    """
    step = math.gcd(_block(source, src_start, heads), _block(target, dst_start, heads))
    for at in range(0, heads, step):
        yield (
            _flat(narrow_heads(source, src_start + at, src_start + at + step)),
            _flat(narrow_heads(target, dst_start + at, dst_start + at + step)),
        )


def _block(layout: Layout, start: int, heads: int) -> int:
    if "head_block" not in layout:
        return heads
    block = layout.axis("head").extent
    return math.gcd(block, start % block, heads)


def _flat(layout: Layout) -> Layout:
    return layout.select("head_block", 0) if "head_block" in layout else layout


def narrow_layers(layout: Layout, start: int, layers: int, held: int) -> Layout:
    """Keep `layers` local layers from `start`; a plane without layers only moves whole."""
    if "layer" in layout:
        return layout.narrow("layer", start, start + layers)
    if layers != held:
        raise LayoutError(
            f"a plane without a layer axis moves whole: {layers} of {held} layers were asked for"
        )
    return layout


def cut_slots(layout: Layout, slots: int, page_size: int) -> Layout:
    """Cut a page into parts of `slots` slots; the layout gains a ``part`` axis."""
    if "slot" in layout:
        return layout.split("slot", slots, "part", "slot")
    if slots != page_size:
        raise LayoutError(
            f"a plane without a slot axis cannot move in parts of {slots} of {page_size} slots; "
            f"use the same page_size on both sides"
        )
    page = layout.axis("page")
    return Layout(
        (*layout.axes, Axis("part", 1, page.stride)), layout.itemsize, layout.offset, layout.form
    )
