"""`cover` against a walk over all bytes, and the worked numbers of the design page."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cover import cover, require_one_run
from kvconnect.errors import LayoutError
from kvconnect.layout import Axis, Layout
from tests.unit.algebra_oracle import (
    as_bytes,
    cut_indices,
    elements,
    examples,
    layouts,
    longest_equal_run,
    segments,
    shapes,
    subsets,
)


@examples(150)
@given(layouts())
def test_runs_are_exactly_the_object_and_the_fewest_equal_ones(layout):
    for cut in subsets(layout.names):
        found = cover(layout, cut)
        first = elements(layout, dict.fromkeys(cut, 0))
        offsets = found.run_offsets()
        assert offsets.dtype == np.uint64
        assert offsets.shape == (found.runs,)
        starts = offsets.tolist()
        assert starts == sorted(starts)
        covered = [start + i for start in starts for i in range(found.run)]
        assert covered == as_bytes(first.values(), layout.itemsize)  # all, once, nothing else
        assert found.run == longest_equal_run(first.values(), layout.itemsize)
        assert found.runs * found.run == found.nbytes == len(first) * layout.itemsize


@examples(80)
@given(layouts(max_axes=4))
def test_objects_at_every_cut_index_tile_the_plane(layout):
    for cut in subsets(layout.names):
        found = cover(layout, cut)
        assert {axis.name for axis in found.cut} == set(cut)
        strides = {axis.name: axis.stride for axis in found.cut}
        covered = []
        for index in cut_indices(layout, cut):
            step = sum(index[name] * strides[name] for name in cut)
            of_object = sorted(
                start + step + i for start in found.run_offsets().tolist() for i in range(found.run)
            )
            assert of_object == as_bytes(elements(layout, index).values(), layout.itemsize)
            covered += of_object
        assert sorted(covered) == as_bytes(elements(layout).values(), layout.itemsize)


@examples(150)
@given(layouts())
def test_one_run_exactly_where_whole_axes_chain_and_else_the_axis_is_named(layout):
    for cut in subsets(layout.names):
        found = cover(layout, cut)
        first = elements(layout, dict.fromkeys(cut, 0))
        one = len(segments(first.values(), layout.itemsize)) == 1
        assert (found.runs == 1) == one
        assert (found.broken is None) == one
        assert (found.why_not_one_run() is None) == one
        if one:
            assert require_one_run(layout, cut) == found
            continue
        # The first axis that does not chain: the nearest element past the first run.
        (_, needed), *_ = segments(first.values(), layout.itemsize)
        needed -= layout.offset
        broken, wants = found.broken
        whole = [a for a in layout.axes if a.extent > 1 and a.name not in cut]
        assert broken == min((a for a in whole if a.stride >= needed), key=lambda a: a.stride)
        assert wants == needed != broken.stride
        reason = found.why_not_one_run()
        with pytest.raises(LayoutError, match=re.escape(broken.name)) as caught:
            require_one_run(layout, cut)
        for text in (reason, str(caught.value)):
            assert re.search(rf"\b{re.escape(broken.name)}\b", text)
            assert str(broken.stride) in text
            assert str(wants) in text


@examples(80)
@given(shapes(), st.sampled_from([1, 2, 4]))
def test_in_a_packed_plane_cutting_is_free_above_everything_whole(extents, itemsize):
    layout = Layout.packed(extents, itemsize)
    names = list(extents)  # outermost first, so the stride falls along the list
    for cut in subsets(names):
        moving = [name for name in names if extents[name] > 1]
        kinds = [name in cut for name in moving]
        free = kinds == sorted(kinds, reverse=True)
        assert (cover(layout, cut).runs == 1) == free


@examples(80)
@given(layouts())
def test_loops_enumerate_the_runs(layout):
    for cut in subsets(layout.names):
        found = cover(layout, cut)
        assert math.prod(loop.extent for loop in found.loops) == found.runs
        starts = [layout.offset]
        for loop in found.loops:
            starts = [start + i * loop.stride for start in starts for i in range(loop.extent)]
        assert starts == found.run_offsets().tolist()
        merged = [name for loop in found.loops for name in loop.axes]
        assert len(set(merged)) == len(merged)
        assert not set(merged) & set(cut)
        for outer, inner in zip(found.loops, found.loops[1:], strict=False):
            assert outer.stride != inner.stride * inner.extent  # would have been one loop


def test_offsets_beyond_32_bits_and_near_the_top_are_exact():
    layout = Layout(
        (Axis("page", 3, 2**62), Axis("layer", 4, 2**40 + 1), Axis("dim", 8, 2)), 2, 2**63 - 5
    )
    found = cover(layout, {"page"})
    assert found.run == 16
    assert found.run_offsets().tolist() == [2**63 - 5 + i * (2**40 + 1) for i in range(4)]


@pytest.mark.parametrize("cut", [{"nope"}, {"page", "nope"}])
def test_cutting_an_axis_that_does_not_exist_is_a_typed_error(cut):
    layout = Layout.packed({"page": 2, "head": 4}, 2)
    with pytest.raises(LayoutError, match="nope"):
        cover(layout, cut)
    with pytest.raises(LayoutError, match="nope"):
        require_one_run(layout, cut)


def test_the_kind_and_order_of_the_cut_do_not_matter():
    layout = Layout.packed({"page": 2, "head": 4, "slot": 3, "dim": 2}, 2)
    expected = cover(layout, {"page", "head"}).run_offsets().tolist()
    for cut in (["head", "page"], ("page", "head"), frozenset({"page", "head"}), {"head", "page"}):
        found = cover(layout, cut)
        assert found.run_offsets().tolist() == expected
        assert found.runs == 1


# The worked numbers of the design page: P pages, L=32, S=64, H=8, D=128, bf16.
KIB, MIB = 1024, 1024 * 1024
P, L, S, H, D = 5, 32, 64, 8, 128


def _pool(*names, bf16=2, **extents):
    sizes = {"component": 2, "page": P, "layer": L, "slot": S, "head": H, "dim": D, **extents}
    return Layout.packed([(name, sizes[name]) for name in names], bf16)


LAYER_FIRST = _pool("component", "layer", "page", "slot", "head", "dim")
PAGE_FIRST = _pool("component", "page", "slot", "layer", "head", "dim")
PAGE_FIRST_DIRECT = _pool("component", "page", "layer", "slot", "head", "dim")
PAGE_HEAD = _pool("component", "page", "head", "slot", "layer", "dim")
PAGE_UNIFIED = _pool("page", "group", "layer", "component", "slot", "head", "dim", group=4, head=2)
K192 = _pool("page", "head", "slot", "layer", "dim", head=4, layer=60, dim=192)
V128 = _pool("page", "head", "slot", "layer", "dim", head=4, layer=60, dim=128)
ALONE, BOTH = {"component", "page"}, {"page"}


def _grouped(layout, groups):
    return layout.split("head", layout.extents["head"] // groups, "group", "head")


WORKED = [
    ("layer_first whole page", LAYER_FIRST, ALONE, 32, 128 * KIB),
    ("layer_first K+V", LAYER_FIRST, BOTH, 64, 128 * KIB),
    ("layer_first 4 groups", _grouped(LAYER_FIRST, 4), ALONE | {"group"}, 2048, 512),
    ("layer_first one layer", LAYER_FIRST, ALONE | {"layer"}, 1, 128 * KIB),
    ("page_first whole page", PAGE_FIRST, ALONE, 1, 4 * MIB),
    ("page_first K+V", PAGE_FIRST, BOTH, 2, 4 * MIB),
    ("page_first 4 groups", _grouped(PAGE_FIRST, 4), ALONE | {"group"}, 2048, 512),
    ("page_first one layer", PAGE_FIRST, ALONE | {"layer"}, 64, 2 * KIB),
    ("page_first_direct whole page", PAGE_FIRST_DIRECT, ALONE, 1, 4 * MIB),
    ("page_first_direct K+V", PAGE_FIRST_DIRECT, BOTH, 2, 4 * MIB),
    ("page_first_direct 4 groups", _grouped(PAGE_FIRST_DIRECT, 4), ALONE | {"group"}, 2048, 512),
    ("page_first_direct one layer", PAGE_FIRST_DIRECT, ALONE | {"layer"}, 1, 128 * KIB),
    ("page_head whole page", PAGE_HEAD, ALONE, 1, 4 * MIB),
    ("page_head K+V", PAGE_HEAD, BOTH, 2, 4 * MIB),
    ("page_head 4 groups", _grouped(PAGE_HEAD, 4), ALONE | {"group"}, 1, 1 * MIB),
    ("page_head one layer", PAGE_HEAD, ALONE | {"layer"}, 512, 256),
    ("page_unified whole page", PAGE_UNIFIED, ALONE, 128, 32 * KIB),
    ("page_unified K+V", PAGE_UNIFIED, BOTH, 1, 8 * MIB),
    ("page_unified K+V of a group", PAGE_UNIFIED, BOTH | {"group"}, 1, 2 * MIB),
    ("page_unified one layer of a group", PAGE_UNIFIED, BOTH | {"group", "layer"}, 1, 64 * KIB),
    ("K 192 whole page", K192, BOTH, 1, 5760 * KIB),
    ("V 128 whole page", V128, BOTH, 1, 3840 * KIB),
    ("K 192, 2 groups", _grouped(K192, 2), BOTH | {"group"}, 1, 2880 * KIB),
    ("V 128, 2 groups", _grouped(V128, 2), BOTH | {"group"}, 1, 1920 * KIB),
]


@pytest.mark.parametrize(
    ("layout", "cut", "runs", "run"), [w[1:] for w in WORKED], ids=[w[0] for w in WORKED]
)
def test_worked_numbers(layout, cut, runs, run):
    found = cover(layout, cut)
    assert (found.runs, found.run) == (runs, run)
    if runs == 1:
        assert require_one_run(layout, cut).nbytes == run
    else:
        with pytest.raises(LayoutError):
            require_one_run(layout, cut)
