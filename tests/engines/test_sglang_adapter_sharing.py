"""Who shares pages with whom: TP sizes, pipeline stages, replicas, and everything foreign."""

import itertools
import uuid

import pytest
import torch

from tests.engines import sglang_pools as pools
from tests.engines.sglang_rank import Rank, content, fill, heads, keys, tokens, wipe

pytestmark = pytest.mark.sglang

LAYOUTS = ["page_first", "page_first_direct", "page_head", "layer_first"]


@pytest.fixture
def url():
    return f"memory://{uuid.uuid4().hex}"


def assert_same_heads(whole, parts, pages):
    """Each part holds its share of the heads of `whole`, in rank order."""
    each = parts[0].head_num
    for page, (rank, part) in itertools.product(pages, enumerate(parts)):
        shares = zip(heads(whole, page), heads(part, page), strict=True)
        for theirs, ours in shares:
            assert torch.equal(theirs[:, :, rank * each : (rank + 1) * each], ours)


@pytest.mark.parametrize(("big", "small"), list(itertools.product(LAYOUTS, LAYOUTS)))
@pytest.mark.parametrize("how", [{"lcm": 2}, {"tp_sizes": [1, 2]}])
def test_one_rank_writes_and_two_read(sglang, url, big, small, how):
    whole = pools.mha(sglang, big)
    halves = [pools.mha(sglang, small, heads=4) for _ in range(2)]
    fill(whole, 1)
    names = keys("down", 4)
    with (
        Rank(whole, url, tp=(0, 1), **how) as writer,
        Rank(halves[0], url, tp=(0, 2), **how) as left,
        Rank(halves[1], url, tp=(1, 2), **how) as right,
    ):
        assert writer.put(names, range(4)) == 4
        for reader in (left, right):
            assert reader.exists(names) == 4
            assert reader.get(names, range(4)) == 4
        assert_same_heads(whole, halves, range(4))


@pytest.mark.parametrize(("big", "small"), [(a, b) for a in LAYOUTS for b in LAYOUTS])
def test_two_ranks_write_and_one_reads(sglang, url, big, small):
    whole = pools.mha(sglang, big)
    halves = [pools.mha(sglang, small, heads=4) for _ in range(2)]
    names = keys("up", 4)
    for rank, half in enumerate(halves):
        fill(half, rank)
    with (
        Rank(whole, url, tp=(0, 1), lcm=2) as reader,
        Rank(halves[0], url, tp=(0, 2), lcm=2) as left,
        Rank(halves[1], url, tp=(1, 2), lcm=2) as right,
    ):
        assert left.put(names, range(4)) == 4
        assert (reader.exists(names), reader.get(names, range(4))) == (0, 0)
        assert right.put(names, range(4)) == 4
        assert reader.get(names, range(4)) == 4
        assert_same_heads(whole, halves, range(4))


def test_split_heads_move_in_place_on_page_head(sglang, url):
    """One run for each object and component, straight from the pool."""
    with Rank(pools.mha(sglang, "page_head"), url, lcm=4) as rank:
        plan = rank.backend._anchor.connector.plan
        assert (plan.mode.value, plan.objects) == ("split_heads", 4)
        assert (plan.first == [0, 2, 4, 6, 8]).all()


def mha(sg, layout="page_first", **options):
    return pools.mha(sg, layout, **options)


# What the writer and the reader are: each pair must not exchange pages.
FOREIGN = {
    "fewer heads": (({"heads": 4}, {}), ({"heads": 8}, {})),
    "more heads": (({"heads": 8}, {}), ({"heads": 4}, {})),
    "half the heads at twice the TP": (({"heads": 8}, {}), ({"heads": 4}, {"tp": (0, 2)})),
    "twice the heads at half the TP": (({"heads": 4}, {"tp": (0, 2)}), ({"heads": 8}, {})),
    "the other rank": (({"heads": 4}, {"tp": (0, 2)}), ({"heads": 4}, {"tp": (1, 2)})),
    "direct": (({}, {}), ({"layout": "page_first_direct"}, {})),
    "page_head": (({"layout": "page_head"}, {}), ({}, {})),
    "float16": (({}, {}), ({"dtype": torch.float16}, {})),
    "narrower": (({}, {}), ({"dtype": torch.float8_e4m3fn}, {})),
    "wider": (({"dtype": torch.float8_e5m2}, {}), ({}, {})),
    "the other float8": (
        ({"dtype": torch.float8_e5m2}, {}),
        ({"dtype": torch.float8_e4m3fn}, {}),
    ),
    "V apart": (({"v_dim": 8}, {}), ({}, {})),
    "more layers": (({"layers": 2}, {}), ({"layers": 3}, {})),
    "pages of the same bytes": (({"layers": 2}, {}), ({"page_size": 2, "layers": 4}, {})),
    "another model": (({}, {"served": "a/m"}), ({}, {"served": "b/m"})),
    "a slash moved": (({}, {"served": "org/model-x"}), ({}, {"served": "org-model/x"})),
    "another model option": (({}, {}), ({}, {"model": "x"})),
    "other weights": (({}, {"weights": "1"}), ({}, {"weights": "2"})),
    "named weights": (({}, {}), ({}, {"weights": "org/model"})),
    "an adapter": (({}, {"adapter": "lora"}), ({}, {})),
    "a salt": (({}, {"salt": ""}), ({}, {})),
    "a salt called none": (({}, {"salt": "none"}), ({}, {})),
    "two salts": (({}, {"salt": "a"}), ({}, {"salt": "b"})),
    "the next stage": (({}, {"pp": (0, 2)}), ({}, {"pp": (1, 2)})),
    "one stage of two": (({}, {}), ({}, {"pp": (0, 2)})),
    "another CP rank": (({}, {"cp": (0, 2)}), ({}, {"cp": (1, 2)})),
    "one head to a rank": (
        ({"heads": 1}, {"tp": (0, 2)}),
        ({"heads": 1}, {"tp": (0, 4)}),
    ),
    "one head to a rank, next rank": (
        ({"heads": 1}, {"tp": (0, 2)}),
        ({"heads": 1}, {"tp": (1, 2)}),
    ),
}


@pytest.mark.parametrize("case", FOREIGN)
@pytest.mark.parametrize("interface", [1, 0])
def test_foreign_pages_are_misses(sglang, url, case, interface):
    if interface == 0 and case == "V apart":
        return  # SGLang has no flat pages for it, and the adapter refuses: tested elsewhere
    (write, first), (read, second) = FOREIGN[case]
    theirs, ours = mha(sglang, **write), mha(sglang, **read)
    fill(theirs, 3)
    names = keys("foreign", 2)
    with (
        Rank(theirs, url, interface=interface, **first) as writer,
        Rank(ours, url, interface=interface, **second) as reader,
    ):
        assert writer.put(names, [0, 1]) == 2
        wipe(ours)
        assert reader.exists(names) == 0
        assert reader.get(names, [0, 1]) == 0
        assert not any(b"".join(content(ours, range(ours.page_num)))), "a miss wrote its page"


def test_equal_deployments_share(sglang, url):
    """The counterpart of all foreign cases: the same settings, another process's objects."""
    for number, (_, (read, given)) in enumerate(FOREIGN.values()):
        settings = given | {"salt": f"{given.get('salt')}{number}"}
        theirs, ours = mha(sglang, **read), mha(sglang, **read)
        fill(theirs, number)
        names = keys(f"own{number}", 1)
        with Rank(theirs, url, **settings) as writer, Rank(ours, url, **settings) as reader:
            assert writer.put(names, [0]) == 1
            assert reader.get(names, [1]) == 1
        assert content(ours, [1]) == content(theirs, [0])


def test_replicated_heads_are_stored_once(sglang, url):
    """Two KV heads at TP 4: ranks 0 and 1 hold head 0, and each page has one writer of them."""
    ranks = [pools.mha(sglang, "page_first", heads=1, pages=40) for _ in range(4)]
    names = keys("replicas", 32)
    for number, pool in enumerate(ranks):
        fill(pool, number // 2)  # replicas hold the same bytes
    attached = [Rank(p, url, tp=(r, 4), kv_heads=2) for r, p in enumerate(ranks)]
    try:
        moved = []
        for rank in attached:
            assert rank.put(names, range(32)) == 32, "a page of another replica is no failure"
            moved.append(sum(rank.backend.get_stats().backup_pgs))
        assert moved[0] + moved[1] == 32
        assert moved[2] + moved[3] == 32
        assert min(moved) > 0, "the duty does not rotate"
        for number, rank in enumerate(attached):
            want = content(rank.pool, range(32))
            wipe(rank.pool)
            assert rank.exists(names) == 32
            assert rank.get(names, range(32)) == 32
            assert content(rank.pool, range(32)) == want, number
    finally:
        for rank in attached:
            rank.close()


def test_the_rank_that_sglang_lets_write_writes_every_mla_page(sglang, url):
    """SGLang asks rank 0 alone; electing a writer by page would lose the pages of the others."""
    writer_pool = pools.mla(sglang, "page_first", pages=40)
    reader_pool = pools.mla(sglang, "page_first", pages=40)
    names = keys("mla", 32)
    fill(writer_pool, 5)
    with (
        Rank(writer_pool, url, mla=True, tp=(0, 8)) as writer,
        Rank(reader_pool, url, mla=True, tp=(5, 8)) as reader,
        Rank(pools.mla(sglang, "page_first"), url, mla=True, tp=(0, 1)) as other_size,
    ):
        assert writer.put(names, range(32)) == 32
        assert reader.put(names, range(32)) is None
        assert reader.get(names, range(32)) == 32
        assert content(reader_pool, range(32)) == content(writer_pool, range(32))
        assert other_size.exists(names) == 32


def stage(sg, start, stop):
    pool = pools.mha(sg, "page_first_direct", layers=stop - start)
    pool.start_layer, pool.end_layer = start, stop
    return pool


def test_pipeline_stages_share_by_global_layers(sglang, url):
    """Uneven stages write; one rank that holds all layers reads them, layer by layer."""
    whole = pools.mha(sglang, "page_first_direct", layers=6)
    bounds = [(0, 2), (2, 3), (3, 6)]
    parts = [stage(sglang, *bound) for bound in bounds]
    names, common = keys("stages", 2), {"layers": 6, "layer_chunk": 1}
    for number, part in enumerate(parts):
        fill(part, number)
        with Rank(part, url, pp=(number, 3), **common) as rank:
            assert rank.put(names, [0, 1]) == 2
    with Rank(whole, url, **common) as reader:
        assert reader.get(names, [3, 4]) == 2
    for at, page in enumerate([3, 4]):
        for (start, stop), part in zip(bounds, parts, strict=True):
            shares = zip(heads(whole, page), heads(part, at), strict=True)
            assert all(torch.equal(theirs[start:stop], ours) for theirs, ours in shares)


@pytest.mark.parametrize(
    ("start", "stop", "pp", "layers", "said"),
    [
        (0, 3, (1, 2), 6, "stage 1 of 2"),
        (3, 6, (0, 2), 6, "stage 0 of 2"),
        (3, 6, (1, 2), 5, "not inside"),
        (3, 6, (1, 2), 7, "cannot hold"),
        (0, 3, (0, 1), 4, "leave layers out"),
    ],
)
def test_layers_that_contradict_the_pool(sglang, url, start, stop, pp, layers, said):
    with pytest.raises(ValueError, match=said):
        Rank(stage(sglang, start, stop), url, pp=pp, layers=layers)


def test_heads_that_contradict_the_pool(sglang, url):
    for wrong in (4, 32, 6):
        with pytest.raises(ValueError, match=r"KV heads|kv_heads"):
            Rank(pools.mha(sglang, "page_first", heads=8), url, tp=(0, 2), kv_heads=wrong)


def test_a_reader_of_some_heads_leaves_the_rest_of_the_pool_alone(sglang, url):
    whole, half = pools.mha(sglang, "page_first"), pools.mha(sglang, "page_first", heads=4)
    fill(whole, 6)
    fill(half, 7)
    before, names = content(half, range(6)), keys("alone", 1)
    with (
        Rank(whole, url, lcm=2) as writer,
        Rank(half, url, tp=(1, 2), lcm=2) as reader,
    ):
        writer.put(names, [0])
        assert reader.backend.batch_get_v1(names, tokens(half, [2])) == [True]
    after = content(half, range(6))
    assert after[:2] + after[3:] == before[:2] + before[3:]
