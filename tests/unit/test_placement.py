"""Placements: global ranges, replication, elected writers, tiling."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import ConfigError, KVConnectError, LayoutError
from kvconnect.placement import Placement, Span, check_tiling
from tests.unit.algebra_oracle import examples

UINT64 = st.integers(0, 2**64 - 1)


@st.composite
def spans(draw, total):
    start = draw(st.integers(0, total - 1))
    return Span(start, draw(st.integers(start + 1, total)), total)


def _steps(span):
    return set(range(span.start, span.stop))


@examples(200)
@given(st.integers(1, 12).flatmap(lambda total: st.tuples(spans(total), spans(total))))
def test_span_meet_is_the_intersection(pair):
    one, two = pair
    met = one.meet(two)
    common = _steps(one) & _steps(two)
    assert (met is None) == (not common)
    assert one.extent == len(_steps(one))
    assert two.meet(one) == met
    if met is not None:
        assert _steps(met) == common
        assert met.total == one.total


@pytest.mark.parametrize(
    "args", [(-1, 2, 4), (2, 2, 4), (3, 2, 4), (0, 5, 4), (0, 0, 0), (-2, -1, 4)]
)
def test_impossible_spans_are_typed_errors(args):
    with pytest.raises(KVConnectError):
        Span(*args)


def test_spans_of_different_axes_do_not_meet():
    with pytest.raises(LayoutError, match=r"(?s)8.*6|6.*8"):
        Span(0, 2, 8).meet(Span(0, 2, 6))


DIVIDING = [(h, s) for h in range(1, 13) for s in range(1, 25) if h % s == 0 or s % h == 0]


@pytest.mark.parametrize(("heads", "size"), DIVIDING)
def test_tensor_parallel_gives_every_head_to_an_equal_share_of_ranks(heads, size):
    ranks = [
        Placement.tensor_parallel(layers=3, heads=heads, rank=r, size=size) for r in range(size)
    ]
    holders = {head: [] for head in range(heads)}
    for number, rank in enumerate(ranks):
        assert rank.layers == Span(0, 3, 3)
        assert rank.heads.total == heads
        for head in _steps(rank.heads):
            holders[head].append(number)
    replicas = max(1, size // heads)
    for held_by in holders.values():
        assert held_by == list(range(held_by[0], held_by[0] + replicas))  # consecutive ranks
        assert [ranks[n].replica for n in held_by] == list(range(replicas))
        assert {ranks[n].replicas for n in held_by} == {replicas}
    flat = [head for rank in ranks for head in sorted(_steps(rank.heads))]
    assert flat == sorted(flat)  # ranks hold ascending heads
    check_tiling(ranks)


def test_eight_heads_at_tp8_are_not_replicated():
    ranks = [Placement.tensor_parallel(layers=1, heads=8, rank=r, size=8) for r in range(8)]
    assert [(r.heads.start, r.heads.stop, r.replicas) for r in ranks] == [
        (i, i + 1, 1) for i in range(8)
    ]


@pytest.mark.parametrize(
    ("heads", "rank", "size"),
    [
        (3, 0, 2),  # 3 heads split in 2
        (6, 0, 4),  # lcm 6 with TP4
        (8, 0, 3),
        (4, 0, 6),
        (3, 0, 0),
        (3, 0, -2),
        (3, 0, 3.0),
        (0, 0, 1),
        (-8, 0, 2),
        (8.0, 0, 2),
        (8, 2, 2),
        (8, -1, 2),
        (8, 1.0, 2),
    ],
)
def test_splits_that_cannot_be_are_typed_errors_at_construction(heads, rank, size):
    with pytest.raises(KVConnectError):
        Placement.tensor_parallel(layers=2, heads=heads, rank=rank, size=size)


@pytest.mark.parametrize(("heads", "size"), [(3, 2), (6, 4), (8, 3)])
def test_a_split_that_does_not_divide_names_both_numbers(heads, size):
    with pytest.raises(ConfigError, match=rf"(?s){heads}.*{size}|{size}.*{heads}"):
        Placement.tensor_parallel(layers=2, heads=heads, rank=0, size=size)


@pytest.mark.parametrize(("replica", "replicas"), [(1, 1), (-1, 2), (2, 2), (0, 0), (0, -1)])
def test_a_replica_number_outside_its_group_is_a_typed_error(replica, replicas):
    with pytest.raises(KVConnectError):
        Placement(Span(0, 1, 1), Span(0, 1, 1), replica, replicas)


def test_layers_may_be_a_range_of_the_model():
    stage = Placement.tensor_parallel(layers=Span(16, 31, 61), heads=8, rank=1, size=2)
    assert (stage.layers, stage.heads) == (Span(16, 31, 61), Span(4, 8, 8))
    whole = Placement.whole(layers=61, heads=8)
    assert (whole.layers, whole.heads) == (Span(0, 61, 61), Span(0, 8, 8))
    assert (whole.replica, whole.replicas) == (0, 1)


@examples(100)
@given(st.lists(UINT64, max_size=40), st.integers(1, 13))
def test_every_page_has_exactly_one_writer(digests, replicas):
    pages = np.array(digests, np.uint64)
    duty = [
        Placement(Span(0, 2, 2), Span(0, 1, 1), replica, replicas).writes(pages)
        for replica in range(replicas)
    ]
    assert all(d.dtype == np.bool_ and d.shape == pages.shape for d in duty)
    assert sum(d.astype(int) for d in duty).tolist() == [1] * len(digests)


@pytest.mark.parametrize("replicas", [2, 3, 4, 7, 8])
def test_the_writer_rotates_by_page(replicas):
    pages = np.random.default_rng(7).integers(0, 2**64, 4000, np.uint64, endpoint=False)
    group = [Placement(Span(0, 2, 2), Span(0, 1, 1), r, replicas) for r in range(replicas)]
    shares = np.array([rank.writes(pages).mean() for rank in group])
    assert np.all(shares > 0.75 / replicas)
    assert np.all(shares < 1.25 / replicas)
    # a page's writer follows from its digest alone, not from its place in the call
    shuffled = np.random.default_rng(8).permutation(len(pages))
    assert np.array_equal(group[0].writes(pages)[shuffled], group[0].writes(pages[shuffled]))


def test_writers_agree_with_mla_over_tensor_parallel():
    ranks = [Placement.tensor_parallel(layers=4, heads=1, rank=r, size=4) for r in range(4)]
    pages = np.arange(100, dtype=np.uint64)
    assert np.array_equal(sum(r.writes(pages).astype(int) for r in ranks), np.ones(100, int))


@st.composite
def _placements(draw, layers, heads):
    return Placement(draw(spans(layers)), draw(spans(heads)))


@examples(150)
@given(_placements(5, 6), _placements(5, 6))
def test_placement_meet_is_the_intersection_of_cells(one, two):
    def cells(placement):
        return set(itertools.product(_steps(placement.layers), _steps(placement.heads)))

    met = one.meet(two)
    common = cells(one) & cells(two)
    assert (met is None) == (not common)
    if met is not None:
        assert cells(met) == common


def test_meet_drops_replication():
    one = Placement(Span(0, 2, 2), Span(0, 1, 2), 1, 2)
    two = Placement(Span(0, 2, 2), Span(0, 2, 2))
    met = one.meet(two)
    assert (met.replica, met.replicas) == (0, 1)
    assert (met.layers, met.heads) == (Span(0, 2, 2), Span(0, 1, 2))


def _sharded(*shards):
    return Placement(Span(0, 1, 1), Span(0, 1, 1), shards=shards)


def test_equal_shards_meet_disjoint_ones_do_not_and_partial_overlap_is_refused():
    """A shard is no axis of the pool, so it cannot be narrowed: silence would lose bytes."""
    low, high, middle = Span(0, 4, 8), Span(4, 8, 8), Span(2, 6, 8)
    assert _sharded(("slot", low)).meet(_sharded(("slot", high))) is None
    assert _sharded(("slot", low)).meet(_sharded(("slot", low))).shards == (("slot", low),)
    for other in (_sharded(("slot", middle)), _sharded(("slot", Span(0, 8, 8))), _sharded()):
        for one, two in ((_sharded(("slot", low)), other), (other, _sharded(("slot", low)))):
            with pytest.raises(LayoutError, match="slot"):
                one.meet(two)
    # disjoint in one name is disjoint, whatever the others do
    assert _sharded(("slot", low), ("x", low)).meet(_sharded(("slot", high), ("x", middle))) is None


def test_the_order_of_shards_carries_no_meaning():
    one, two = ("cp", Span(0, 1, 2)), ("dcp", Span(1, 2, 2))
    assert _sharded(one, two) == _sharded(two, one)
    assert hash(_sharded(one, two)) == hash(_sharded(two, one))
    with pytest.raises(LayoutError):
        check_tiling([_sharded(one, two), _sharded(two, one)])  # one cell, two writers
    with pytest.raises(ConfigError, match="cp"):
        _sharded(one, ("cp", Span(1, 2, 2)))


def test_every_shard_is_tiled_by_itself():
    ranks = [_sharded(("cp", Span(i, i + 1, 2))) for i in range(2)]
    check_tiling(ranks)
    with pytest.raises(LayoutError):
        check_tiling([*ranks, ranks[0]])


def _grid(layer_cuts, heads, size):
    total = layer_cuts[-1]
    return [
        Placement.tensor_parallel(layers=Span(a, b, total), heads=heads, rank=r, size=size)
        for a, b in itertools.pairwise(layer_cuts)
        for r in range(size)
    ]


@examples(60)
@given(
    st.sets(st.integers(1, 60), max_size=4),
    st.sampled_from([(8, 1), (8, 4), (6, 3), (2, 8), (1, 4), (3, 3)]),
    st.data(),
)
def test_complete_grids_tile_and_lose_it_with_any_rank_removed_or_doubled(cuts, tp, data):
    ranks = data.draw(st.permutations(_grid([0, *sorted(cuts), 61], *tp)))
    check_tiling(ranks)
    at = data.draw(st.integers(0, len(ranks) - 1))
    with pytest.raises(LayoutError):
        check_tiling(ranks[:at] + ranks[at + 1 :])
    with pytest.raises(LayoutError):
        check_tiling([*ranks, ranks[at]])


@examples(200)
@given(st.lists(_placements(3, 3), min_size=1, max_size=5))
def test_tiling_of_unreplicated_ranks_against_counting_cells(ranks):
    count = dict.fromkeys(itertools.product(range(3), range(3)), 0)
    for rank in ranks:
        for cell in itertools.product(_steps(rank.layers), _steps(rank.heads)):
            count[cell] += 1
    if set(count.values()) == {1}:
        check_tiling(ranks)
    else:
        with pytest.raises(LayoutError):
            check_tiling(ranks)


def test_tiling_errors_name_the_cell():
    with pytest.raises(LayoutError, match=r"(?s)2.*1"):
        check_tiling(
            [
                Placement(Span(0, 2, 3), Span(0, 4, 4)),
                Placement(Span(2, 3, 3), Span(0, 1, 4)),
                Placement(Span(2, 3, 3), Span(2, 4, 4)),
            ]
        )


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param([], id="none"),
        pytest.param([(0, 2)], id="replica missing"),
        pytest.param([(0, 2), (0, 2)], id="replica 0 twice"),
        pytest.param([(0, 1), (1, 2)], id="two group sizes"),
        pytest.param([(0, 2), (1, 2), (1, 3)], id="of another group"),
        pytest.param([(0, 1), (0, 1)], id="written twice"),
    ],
)
def test_incomplete_replica_groups_do_not_tile(ranks):
    placements = [Placement(Span(0, 2, 2), Span(0, 1, 1), *numbers) for numbers in ranks]
    with pytest.raises(LayoutError):
        check_tiling(placements)


def test_ranks_of_different_models_do_not_tile():
    with pytest.raises(LayoutError):
        check_tiling(
            [
                Placement(Span(0, 1, 2), Span(0, 1, 1)),
                Placement(Span(1, 2, 3), Span(0, 1, 1)),
            ]
        )
