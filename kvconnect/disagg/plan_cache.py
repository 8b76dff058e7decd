"""Plans kept by what they depend on: two layouts and placements, and no address.

A rank that restarts, or one more rank of the same shape, has its memory elsewhere and needs the
same plan. So plans are made for pools that lie at addresses of this module's own, one region
far from the next, and moved to where the memory is.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Hashable

import numpy as np

from kvconnect.disagg.blocks import Block, Half
from kvconnect.disagg.conform import Side
from kvconnect.disagg.pair_plan import PairPlan, plan_pair
from kvconnect.page_index import U64
from kvconnect.placement import Placement
from kvconnect.pool import Plane, Pool
from kvconnect.region import Region

_SHIFT = 48
"""Region i lies at (i + 1) << 48 in plans that are kept: none is as large."""
_MOST = 1024
"""Plans kept; the one that was not used for longest goes first."""


class Plans:
    """The plans of one endpoint; safe to use from its workers at once."""

    def __init__(self) -> None:
        """Keep none yet."""
        self._kept: OrderedDict[Hashable, PairPlan] = OrderedDict()
        self._lock = threading.Lock()

    def plan(self, source: Side, target: Side, part: Placement) -> PairPlan:
        """Return `plan_pair(source, target, part)`, made anew only for a shape that is new."""
        key = _signature(source), _signature(target), part
        with self._lock:
            kept = self._kept.get(key)
        if kept is None:
            kept = plan_pair(_apart(source), _apart(target), part)
        with self._lock:
            self._kept[key] = kept
            self._kept.move_to_end(key)
            while len(self._kept) > _MOST:
                self._kept.popitem(last=False)
        return _moved(kept, _bases(source), _bases(target))

    def __len__(self) -> int:
        return len(self._kept)


def _signature(side: Side) -> Hashable:
    """Return all that a plan depends on of one side."""
    pool = side.pool
    planes = tuple((pool.regions.index(p.region), p.layout, p.components) for p in pool.planes)
    return planes, pool.page_size, side.placement


def _apart(side: Side) -> Side:
    """Return the same side with its regions at addresses of our own."""
    regions = [
        Region(region.name, number << _SHIFT, region.nbytes, region.device)
        for number, region in enumerate(side.pool.regions, 1)
    ]
    where = dict(zip(side.pool.regions, regions, strict=True))
    planes = tuple(
        Plane(where[plane.region], plane.layout, plane.components, plane.dtype)
        for plane in side.pool.planes
    )
    pool = side.pool
    apart = Pool(
        planes,
        page_size=pool.page_size,
        layers=pool.layers,
        heads=pool.heads,
        head_dim=pool.head_dim,
        v_head_dim=pool.v_head_dim,
        dtype=pool.dtype,
        label=pool.label,
    )
    return Side(apart, side.placement)


def _bases(side: Side) -> U64:
    """Return where the regions really are, at the numbers they have in kept plans."""
    return np.array([0, *(region.address for region in side.pool.regions)], dtype=np.uint64)


def _moved(plan: PairPlan, source: U64, target: U64) -> PairPlan:
    src, dst = _at(plan.src, source), _at(plan.dst, target)
    order = np.argsort(src, kind="stable")
    columns = {
        name: getattr(plan, name)[order]
        for name in ("nbytes", "src_page", "src_part", "dst_page", "dst_part")
    }
    blocks = tuple(
        Block(b.run, b.extents, _half_at(b.source, source), _half_at(b.target, target))
        for b in plan.blocks
    )
    return dataclasses.replace(plan, src=src[order], dst=dst[order], blocks=blocks, **columns)


def _at(address: U64, bases: U64) -> U64:
    moved: U64 = bases[(address >> np.uint64(_SHIFT)).astype(np.intp)]
    moved += address & np.uint64((1 << _SHIFT) - 1)
    return moved


def _half_at(half: Half, bases: U64) -> Half:
    number, offset = half.address >> _SHIFT, half.address & ((1 << _SHIFT) - 1)
    return dataclasses.replace(half, address=int(bases[number]) + offset)
