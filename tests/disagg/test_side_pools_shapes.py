"""Side pools of all shapes: which cuts move, which are refused, and over real transports."""

import contextlib
import dataclasses

import msgspec
import numpy as np
import pytest

from kvconnect.disagg.conform import Side
from kvconnect.disagg.decode import DecodeEndpoint
from kvconnect.disagg.options import EndpointOptions
from kvconnect.disagg.pair_plan import plan_pair
from kvconnect.disagg.plan_cache import Plans
from kvconnect.disagg.pools import SidePool
from kvconnect.disagg.prefill import PrefillEndpoint
from kvconnect.disagg.sections import KV
from kvconnect.disagg.shm import ShmTransport
from kvconnect.errors import ConfigError, LayoutError
from kvconnect.hostpool import HostPool
from kvconnect.placement import Placement, Span
from tests.disagg.endpoints import identity_of
from tests.disagg.fleet import Fleet, u64
from tests.disagg.matrix import Fleetful
from tests.disagg.side_fleet import Hybrid, Kind, Where
from tests.disagg.test_side_pools import DECODE, MAMBA, PREFILL, SENT, TAKEN, WHERE

PAGE, TOKEN, LATENT = (
    ("page", "layer", "head", "dim"), ("page", "slot", "layer", "head", "dim"),
    ("page", "slot", "layer", "dim"),
)  # fmt: skip
KV_WHERE = Where((2, 0), (1, 3), range(8))


def kv(tp, stages=(2,), heads=4):
    return Fleet("page_first", tp, 4, 4, stages, heads, (4, None))


def moves(prefill, decode, where, **options):
    """One request by push, one by pull; every byte of every pool is looked at."""
    with Hybrid(prefill, decode, where, **options) as hybrid:
        hybrid.fill().connect()
        for way in ("push", "pull"):
            hybrid.blank()
            going = hybrid.send(way) + hybrid.receive(way, way=way)
            outcomes = [r.wait(20) for r in going]
            assert all(o.ok for o in outcomes), outcomes
            assert all(hybrid.holds().values()), hybrid.holds()
            assert sum(o.nbytes for o in outcomes) == 2 * hybrid.nbytes()
            assert all(r.quiet(5) for r in going)


@pytest.mark.parametrize(("p", "d"), [(1, 8), (8, 1), (2, 4), (4, 6), (6, 4), (3, 3), (6, 8)])
def test_states_cut_by_channel_blocks_move_between_any_tp_sizes(p, d):
    """24 blocks; the KV of 2 heads is replicated beside them."""
    dims = {"temporal": 5, "conv_0": 3}
    sent = Kind("mamba", PAGE, dims, (3,), 24, 1, 5)
    taken = Kind("mamba", ("layer", "page", "head", "dim"), dims, (3,), 24, 1, 7)
    where = {KV: KV_WHERE, "mamba": Where((4,), (6,), range(1))}
    heads = 24 if 3 in {p, d} or 6 in {p, d} else 2
    moves((kv(p, heads=heads), (sent,)), (kv(d, heads=heads), (taken,)), where)


@pytest.mark.parametrize(("small", "large"), [(16, 64), (64, 16), (16, 16), (48, 64)])
def test_trailing_pages_of_any_size_and_another_number_than_the_kv_has(small, large):
    """A window of 192 slots; the token that it begins with is at a boundary on both sides."""
    sent = Kind("swa", TOKEN, {"k": 4, "v": 2}, (2,), 4, small, 14)
    taken = Kind(
        "swa", ("layer", "page", "head", "slot", "dim"), {"k": 4, "v": 2}, (2,), 4, large, 14
    )
    window = range(384, 576)
    pages = [tuple(range(13, 13 - 192 // size, -1)) for size in (small, large)]
    where = {KV: KV_WHERE, "swa": Where(*pages, window)}
    moves((kv(2), (sent,)), (kv(4), (taken,)), where)


@pytest.mark.parametrize("stages", [((2, 1), (3,)), ((3,), (1, 1, 1)), ((1, 2), (2, 1))])
def test_side_pools_have_stages_of_their_own(stages):
    """Latent rows of a sparse index by stage; the draft's one layer is on the last."""
    index = [Kind("indexer", LATENT, {"index": 6}, s, 1, 4, 6) for s in stages]
    draft = [
        Kind("draft", TOKEN, {"k": 4, "v": 4}, (0,) * (len(s) - 1) + (1,), 4, 4, 6) for s in stages
    ]
    where = {
        KV: KV_WHERE,
        "indexer": Where((5, 1, 0), (0, 3, 4), range(12)),
        "draft": Where((1, 2), (4, 0), range(8)),
    }
    fleets = [kv(2, stages[0]), kv(4, stages[1])]
    moves((fleets[0], (index[0], draft[0])), (fleets[1], (index[1], draft[1])), where)


def test_latent_kv_is_replicated_while_the_states_beside_it_are_cut():
    """Which ranks meet differs by pool: some send states alone, and pulls of those count too."""
    mamba = dataclasses.replace(MAMBA, stages=(3,))
    fleets = (
        Fleet("page_first", 4, 4, 4, (2,), 1, (12, 0)),
        Fleet("layer_first", 2, 4, 4, (2,), 1, (12, 0)),
    )
    where = {KV: KV_WHERE, "mamba": WHERE["mamba"]}
    with Hybrid((fleets[0], (mamba,)), (fleets[1], (mamba,)), where) as hybrid:
        hybrid.connect()
        parts = [set(peer.parts) for end in hybrid.decodes for peer in end.peers.values()]
        assert {"mamba"} in parts
        assert {KV, "mamba"} in parts
    moves((fleets[0], (mamba,)), (fleets[1], (mamba,)), where)


class Ranks:
    """One rank of each side, with the side pools given."""

    def __init__(self, sent, taken):
        self.stack = contextlib.ExitStack()
        ends = []
        for kind, fleet, pools in ((PrefillEndpoint, kv(1), sent), (DecodeEndpoint, kv(1), taken)):
            side = fleet.sides()[0]
            carrier = self.stack.enter_context(ShmTransport())
            end = kind(
                side.pool, side.placement, identity_of(fleet), carrier, side_pools=pools,
                options=EndpointOptions(timeout=5),
            )  # fmt: skip
            ends.append(self.stack.enter_context(end))
        self.prefill, self.decode = ends

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stack.close()


def sharded(rank, size):
    """States cut over TP ranks in a way that no axis of the pool shows."""
    held = MAMBA.on(0, 0, 1)
    shards = (("tp", Span(rank, rank + 1, size)),)
    return SidePool(held.pool, dataclasses.replace(held.placement, shards=shards), held.identity)


def refuse(error, words, sent, taken):
    with Ranks([sent], [taken]) as ranks, pytest.raises(error, match=words):
        ranks.decode.connect([ranks.prefill.listen()])


def test_a_pool_cut_in_a_way_that_is_no_axis_moves_between_equal_shards_only():
    with Ranks([sharded(1, 2)], [sharded(1, 2)]) as ranks:
        ranks.decode.connect([ranks.prefill.listen()])
    words = r"pool 'mamba': layer 0, head 0 .* held by 0 of the sources"
    refuse(LayoutError, words, sharded(0, 2), sharded(1, 2))
    words = r"pool 'mamba': global extents differ: 2 here, 4 there"
    refuse(ConfigError, words, sharded(1, 2), sharded(1, 4))
    words = r"pool 'mamba': shards overlap but differ: none"
    refuse(ConfigError, words, MAMBA.on(0, 0, 1), sharded(0, 2))


def moved_away(pool):
    """As if the peer's memory were somewhere else."""
    region = pool.side.regions[0]
    there = msgspec.structs.replace(region, address=region.address + (64 << 20))
    side = msgspec.structs.replace(pool.side, regions=(there, *pool.side.regions[1:]))
    return msgspec.structs.replace(pool, side=side)


@pytest.mark.parametrize(
    ("forge", "words"),
    [
        (lambda pool: (moved_away(pool),), "does not grant"),
        (lambda pool: (pool, pool), "the peer names the pool 'mamba' twice"),
        (lambda pool: (msgspec.structs.replace(pool, identity=b"{}"),), "cannot be read"),
        (lambda pool: (), "pools are .*'mamba'"),
    ],
)
def test_a_greeting_whose_side_pools_cannot_be_is_refused(monkeypatch, forge, words):
    with Ranks([MAMBA.on(0, 0, 1)], [MAMBA.on(0, 0, 1)]) as ranks:
        hello = ranks.decode.hello()
        forged = msgspec.structs.replace(hello, side_pools=forge(*hello.side_pools))
        monkeypatch.setattr(ranks.decode, "hello", lambda: forged)
        with pytest.raises(ConfigError, match=words):
            ranks.decode.connect([ranks.prefill.listen()])
        assert not ranks.prefill.peers


def test_rows_that_no_head_group_owns_are_not_cut_by_heads():
    """Opaque rows whose placement says that each rank holds some of the heads."""
    held = Kind("rows", ("page", "layer", "dim"), {"row": 8}, (2,), 4).on(0, 0, 1)
    place = Placement.tensor_parallel(layers=2, heads=4, rank=0, size=2)
    half = SidePool(dataclasses.replace(held.pool, heads=2), place, held.identity)
    refuse(ConfigError, r"pool 'rows': .* no head axis and cannot be cut by heads", held, half)


def test_a_side_pool_that_contradicts_itself_is_refused_at_construction():
    held = MAMBA.on(0, 0, 1)
    for words, pools in (
        ("two side pools are called 'mamba'", [held, held]),
        ("pool 'mamba': identity says heads=8", [
            SidePool(held.pool, Placement.whole(layers=3, heads=16), held.identity)
        ]),
        ("17 side pools; a rank has at most 16", [
            dataclasses.replace(MAMBA, name=f"s{n}").on(0, 0, 1) for n in range(17)
        ]),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            Ranks(pools, [])
    with pytest.raises(ConfigError, match="pool='kv', the name of the anchor"):
        SidePool(held.pool, held.placement, dataclasses.replace(held.identity, pool="kv"))
    with pytest.raises(ConfigError, match="'mamba': give pool and placement, or neither"):
        SidePool(held.pool, None, held.identity)


@pytest.mark.parametrize(("name", "stage"), [("mooncake", "auto"), ("nixl", "always")])
def test_side_pools_over_real_transports(name, stage):
    prefill, decode = dataclasses.replace(PREFILL, tp=1), dataclasses.replace(DECODE, tp=2)
    options = {"stage": stage, "staging": 1 << 20, "slot": 64 << 10, "timeout": 30.0}
    with contextlib.closing(Fleetful(name)) as fleetful:
        moves((prefill, SENT), (decode, TAKEN), WHERE, transport=fleetful.lend, **options)


def same(plan, other, source, target):
    """Whether two plans move the same bytes, in whatever order."""
    pages = u64([1, 3]), u64([2, 0])
    found = [np.stack(p.expand(*pages)) for p in (plan, other)]
    return np.array_equal(*(rows[:, np.lexsort(rows)] for rows in found))


def side_of(layout, size, pages=8):
    place = Placement.whole(layers=2, heads=4)
    pool = HostPool.allocate(
        layout=layout, pages=pages, page_size=size, layers=2, heads=4, head_dim=8, v_head_dim=4,
        dtype="int16",
    )  # fmt: skip
    return Side(pool, place)


@pytest.mark.parametrize("layouts", [("page_first", "page_head"), ("layer_first", "page_first")])
def test_a_plan_that_is_kept_is_the_plan_wherever_the_memory_lies(layouts):
    plans = Plans()
    for number in range(3):
        source, target = side_of(layouts[0], 4), side_of(layouts[1], 4)
        part = Placement(Span(1, 2, 2), source.placement.heads)
        kept, fresh = plans.plan(source, target, part), plan_pair(source, target, part)
        assert same(kept, fresh, source, target)
        assert [b.source.address for b in kept.blocks] == [b.source.address for b in fresh.blocks]
        assert [b.target.address for b in kept.blocks] == [b.target.address for b in fresh.blocks]
        assert len(plans) == 1, number
    # Another shape, and another part of the same shape, are plans of their own.
    plans.plan(side_of(layouts[0], 4, 9), target, part)
    plans.plan(source, target, source.placement)
    assert len(plans) == 3
