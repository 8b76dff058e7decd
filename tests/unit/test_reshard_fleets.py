"""Resharding whole fleets: every destination byte against the model's value there."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import LayoutError
from kvconnect.layout import Axis, Layout
from kvconnect.placement import Placement, Span
from kvconnect.reshard import narrow_to, reshard, same_page_size
from tests.unit.algebra_oracle import (
    buffers,
    elements,
    examples,
    execute,
)

SLOT, DIM, PAGES = 3, 2, 5
SOURCE_IDS, TARGET_IDS = (4, 0, 2), (1, 3, 0)


def _value(component, page, layer, slot, head, dim):
    """Four bytes that belong to one global element only."""
    for step, extent in ((page, 16), (layer, 64), (slot, 16), (head, 16), (dim, 4)):
        assert step < extent
        component = component * extent + step
    return np.frombuffer((component * 2654435761 % 2**32).to_bytes(4, "little"), np.uint8)


def _walk(layout, placement, page, page_id):
    """(offset, value) of every element of one page of a rank."""
    for index, offset in elements(layout, {"page": page_id}).items():
        by_name = dict(zip(sorted(set(layout.names) - {"page"}), index, strict=True))
        yield (
            offset,
            _value(
                by_name.get("component", 0),
                page,
                by_name["layer"] + placement.layers.start,
                by_name["slot"],
                by_name.get("head", 0) + placement.heads.start,
                by_name["dim"],
            ),
        )


def _pool(rng, placement, *, component=2, head=True, slot=SLOT):
    """A random byte order, padded at random, of what a rank holds."""
    extents = {"page": PAGES, "layer": placement.layers.extent, "slot": slot, "dim": DIM}
    if head:
        extents["head"] = placement.heads.extent
    if component > 1:
        extents["component"] = component
    axes, end = [], 4
    for name in rng.permutation(list(extents)):
        stride = end + int(rng.integers(0, 2)) * int(rng.integers(0, 9))
        axes.append(Axis(str(name), extents[name], stride))
        end += (extents[name] - 1) * stride
    return Layout(tuple(axes), 4, int(rng.integers(0, 32)))


def _grid(layer_cuts, heads, size):
    return [
        Placement.tensor_parallel(
            layers=Span(a, b, layer_cuts[-1]), heads=heads, rank=rank, size=size
        )
        for a, b in itertools.pairwise(layer_cuts)
        for rank in range(size)
    ]


def _reshard_fleet(sources, targets, seed=0, **pool):
    """Move three pages from every source rank that holds something to every target rank."""
    rng = np.random.default_rng(seed)
    filled = []
    for placement in sources:
        layout = _pool(rng, placement, **pool)
        (buffer,) = buffers(rng, layout)
        for page, page_id in enumerate(SOURCE_IDS):
            for offset, value in _walk(layout, placement, page, page_id):
                buffer[offset : offset + 4] = value
        filled.append((layout, placement, buffer))
    for placement in targets:
        layout = _pool(rng, placement, **pool)
        (buffer,) = buffers(rng, layout)
        expected = buffer.copy()
        for page, page_id in enumerate(TARGET_IDS):
            for offset, value in _walk(layout, placement, page, page_id):
                expected[offset : offset + 4] = value
        moved = 0
        for src, held, source in filled:
            plan = reshard(src, held, layout, placement)
            disjoint = held.layers.meet(placement.layers) is None
            disjoint = disjoint or held.heads.meet(placement.heads) is None
            assert (plan is None) == disjoint
            if plan is None or held.replica != placement.replica % held.replicas:
                continue
            moved += plan.nbytes
            for page, page_id in zip(SOURCE_IDS, TARGET_IDS, strict=True):
                steps = page * src.axis("page").stride, page_id * layout.axis("page").stride
                execute(plan, source, buffer, *steps)
        assert np.array_equal(buffer, expected)
        assert moved == layout.nbytes // PAGES  # every byte of a page, once


@pytest.mark.parametrize(
    ("heads", "src", "dst"),
    [(6, 3, 2), (6, 2, 3), (6, 6, 1), (6, 1, 6), (8, 4, 2), (8, 2, 8), (12, 4, 3), (4, 4, 4)],
)
def test_tensor_parallel_to_another_size(heads, src, dst):
    _reshard_fleet(_grid([0, 2], heads, src), _grid([0, 2], heads, dst), seed=heads + src)


@pytest.mark.parametrize(
    ("heads", "src", "dst"), [(2, 4, 2), (2, 2, 8), (2, 8, 4), (1, 4, 2), (3, 6, 3), (2, 4, 1)]
)
def test_replicated_heads(heads, src, dst):
    _reshard_fleet(_grid([0, 2], heads, src), _grid([0, 2], heads, dst), seed=heads + dst)


@pytest.mark.parametrize(
    ("src", "dst"),
    [([0, 16, 31, 46, 61], [0, 31, 61]), ([0, 61], [0, 1, 60, 61]), ([0, 30, 61], [0, 31, 61])],
)
def test_uneven_pipeline_stages_of_61_layers(src, dst):
    _reshard_fleet(_grid(src, 1, 1), _grid(dst, 1, 1), component=1)


def test_pipeline_and_tensor_parallel_at_once():
    _reshard_fleet(_grid([0, 2, 5], 6, 3), _grid([0, 1, 4, 5], 6, 2))


def test_mla_without_a_head_axis():
    _reshard_fleet(_grid([0, 3], 1, 4), _grid([0, 1, 3], 1, 2), component=1, head=False)


@examples(40)
@given(
    st.sets(st.integers(1, 3), max_size=2),
    st.sets(st.integers(1, 3), max_size=2),
    st.sampled_from([(6, 3), (6, 2), (4, 1), (2, 4), (1, 2)]),
    st.data(),
)
def test_any_two_fleets_of_one_model(src_cuts, dst_cuts, tp, data):
    heads, size = tp
    sizes = [n for n in range(1, 7) if heads % n == 0 or n % heads == 0]
    other = data.draw(st.sampled_from(sizes))
    _reshard_fleet(
        _grid([0, *sorted(src_cuts), 4], heads, size),
        _grid([0, *sorted(dst_cuts), 4], heads, other),
        seed=data.draw(st.integers(0, 2**32)),
        component=data.draw(st.sampled_from([1, 2])),
        slot=2,
    )


def _tp(heads, rank, size, layers=2):
    return Placement.tensor_parallel(layers=layers, heads=heads, rank=rank, size=size)


def _local(placement, **more):
    extents = {
        "page": 4,
        "layer": placement.layers.extent,
        "slot": 4,
        "head": placement.heads.extent,
        "dim": 2,
    }
    return Layout.packed({**extents, **more}, 2)


def test_narrow_to_keeps_exactly_the_global_ranges():
    held = Placement(Span(2, 7, 9), Span(3, 6, 8))
    part = Placement(Span(4, 6, 9), Span(5, 6, 8))
    layout = _local(held)
    expected = {
        tuple(i - shift for i, shift in zip(index, (0, 2, 2, 0, 0), strict=True)): offset
        for index, offset in elements(layout).items()  # dim, head, layer, page, slot
        if 4 <= index[2] + 2 < 6
        if 5 <= index[1] + 3 < 6
    }
    shifted = {
        (d, h, la, p, s): offset
        for (d, h, la, p, s), offset in elements(narrow_to(layout, held, part)).items()
    }
    assert shifted == expected


@pytest.mark.parametrize(
    ("held", "part", "more"),
    [
        pytest.param(_tp(8, 0, 2), _tp(8, 1, 2), {}, id="heads not held"),
        pytest.param(_tp(8, 0, 2), _tp(8, 0, 1), {}, id="heads partly held"),
        pytest.param(_tp(8, 0, 2), _tp(8, 0, 4), {"head": 3}, id="pool of 3 heads, not 4"),
        pytest.param(_tp(8, 0, 2), _tp(8, 0, 4), {"head": 8}, id="pool of 8 heads, not 4"),
        pytest.param(_tp(8, 0, 2), _tp(8, 0, 4), {"layer": 3}, id="pool of 3 layers, not 2"),
        pytest.param(_tp(8, 0, 2), _tp(16, 0, 8), {}, id="another model's heads"),
        pytest.param(_tp(8, 0, 2), _tp(8, 0, 2, layers=3), {}, id="another model's layers"),
    ],
)
def test_ranges_that_the_layout_does_not_hold_are_typed_errors(held, part, more):
    with pytest.raises(LayoutError):
        narrow_to(_local(held, **more), held, part)


def test_an_absent_axis_cannot_be_narrowed():
    held = _tp(8, 0, 2)
    whole = _local(held)
    for name, part in (
        ("head", _tp(8, 0, 4)),
        ("layer", Placement(Span(0, 1, 2), held.heads)),
    ):
        with pytest.raises(LayoutError, match=name):
            narrow_to(whole.select(name, 0), held, part)


def test_ranks_of_different_shards_share_nothing_and_odd_page_sizes_are_refused():
    def cp(rank):
        return Placement.tensor_parallel(
            layers=2, heads=2, rank=0, size=1, shards=(("cp", Span(rank, rank + 1, 2)),)
        )

    layout = _local(cp(0))
    assert reshard(layout, cp(0), layout, cp(1)) is None
    assert reshard(layout, cp(1), layout, cp(1)).nbytes == layout.nbytes // 4
    with pytest.raises(LayoutError):
        reshard(layout, cp(0), _local(cp(0), slot=8), cp(0))


def test_shards_that_overlap_in_part_are_refused_not_skipped():
    def cp(start, stop):
        return Placement(Span(0, 2, 2), Span(0, 2, 2), shards=(("cp", Span(start, stop, 4)),))

    layout = _local(cp(0, 2))
    for other in (cp(1, 3), cp(0, 4), Placement(Span(0, 2, 2), Span(0, 2, 2))):
        with pytest.raises(LayoutError, match="cp"):
            reshard(layout, cp(0, 2), layout, other)
        with pytest.raises(LayoutError, match="cp"):
            reshard(layout, other, layout, cp(0, 2))


@pytest.mark.parametrize(
    ("src_slot", "dst_slot"), [(16, 64), (64, 16), (6, 4), (1, 8), (4, 4), (3, 2)]
)
def test_page_sizes_meet_in_pieces(src_slot, dst_slot):
    """A sequence of tokens, scattered over pages of one size, arrives in pages of another."""
    rng = np.random.default_rng(src_slot * 100 + dst_slot)
    tokens = 2 * math.lcm(src_slot, dst_slot)
    sides = []
    for slot, heads in ((src_slot, ["head", "slot"]), (dst_slot, ["slot", "head"])):
        count = tokens // slot + 3
        layout = Layout.packed(
            {"page": count, "layer": 2, **{n: slot if n == "slot" else 2 for n in heads}}, 4
        )
        ids = rng.permutation(count)[: tokens // slot].tolist()
        sides.append((layout, ids, *buffers(rng, layout)))

    def write(buffer, layout, ids, slot):
        for page, page_id in enumerate(ids):
            for (head, layer, at), offset in elements(layout, {"page": page_id}).items():
                number = ((page * slot + at) * 2 + layer) * 2 + head + 1
                buffer[offset : offset + 4] = np.frombuffer(number.to_bytes(4, "big"), np.uint8)

    (src, src_ids, source), (dst, dst_ids, target) = sides
    write(source, src, src_ids, src_slot)
    expected = target.copy()
    write(expected, dst, dst_ids, dst_slot)

    pieces = same_page_size(src, dst)
    common = math.gcd(src_slot, dst_slot)
    assert [p.extents["slot"] for p in pieces] == [common, common]
    parts = [p.extents["part"] for p in pieces]
    assert parts == [src_slot // common, dst_slot // common]
    for whole, piece in zip((src, dst), pieces, strict=True):
        assert sorted(elements(whole).values()) == sorted(elements(piece).values())
    placement = Placement.whole(layers=2, heads=2)
    plan = reshard(pieces[0], placement, pieces[1], placement, cut=("page", "part"))
    for i in range(tokens // common):
        steps = [
            ids[i // n] * piece.axis("page").stride + i % n * piece.axis("part").stride
            for piece, n, ids in zip(pieces, parts, (src_ids, dst_ids), strict=True)
        ]
        execute(plan, source, target, *steps)
    assert np.array_equal(target, expected)


def test_same_page_size_needs_a_slot_axis():
    base = Layout.packed({"slot": 4, "head": 2}, 2)
    with pytest.raises(LayoutError, match="slot"):
        same_page_size(base, base.select("slot", 0))
