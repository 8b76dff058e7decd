"""Copy plans and resharding against a copy made element by element."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import LayoutError
from kvconnect.layout import Axis, Layout
from kvconnect.reshard import plan_copy
from tests.unit.algebra_oracle import (
    buffers,
    cut_indices,
    elements,
    examples,
    execute,
    layouts_of,
    shapes,
    subsets,
)

ITEMSIZES = st.sampled_from([1, 2, 3, 4])


@st.composite
def _pairs(draw, max_axes=4, max_elements=72):
    """Two layouts of the same elements, and the itemsize."""
    extents = draw(shapes(max_axes, max_elements))
    itemsize = draw(ITEMSIZES)
    return draw(layouts_of(extents, itemsize)), draw(layouts_of(extents, itemsize))


def _longest_run(src, dst, itemsize):
    """Try every run length, longest first: the elements must group into runs on both sides."""
    pairs = sorted((src[index], dst[index]) for index in src)
    for length in range(len(pairs), 0, -1):
        if len(pairs) % length:
            continue
        groups = [pairs[i : i + length] for i in range(0, len(pairs), length)]
        if all(
            (s - group[0][0], d - group[0][1]) == (i * itemsize, i * itemsize)
            for group in groups
            for i, (s, d) in enumerate(group)
        ):
            return length * itemsize
    raise AssertionError


@examples(150)
@given(_pairs(), st.integers(0, 2**32))
def test_the_copy_is_the_elementwise_one_and_touches_nothing_else(pair, seed):
    src, dst = pair
    rng = np.random.default_rng(seed)
    for cut in subsets(src.names):
        plan = plan_copy(src, dst, cut)
        source, target = buffers(rng, src, dst)
        for index in cut_indices(src, cut):
            expected = target.copy()
            here, there = elements(src, index), elements(dst, index)
            for at, offset in here.items():
                for byte in range(src.itemsize):
                    expected[there[at] + byte] = source[offset + byte]
            steps = [sum(index[n] * layout.axis(n).stride for n in cut) for layout in (src, dst)]
            execute(plan, source, target, *steps)
            assert np.array_equal(target, expected)
        assert plan.nbytes == plan.runs * plan.run
        assert plan.nbytes == len(elements(src, dict.fromkeys(cut, 0))) * src.itemsize


@examples(150)
@given(_pairs(max_elements=48))
def test_no_longer_equal_run_exists(pair):
    src, dst = pair
    for cut in subsets(src.names):
        first = dict.fromkeys(cut, 0)
        plan = plan_copy(src, dst, cut)
        assert plan.run == _longest_run(elements(src, first), elements(dst, first), src.itemsize)
        assert math.prod(loop.extent for loop in plan.loops) == plan.runs


@examples(60)
@given(_pairs())
def test_the_plan_back_is_the_same_plan_swapped(pair):
    src, dst = pair
    there, back = plan_copy(src, dst), plan_copy(dst, src)
    assert (there.run, there.runs) == (back.run, back.runs)
    assert sorted(zip(*(o.tolist() for o in there.offsets()), strict=True)) == sorted(
        (s, d) for d, s in zip(*(o.tolist() for o in back.offsets()), strict=True)
    )


def test_offsets_beyond_32_bits_are_exact():
    src = Layout((Axis("layer", 3, 2**61), Axis("dim", 4, 2)), 2, 2**62 + 1)
    dst = Layout((Axis("layer", 3, 8), Axis("dim", 4, 2)), 2)
    here, there = plan_copy(src, dst).offsets()
    assert sorted(zip(here.tolist(), there.tolist(), strict=True)) == [
        (2**62 + 1 + i * 2**61, 8 * i) for i in range(3)
    ]


BASE = Layout.packed({"slot": 4, "head": 2, "dim": 8}, 2)


@pytest.mark.parametrize(
    "other",
    [
        Layout.packed({"slot": 4, "head": 2, "dim": 8}, 1),
        Layout.packed({"slot": 4, "head": 2, "dim": 8}, 4),
        Layout.packed({"slot": 4, "head": 2, "dim": 8}, 2, form="k_transposed"),
        Layout.packed({"slot": 4, "head": 4, "dim": 8}, 2),
        Layout.packed({"slot": 4, "head": 2}, 2),
        Layout.packed({"slot": 4, "head": 2, "dim": 8, "layer": 2}, 2),
        Layout.packed({"slot": 4, "head": 2, "dims": 8}, 2),
    ],
)
def test_layouts_of_different_elements_exchange_nothing(other):
    for src, dst in ((BASE, other), (other, BASE)):
        with pytest.raises(LayoutError):
            plan_copy(src, dst)


def test_the_extents_of_cut_axes_are_free():
    many, few = (Layout.packed({"page": n, "dim": 8}, 2) for n in (9, 4))
    assert plan_copy(many, few, {"page"}).run == 16
