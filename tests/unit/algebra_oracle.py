"""The oracle of the layout-algebra tests: every element of a layout, one by one.

Nothing here plans, sorts by stride or multiplies extents together: a layout is only read
(axes, itemsize, offset) and walked with plain loops, so it shares no idea with the code under
test. Keys are index tuples in the order of the sorted axis names.
"""

import itertools
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from kvconnect.layout import Axis, Layout

Index = tuple[int, ...]


def examples(count: int) -> settings:
    """Property-test settings: repeatable in CI, no database, no deadline on shared cores."""
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=os.environ.get("CI") == "true",
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


def elements(layout: Layout, fixed: Mapping[str, int] | None = None) -> dict[Index, int]:
    """Offset of every element, keyed by the indices of the axes that are not fixed."""
    fixed = fixed or {}
    axes = sorted(layout.axes, key=lambda axis: axis.name)
    steps = [[fixed[a.name]] if a.name in fixed else range(a.extent) for a in axes]
    out = {}
    for index in itertools.product(*steps):
        offset = layout.offset
        for step, axis in zip(index, axes, strict=True):
            offset += step * axis.stride
        key = tuple(i for i, axis in zip(index, axes, strict=True) if axis.name not in fixed)
        out[key] = offset
    return out


def as_bytes(offsets: Iterable[int], itemsize: int) -> list[int]:
    """Every byte of the elements at `offsets`, ascending; a shared byte appears twice."""
    return sorted(offset + i for offset in offsets for i in range(itemsize))


def segments(offsets: Iterable[int], itemsize: int) -> list[tuple[int, int]]:
    """Maximal contiguous [start, stop) byte ranges of the elements at `offsets`."""
    out: list[tuple[int, int]] = []
    for offset in sorted(offsets):
        if out and out[-1][1] == offset:
            out[-1] = (out[-1][0], offset + itemsize)
        else:
            out.append((offset, offset + itemsize))
    return out


def longest_equal_run(offsets: Iterable[int], itemsize: int) -> int:
    """The longest run length into whose multiples every contiguous range divides."""
    return math.gcd(*(stop - start for start, stop in segments(offsets, itemsize)))


def cut_indices(layout: Layout, cut: Iterable[str]) -> list[dict[str, int]]:
    """Every combination of indices of the cut axes."""
    names = sorted(cut)
    ranges = [range(next(a.extent for a in layout.axes if a.name == n)) for n in names]
    return [dict(zip(names, index, strict=True)) for index in itertools.product(*ranges)]


def subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Every subset of the names."""
    return [
        chosen for size in range(len(names) + 1) for chosen in itertools.combinations(names, size)
    ]


def spanned(axes: Collection[Axis], itemsize: int) -> int:
    """Bytes from the first to past the last element of the axes, found by walking them."""
    return max(elements(Layout(tuple(axes), itemsize)).values(), default=0) + itemsize


@st.composite
def shapes(draw: st.DrawFn, max_axes: int = 5, max_elements: int = 120) -> dict[str, int]:
    """Axis names with extents (1 included) of a small object."""
    count = draw(st.integers(1, max_axes))
    extents: dict[str, int] = {}
    room = max_elements
    for name in "abcdefgh"[:count]:
        extents[name] = draw(st.integers(1, max(1, min(4, room))))
        room //= extents[name]
    return extents


@st.composite
def layouts_of(
    draw: st.DrawFn,
    extents: Mapping[str, int],
    itemsize: int,
    max_offset: int = 70,
    max_padding: int = 9,
) -> Layout:
    """Any byte order of `extents`: shuffled axes, padding anywhere, any offset.

    The stored order of the axes is shuffled too, and an axis of one step has any stride.
    """
    order = draw(st.permutations(list(extents)))
    padding = st.one_of(st.just(0), st.integers(0, max_padding))
    below: list[Axis] = []
    end = itemsize
    for name in order:
        if extents[name] == 1:
            below.append(Axis(name, 1, draw(st.integers(1, 500))))
            continue
        stride = end + draw(padding)
        below.append(Axis(name, extents[name], stride))
        end += (extents[name] - 1) * stride
    axes = draw(st.permutations(below))
    return Layout(tuple(axes), itemsize, draw(st.integers(0, max_offset)))


@st.composite
def layouts(draw: st.DrawFn, max_axes: int = 5, max_elements: int = 120) -> Layout:
    """Any small layout."""
    extents = draw(shapes(max_axes, max_elements))
    return draw(layouts_of(extents, draw(st.sampled_from([1, 2, 3, 4, 8]))))


def execute(plan, source, target, src_step=0, dst_step=0):
    """Carry out a plan byte for byte."""
    from_, to = plan.offsets()
    assert from_.dtype == to.dtype == np.uint64
    assert from_.shape == to.shape == (plan.runs,)
    for here, there in zip(from_.tolist(), to.tolist(), strict=True):
        taken = slice(here + src_step, here + src_step + plan.run)
        given_ = slice(there + dst_step, there + dst_step + plan.run)
        assert 0 <= taken.start < taken.stop <= len(source)
        assert 0 <= given_.start < given_.stop <= len(target)
        target[given_] = source[taken]


def buffers(rng, *layouts):
    return [rng.integers(0, 256, layout.end + 16, np.uint8) for layout in layouts]
