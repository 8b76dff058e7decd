import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.disagg.blocks import Packer
from kvconnect.disagg.checksum import checksum
from kvconnect.disagg.pair_plan import plan_pair
from kvconnect.disagg.pairs import shares
from kvconnect.errors import LayoutError, PageIndexError
from tests.disagg.fleet import Fleet, expected, fill, move, rows_of, u64

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


def by_runs(plan, source, target, src_pages, dst_pages):
    a, b, n = plan.expand(src_pages, dst_pages)
    source.pool.table.locate(a, n)
    target.pool.table.locate(b, n)
    move(a, b, n)


def by_packing(plan, source, target, src_pages, dst_pages):
    """Through a packed buffer, a few pieces at a time."""
    pack = Packer(plan.blocks, [b.source for b in plan.blocks], source.pool.regions)
    unpack = Packer(plan.blocks, [b.target for b in plan.blocks], target.pool.regions)
    assert pack.nbytes == plan.piece_nbytes
    pieces = plan.pieces(src_pages, dst_pages)
    for first in range(0, pieces, 3):
        buffer = np.zeros(min(3, pieces - first) * pack.nbytes, dtype=np.uint8)
        pack.pack(src_pages, first, buffer)
        unpack.unpack(dst_pages, first, buffer)
    digest = checksum(pack, src_pages, pieces)
    assert digest == checksum(unpack, dst_pages, pieces)


def transfer(prefill, decode, tokens, seed=0):
    """Move `tokens` tokens between two fleets, by runs and by packing, and look at the result."""
    for carry in (by_runs, by_packing):
        transfer_by(carry, prefill, decode, tokens, seed)


def transfer_by(carry, prefill, decode, tokens, seed):
    rng = np.random.default_rng(seed)
    sources, targets = prefill.sides(), decode.sides()
    src_pages = rng.permutation(prefill.pages)[: -(-tokens // prefill.page_size)]
    dst_pages = rng.permutation(decode.pages)[: -(-tokens // decode.page_size)]
    for side in sources:
        fill(side, src_pages, tokens)
    before = [{c: side.pool.array(c).copy() for c in side.pool.components} for side in targets]
    for side in targets:
        for share in shares([s.placement for s in sources], side.placement):
            plan = plan_pair(sources[share.source], side, share.part)
            carry(plan, sources[share.source], side, u64(src_pages), u64(dst_pages))
    check(targets, dst_pages, tokens, before)


def check(targets, pages, tokens, before):
    for side, was in zip(targets, before, strict=True):
        for component in side.pool.components:
            have = rows_of(side, component, pages)[:tokens]
            want = expected(side, component, pages, tokens)
            assert np.array_equal(have.view(np.int16), want), (side.placement, component)
            others = np.setdiff1d(np.arange(side.pool.pages), pages)
            assert np.array_equal(side.pool.array(component)[others], was[component][others])


SIZES = (1, 2, 3, 4, 6, 8)
PAIRS = [
    (p, d, heads)
    for heads in (24, 12, 8, 4, 2)
    for p in SIZES
    for d in SIZES
    if not any(heads % tp and tp % heads for tp in (p, d))
]


@pytest.mark.parametrize(("p", "d", "heads"), PAIRS)
def test_every_pair_of_tp_sizes(p, d, heads):
    """Also those of which neither divides the other: 4 to 6 ranks of 12 heads."""
    layouts = LAYOUTS[(p + d) % 4], LAYOUTS[(p * d) % 4]
    transfer(
        Fleet(layouts[0], p, 4, 6, (2,), heads, (4, 6)),
        Fleet(layouts[1], d, 4, 6, (2,), heads, (4, 6)),
        tokens=10,
    )


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("dims", [(8, None), (12, 8)])
def test_every_pair_of_layouts(source, target, dims):
    transfer(
        Fleet(source, 2, 4, 5, (2,), 4, dims), Fleet(target, 4, 4, 7, (2,), 4, dims), tokens=12
    )


@pytest.mark.parametrize("stages", [((3,), (1, 2)), ((1, 2), (2, 1)), ((1, 1, 1), (3,))])
def test_pipeline_stages_that_differ(stages):
    transfer(
        Fleet("page_head", 2, 4, 5, stages[0], 4, (4, None)),
        Fleet("page_first", 1, 4, 5, stages[1], 4, (4, None)),
        tokens=9,
    )


def test_mla_rows_reach_every_rank():
    transfer(
        Fleet("page_first", 2, 4, 5, (3,), 1, (24, 0)),
        Fleet("layer_first", 4, 4, 5, (3,), 1, (24, 0)),
        tokens=9,
    )


@pytest.mark.parametrize("blocks", [(2, 4), (4, 1), (1, 2)])
def test_heads_in_blocks(blocks):
    transfer(
        Fleet("page_unified", 1, 4, 5, (2,), 8, (4, None), blocks[0]),
        Fleet("page_unified", 2, 4, 5, (2,), 8, (4, None), blocks[1]),
        tokens=9,
    )
    transfer(
        Fleet("page_unified", 2, 4, 5, (2,), 8, (4, None), blocks[0]),
        Fleet("page_head", 1, 4, 5, (2,), 8, (4, None)),
        tokens=9,
    )


fleets = st.fixed_dictionaries({
    "layout": st.sampled_from(LAYOUTS),
    "tp": st.sampled_from([1, 2, 4]),
    "page_size": st.sampled_from([1, 2, 4, 8, 6]),
    "stages": st.sampled_from([(3,), (1, 2), (2, 1), (1, 1, 1)]),
})  # fmt: skip


@given(
    prefill=fleets,
    decode=fleets,
    heads=st.sampled_from([1, 2, 4]),
    dims=st.sampled_from([(2, None), (4, 2), (2, 6)]),
    tokens=st.integers(1, 17),
    seed=st.integers(0, 99),
)
@settings(max_examples=120, deadline=None)
def test_any_two_fleets(prefill, decode, heads, dims, tokens, seed):
    pages = 20
    transfer(
        Fleet(**prefill, pages=pages, heads=heads, dims=dims),
        Fleet(**decode, pages=pages, heads=heads, dims=dims),
        rounded(tokens, prefill["page_size"], decode["page_size"]),
        seed,
    )


def rounded(tokens, a, b):
    """Tokens up to a whole piece: what a partly filled last piece holds is not defined."""
    piece = int(np.gcd(a, b))
    return -(-tokens // piece) * piece


def test_a_checksum_sees_every_byte():
    fleet = Fleet("page_head", 1, 4, 3, (2,), 2, (4, None))
    source, target = fleet.sides()[0], fleet.sides()[0]
    fill(source, u64([1]), 4)
    plan = plan_pair(source, target, target.placement)
    packer = Packer(plan.blocks, [b.source for b in plan.blocks], source.pool.regions)
    first = checksum(packer, u64([1]), 1)
    for component in "kv":
        view = source.pool.array(component)
        for index in np.ndindex(view.shape[1:]):
            view[(1, *index)] ^= 1
            assert checksum(packer, u64([1]), 1) != first
            view[(1, *index)] ^= 1
        view[2] ^= 1
    assert checksum(packer, u64([1]), 1) == first


def plan_of(prefill, decode):
    source, target = prefill.sides()[0], decode.sides()[0]
    (share, *_) = shares([s.placement for s in prefill.sides()], target.placement)
    return plan_pair(source, target, share.part)


def test_pages_that_follow_one_another_become_one_run():
    same = {"tp": 1, "page_size": 4, "pages": 8, "stages": (2,), "heads": 2, "dims": (4, None)}
    for layout, runs in (("page_first", 2), ("page_head", 2), ("layer_first", 4)):
        plan = plan_of(Fleet(layout, **same), Fleet(layout, **same))
        assert len(plan.expand(u64([2, 3, 4]), u64([5, 6, 7]))[0]) == runs
        assert len(plan.expand(u64([2, 3, 4]), u64([5, 7, 6]))[0]) == 3 * runs


def test_small_pages_of_a_layer_join_into_large_ones():
    same = {"tp": 1, "pages": 16, "stages": (2,), "heads": 2, "dims": (4, None)}
    plan = plan_of(
        Fleet("layer_first", page_size=2, **same), Fleet("layer_first", page_size=8, **same)
    )
    # Per layer and component: pages 4 to 7 fill page 1.
    _, _, nbytes = plan.expand(u64([4, 5, 6, 7]), u64([1]))
    assert nbytes.tolist() == [8 * 2 * 4 * 2] * 4


def test_pages_that_do_not_fill_each_other_are_refused():
    same = {
        "layout": "page_first",
        "tp": 1,
        "pages": 16,
        "stages": (2,),
        "heads": 2,
        "dims": (4, None),
    }
    plan = plan_of(Fleet(page_size=2, **same), Fleet(page_size=8, **same))
    for pages in (1, 2, 3, 4):
        assert plan.pieces(u64(range(pages)), u64([0])) == pages
    with pytest.raises(PageIndexError, match="5 source pages of 1 parts and 1 target pages of 4"):
        plan.expand(u64(range(5)), u64([0]))
    with pytest.raises(PageIndexError, match="do not hold the same"):
        plan.expand(u64([0]), u64([0, 1]))


def test_sides_that_cannot_exchange_bytes_are_refused_with_both_numbers():
    base = {"layout": "page_head", "tp": 1, "page_size": 4, "pages": 4, "stages": (2,), "heads": 2}
    with pytest.raises(LayoutError, match=r"component 'v'.*'dim' has 4 steps at source, 6"):
        plan_of(Fleet(**base, dims=(4, None)), Fleet(**base, dims=(4, 6)))
    with pytest.raises(LayoutError, match=r"source \['k', 'v'\], target \['kv'\]"):
        plan_of(
            Fleet(**base | {"heads": 1}, dims=(4, None)),
            Fleet(**base | {"heads": 1, "layout": "page_first"}, dims=(4, 0)),
        )


def test_shares_refuse_a_hole_and_an_overlap():
    sides = Fleet("page_head", 2, 4, 4, (2,), 4, (4, None)).sides()
    whole = Fleet("page_head", 1, 4, 4, (2,), 4, (4, None)).sides()[0]
    with pytest.raises(LayoutError, match=r"layer 0, head 2 .* held by 0 of the sources"):
        shares([sides[0].placement], whole.placement)
    with pytest.raises(LayoutError, match=r"layer 0, head 0 .* held by 2 of the sources"):
        shares([whole.placement, *(s.placement for s in sides)], whole.placement)


def test_replicas_share_the_work():
    sources = Fleet("page_head", 8, 4, 4, (2,), 2, (4, None)).sides()
    targets = Fleet("page_head", 8, 4, 4, (2,), 2, (4, None)).sides()
    taken = [shares([s.placement for s in sources], t.placement)[0].source for t in targets]
    assert sorted(taken) == list(range(8))
