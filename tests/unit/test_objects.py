"""Objects hold the bytes that numpy says they hold; the grid is global; signatures tell orders."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import ConfigError, LayoutError
from kvconnect.objects import cells_of, head_group_of, object_shapes, signature
from kvconnect.placement import Placement, Span
from kvconnect.pool import Pool
from tests.unit.held_pools import (
    NAMED,
    held,
    local,
    pools,
    steady,
    whole,
)


def object_in_memory(one, shape, page):
    """Follow source and target of every segment, element by element."""
    out = np.zeros(shape.nbytes, dtype=np.uint8)
    seen = np.zeros(shape.nbytes, dtype=np.int64)
    for segment in shape.segments:
        names = [axis.name for axis in segment.target.axes]
        extents = [axis.extent for axis in segment.target.axes]
        index = np.indices(extents).reshape(len(names), math.prod(extents))
        source = np.full(index.shape[1], segment.source.offset, dtype=np.int64)
        target = np.full(index.shape[1], segment.target.offset, dtype=np.int64)
        source += page * segment.source.axis("page").stride
        for name, steps in zip(names, index, strict=True):
            source += steps * segment.source.axis(name).stride
            target += steps * segment.target.axis(name).stride
        step = np.arange(segment.source.itemsize)
        out[target[:, None] + step] = one.buffers[segment.plane].view[source[:, None] + step]
        seen[target[:, None] + step] += 1
    assert (seen == 1).all(), "segments tile the object exactly once"
    return out.tobytes()


@steady
@given(one=pools(), data=st.data())
def test_an_object_holds_exactly_the_bytes_of_its_cell(one, data):
    pool = one.pool
    object_layout = data.draw(st.sampled_from(["native", "canonical"]))
    divisors = [n for n in range(1, pool.heads + 1) if pool.heads % n == 0]
    group = data.draw(st.sampled_from(divisors))
    chunk = data.draw(st.integers(1, pool.layers)) if "layer" in pool.planes[0].layout else None
    placement = whole(pool)
    cells = cells_of(placement, group, chunk)
    shapes = object_shapes(pool, placement, cells, object_layout)
    page = data.draw(st.integers(0, pool.pages - 1))
    for shape, cell in zip(shapes, cells, strict=True):
        layers, heads = local(cell.layers, placement.layers), local(cell.heads, placement.heads)
        expected = one.stored(page, layers, heads, object_layout)
        assert shape.nbytes == len(expected)
        assert object_in_memory(one, shape, page) == expected


@steady
@given(one=pools(), chunk=st.integers(1, 3))
def test_the_cells_tile_what_the_rank_holds(one, chunk):
    placement = whole(one.pool)
    count = np.zeros((one.pool.layers, one.pool.heads), dtype=int)
    for cell in cells_of(placement, 1, chunk):
        count[cell.layers.start : cell.layers.stop, cell.heads.start : cell.heads.stop] += 1
    assert (count == 1).all()


@pytest.mark.parametrize("object_layout", ["native", "canonical"])
@pytest.mark.parametrize("order", [*NAMED.values(), "pbhlcsd", "pblcshd"])
def test_the_order_of_an_object_does_not_depend_on_how_many_heads_a_rank_has(order, object_layout):
    signatures = set()
    for size in (1, 2, 4, 8):
        one = held(order, heads=8 // size, block=1 if "b" in order else 0)
        placement = Placement.tensor_parallel(layers=3, heads=8, rank=0, size=size)
        shapes = object_shapes(one.pool, placement, cells_of(placement, 1), object_layout)
        signatures.add(signature(shapes[0]))
    assert len(signatures) == 1


@steady
@given(
    order=st.permutations("clshd"),
    page_at=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    pads=st.tuples(*[st.lists(st.integers(0, 3), max_size=6)] * 2),
)
def test_equal_signatures_mean_equal_byte_orders(order, page_at, pads):
    """Where the page axis lies, and padding, change the memory but never the object."""
    stored, signatures = [], set()
    for at, pad in zip(page_at, pads, strict=True):
        one = held("".join([*order[:at], "p", *order[at:]]), pads=pad)
        shapes = object_shapes(one.pool, whole(one.pool), cells_of(whole(one.pool), None), "native")
        one.write([2], one.random(1, seed=7))
        stored.append(object_in_memory(one, shapes[0], 2))
        signatures.add(signature(shapes[0]))
    assert len(signatures) == 1
    assert stored[0] == stored[1]


@steady
@given(orders=st.tuples(st.permutations("clshd"), st.permutations("clshd")))
def test_other_byte_orders_have_other_signatures(orders):
    stored, signatures = [], []
    for order in orders:
        one = held("p" + "".join(order))
        shapes = object_shapes(one.pool, whole(one.pool), cells_of(whole(one.pool), None), "native")
        one.write([0], one.random(1, seed=7))
        stored.append(object_in_memory(one, shapes[0], 0))
        signatures.append(signature(shapes[0]))
    assert (stored[0] == stored[1]) == (signatures[0] == signatures[1])


@pytest.mark.parametrize(
    ("order", "blocks", "expected"),
    [
        ("cphsld", 0, "k:head.slot.layer.dim|v:head.slot.layer.dim"),
        ("clpshd", 0, "k:layer.slot.head.dim|v:layer.slot.head.dim"),
        ("plcshd", 0, "k+v:layer.component.slot.head.dim"),
        ("pblcshd", 2, "k+v:head_block2.layer.component.slot.head.dim"),
        ("pbhlcsd", 2, "k+v:head.layer.component.slot.dim"),
    ],
)
def test_native_signatures_name_the_order(order, blocks, expected):
    one = held(order, block=blocks)
    shapes = object_shapes(one.pool, whole(one.pool), cells_of(whole(one.pool), None), "native")
    assert signature(shapes[0]) == expected


@pytest.mark.parametrize("order", [*NAMED.values(), "pblcshd"])
def test_every_order_has_one_canonical_signature(order):
    one = held(order, block=2 if "b" in order else 0)
    shapes = object_shapes(one.pool, whole(one.pool), cells_of(whole(one.pool), 2), "canonical")
    assert {signature(shape) for shape in shapes} == {"k:head.slot.layer.dim|v:head.slot.layer.dim"}


@steady
@given(total=st.sampled_from([1, 2, 4, 6, 8, 12]), data=st.data())
def test_the_head_group_is_whole_in_every_rank_of_the_fleet(total, data):
    sizes = data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=3))
    legal = all(total % size == 0 or size % total == 0 for size in sizes)
    if not legal:
        with pytest.raises(ConfigError):
            head_group_of(total_heads=total, tp_sizes=sizes)
        return
    group = head_group_of(total_heads=total, tp_sizes=sizes)
    held_heads = [max(total // size, 1) for size in sizes]
    assert all(heads % group == 0 for heads in held_heads)
    assert not any(
        all(heads % larger == 0 for heads in held_heads) and total % larger == 0
        for larger in range(group + 1, total + 1)
    ), "a larger group would do"


@pytest.mark.parametrize("group", [0, -2, 3.0, 3, 16, True])
def test_head_groups_that_cannot_be_are_refused(group):
    with pytest.raises(ConfigError, match="head_group"):
        head_group_of(total_heads=8, head_group=group)


@pytest.mark.parametrize("size", [0, -2, 3, 3.0, "2", 12])
def test_tp_sizes_that_cannot_be_are_refused(size):
    with pytest.raises(ConfigError, match="tp_sizes"):
        head_group_of(total_heads=8, tp_sizes=(2, size))


def test_eight_heads_at_tp8_are_not_replicated():
    assert head_group_of(total_heads=8, tp_sizes=(8,)) == 1
    placement = Placement.tensor_parallel(layers=2, heads=8, rank=5, size=8)
    assert (placement.heads, placement.replicas) == (Span(5, 6, 8), 1)


def test_lcm_6_with_a_tp4_rank_is_refused():
    """6 heads serve TP 2 and 3 (groups of one head); TP 4 cannot hold 6 heads at all."""
    assert head_group_of(total_heads=6, tp_sizes=(2, 3)) == 1
    with pytest.raises(ConfigError, match="one must divide"):
        Placement.tensor_parallel(layers=1, heads=6, rank=0, size=4)
    with pytest.raises(ConfigError, match="tp_sizes"):
        head_group_of(total_heads=6, tp_sizes=(2, 3, 4))


def test_a_rank_that_holds_half_a_group_is_refused_with_both_numbers():
    placement = Placement.tensor_parallel(layers=2, heads=8, rank=1, size=8)
    with pytest.raises(ConfigError, match=r"\[1, 2\) of 8 .* groups of 4"):
        cells_of(placement, 4)


def test_layer_chunks_are_global():
    """Uneven pipeline stages share objects where the chunk divides every boundary."""
    stages = [Span(0, 2, 7), Span(2, 6, 7), Span(6, 7, 7)]
    cells = [
        cell.layers for span in stages for cell in cells_of(Placement(span, Span(0, 1, 1)), None, 2)
    ]
    assert cells == [Span(0, 2, 7), Span(2, 4, 7), Span(4, 6, 7), Span(6, 7, 7)]
    with pytest.raises(ConfigError, match="layer_chunk"):
        cells_of(Placement(Span(0, 3, 7), Span(0, 1, 1)), None, 2)


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (Placement(Span(0, 3, 3), Span(0, 2, 4)), "4 local heads.*holds 2"),
        (Placement(Span(0, 2, 3), Span(0, 4, 4)), "3 local layers.*holds 2"),
    ],
)
def test_a_pool_that_does_not_hold_its_placement_is_refused(placement, words):
    with pytest.raises(LayoutError, match=words):
        object_shapes(held().pool, placement, cells_of(placement, None), "native")


def test_a_plane_without_heads_cannot_be_cut_by_heads():
    one = held("plsd", heads=1, dims=(4, 0))
    pool = Pool(one.pool.planes, 2, 3, 4, 4, 0, "bfloat16")
    with pytest.raises(LayoutError, match=r"without a head axis.*1 of 4 heads"):
        object_shapes(pool, whole(pool), cells_of(whole(pool), 1), "native")
