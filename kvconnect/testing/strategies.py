"""Hypothesis strategies: layouts, placements and batches, as odd as the types allow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import strategies as st

from kvconnect.layout import Axis, Layout
from kvconnect.placement import Placement, Span
from kvconnect.testing.memory import Objects

AXES = ("component", "page", "layer", "slot", "head", "dim")
OBJECT_SIZES = (1, 2, 480, 511, 512, 2304, 4096, 4097, 12289)
"""Bytes around what storage rounds to, and sizes that real pools have (480, 2304)."""


@st.composite
def layouts(
    draw: st.DrawFn,
    names: Sequence[str] = AXES,
    *,
    extents: dict[str, int] | None = None,
    max_extent: int = 3,
    itemsize: int | None = None,
) -> Layout:
    """Any order, extents and padding of the axes `names`, at any offset.

    `extents` fixes some axes. Padding may follow every axis, so that nothing needs to chain.
    """
    size = itemsize or draw(st.sampled_from([1, 2, 4]))
    fixed = extents or {}
    order = draw(st.permutations(list(names)))
    stride, axes = size, []
    for name in order:
        extent = fixed.get(name) or draw(st.integers(1, max_extent))
        # Half of the draws chain exactly: otherwise nearly nothing would ever merge.
        stride += draw(st.one_of(st.just(0), st.integers(0, 3 * size)))
        axes.append(Axis(name, extent, stride))
        stride *= extent
    shuffled = draw(st.permutations(axes))
    return Layout(tuple(shuffled), size, draw(st.integers(0, 64)))


@st.composite
def cuts(draw: st.DrawFn, layout: Layout) -> frozenset[str]:
    """Any set of the layout's axes."""
    return draw(st.frozensets(st.sampled_from(layout.names))) if layout.names else frozenset()


@st.composite
def spans(draw: st.DrawFn, total: int) -> Span:
    """Any half-open range of `total` steps."""
    start = draw(st.integers(0, total - 1))
    return Span(start, draw(st.integers(start + 1, total)), total)


@st.composite
def placements(draw: st.DrawFn, layers: int, heads: int) -> Placement:
    """Any range of layers and heads of a model, as any of up to four replicas."""
    replicas = draw(st.integers(1, 4))
    replica = draw(st.integers(0, replicas - 1))
    return Placement(draw(spans(layers)), draw(spans(heads)), replica, replicas)


@st.composite
def held_layouts(draw: st.DrawFn, held: Placement, extents: dict[str, int]) -> Layout:
    """Any layout of what `held` holds; `extents` gives the other axes."""
    every = {**extents, "layer": held.layers.extent, "head": held.heads.extent}
    return draw(layouts(tuple(every), extents=every, itemsize=2))


@st.composite
def run_sizes(draw: st.DrawFn, nbytes: int, max_runs: int = 5) -> list[int]:
    """Any cut of an object of `nbytes` into at most `max_runs` runs."""
    most = min(max_runs, nbytes) - 1
    inner = st.integers(1, nbytes - 1) if nbytes > 1 else st.nothing()
    points = draw(st.lists(inner, max_size=most, unique=True)) if most > 0 else []
    bounds = [0, *sorted(points), nbytes]
    return [stop - start for start, stop in itertools.pairwise(bounds)]


@st.composite
def objects(draw: st.DrawFn, sizes: Sequence[int], max_runs: int = 5) -> Objects:
    """Guarded memory for objects of these `sizes`, each cut anyhow, at an odd base or not."""
    runs = [draw(run_sizes(size, max_runs)) for size in sizes]
    return Objects(runs, offset=draw(st.sampled_from([0, 64, 1, 4095])))


@st.composite
def batches(draw: st.DrawFn, prefix: str = "", max_keys: int = 6) -> tuple[Objects, list[str]]:
    """Guarded memory for up to `max_keys` objects, and distinct keys for them."""
    sizes = draw(st.lists(st.sampled_from(OBJECT_SIZES), min_size=1, max_size=max_keys))
    return draw(objects(sizes)), [f"{prefix}{number:04x}" for number in range(len(sizes))]
