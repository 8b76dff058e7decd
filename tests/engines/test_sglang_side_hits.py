"""Hit queries with side pools, and whole requests through SGLang's hybrid controller."""

import random
import threading
import uuid

import numpy as np
import pytest
import torch

from tests.engines import sglang_pools as pools
from tests.engines.sglang_rank import Rank, config, engine, keys, tokens
from tests.engines.sglang_side import (
    Hybrid,
    anchor_of,
    asked,
    content,
    fill,
    registered,
    state,
    transfer,
)

pytestmark = pytest.mark.sglang


@pytest.fixture(params=["memory", "nvme"])
def url(request, tmp_path):
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    return f"nvme://{tmp_path}?capacity=256MiB"


@pytest.fixture
def memory():
    return f"memory://{uuid.uuid4().hex}"


def leading(present):
    return next((at for at, here in enumerate(present) if not here), len(present))


def legal_lengths(kv, gates):
    """Enumerate the lengths; `gates` are (present, window), window None for every page."""
    found = []
    for length in range(1, leading(kv) + 1):
        starts = [0 if window is None else max(0, length - window) for _, window in gates]
        if all(
            all(present[start:length]) for start, (present, _) in zip(starts, gates, strict=True)
        ):
            found.append(length)
    return found


class Scene:
    """KV, a window, states, an index and block groups with holes drawn by chance."""

    PAGES = 24

    def __init__(self, sg, rank):
        self.sg, self.rank = sg, rank
        sizes = {"pages": self.PAGES}
        self.pools = {
            "swa": pools.mha(sg, "page_first", heads=2, **sizes),
            "mamba": pools.mamba(sg, "page_first", slots=self.PAGES),
            "indexer": pools.k_only(sg, "page_first", **sizes),
            "deepseek_v4_c4": pools.paged(sg, "page_first", **sizes),
        }
        for name, pool in self.pools.items():
            registered(rank, sg, name, pool)

    def store(self, names, rows):
        """Store the pages of `rows` (pool -> presence) through the calls of SGLang."""
        chosen = {name: np.flatnonzero(row).tolist() for name, row in rows.items()}
        for name, pages in chosen.items():
            part = [names[page] for page in pages]
            if name == "kv":
                index = tokens(self.rank.pool, pages)
                assert self.rank.backend.batch_set_v1(part, index) == [True] * len(pages)
            else:
                out = transfer(self.sg, name, self.pools[name], part, pages)
                assert self.rank.backend.batch_set_v2([out]) == {name: [True] * len(pages)}


def drawn(chance, names, pages):
    """Rows of presence: whole, with few holes or with many."""
    odds = [1, 0.95, 0.5]
    return {name: [chance.random() < chance.choice(odds) for _ in range(pages)] for name in names}


def test_queries_answer_as_an_enumeration_does(sglang, url):
    chance, sg = random.Random(7), sglang
    sparse = 0
    with Rank(pools.mha(sg, "page_first", pages=Scene.PAGES, heads=1), url) as rank:
        scene = Scene(sg, rank)
        for turn in range(25):
            names = keys(f"turn {turn}", Scene.PAGES)
            rows = drawn(chance, ["kv", *scene.pools], Scene.PAGES)
            for name in ("kv", "indexer"):  # long prefixes, with holes behind them
                long = chance.randint(0, Scene.PAGES)
                rows[name][:long] = [True] * long
            scene.store(names, rows)
            window, block = chance.randint(1, 5), chance.randint(1, 4)
            group = chance.randint(1, block)
            transfers = [
                asked(sg, "swa", "trailing_pages", window),
                asked(sg, "mamba", "trailing_pages", 1),
                asked(sg, "indexer"),
                asked(sg, "deepseek_v4_c4", "block_groups", block_pages=block, group_pages=group),
            ]
            found = rank.backend.batch_exists_v2(names, transfers)
            gates = [(rows["swa"], window), (rows["mamba"], 1), (rows["indexer"], None)]
            want = legal_lengths(rows["kv"], gates)
            assert found.restorable_prefix_pages == want
            assert found.kv_hit_pages == max(want, default=0)
            sparse += want not in ([], list(range(1, len(want) + 1)))
            verdicts = found.extra_pool_hit_pages
            assert verdicts["kv"] == leading(rows["kv"])
            for name, gate in zip(("swa", "mamba", "indexer"), gates, strict=True):
                alone = max(legal_lengths(rows["kv"], [gate]), default=0)
                assert verdicts.get(name, 0) == alone
            covered = 0
            while covered + block <= Scene.PAGES and all(
                rows["deepseek_v4_c4"][covered + block - group : covered + block]
            ):
                covered += block
            assert verdicts["deepseek_v4_c4"] == covered
    assert sparse >= 5, "the draw must ask for lengths with gaps between them"


def test_queries_answer_as_the_file_backend_of_sglang_does(sglang, memory, tmp_path, monkeypatch):
    """Its HiCacheFile knows two of the three policies; there both must say the same."""
    chance, sg = random.Random(3), sglang
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    with Rank(pools.mha(sg, "page_first", pages=Scene.PAGES, heads=1), memory) as rank:
        scene = Scene(sg, rank)
        theirs = engine().storage.HiCacheFile(config(rank.pool, memory))
        for name, pool in scene.pools.items():
            theirs.register_mem_host_pool_v2(pool, sg.storage.PoolName(name))
        for turn in range(10):
            names = keys(f"file {turn}", Scene.PAGES)
            rows = drawn(chance, ["kv", "swa", "mamba", "indexer"], Scene.PAGES)
            rows["kv"][:16] = [True] * 16
            scene.store(names, rows)
            for page in np.flatnonzero(rows["kv"]):
                assert theirs.set(names[page], torch.zeros(4))
            for name in ("swa", "mamba", "indexer"):
                pages = np.flatnonzero(rows[name]).tolist()
                part = [names[page] for page in pages]
                theirs.batch_set_v2([transfer(sg, name, scene.pools[name], part, pages)])
            for window in (1, 3):
                transfers = [
                    asked(sg, "swa", "trailing_pages", window),
                    asked(sg, "mamba", "trailing_pages", None),
                    *([asked(sg, "indexer")] if turn % 2 else []),
                ]
                ours, file = (
                    storage.batch_exists_v2(names, transfers) for storage in (rank.backend, theirs)
                )
                assert ours.kv_hit_pages == file.kv_hit_pages
                assert ours.restorable_prefix_pages == file.restorable_prefix_pages
                zeros = {name for name, hit in ours.extra_pool_hit_pages.items() if not hit}
                kept = ours.extra_pool_hit_pages.keys() - zeros
                assert {n: ours.extra_pool_hit_pages[n] for n in kept} == {
                    str(name): hit for name, hit in file.extra_pool_hit_pages.items()
                }


def test_under_a_logical_anchor_the_side_pools_decide(sglang, url):
    """DeepSeek-V4: KV has no bytes, so a page is what its compressed rows and states are."""
    sg, names = sglang, keys("v4", 5)
    logical = sg.paged.LogicalHostPool(24, 4, "page_first")
    rows, states = pools.paged(sg, "page_first"), state(sg, "page_first")
    made = {"deepseek_v4_c4": rows, "deepseek_v4_c4_state": states}
    with Hybrid(sg, logical, made, url, mla=True) as rank:
        for seed, pool in enumerate(made.values()):
            fill(pool, seed)
        ask = [
            asked(sg, "deepseek_v4_c4"),
            asked(sg, "deepseek_v4_c4_state", "trailing_pages", 2),
        ]
        assert rank.backend.batch_exists(names) == 0
        assert rank.backend.batch_exists_v2(names, ask).kv_hit_pages == 0
        out = [
            transfer(sg, "deepseek_v4_c4", rows, names[:4], [0, 1, 2, 3]),
            transfer(sg, "deepseek_v4_c4_state", states, names[1:3], [1, 2], "trailing_pages"),
        ]
        assert all(map(all, rank.backend.batch_set_v2(out).values()))
        found = rank.backend.batch_exists_v2(names, ask)
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [3])
        want = content(rows, range(3)), content(states, [1, 2])
        fill(rows, 5), fill(states, 6)
        back = [
            transfer(sg, "deepseek_v4_c4", rows, names[:3], [3, 4, 5]),
            transfer(sg, "deepseek_v4_c4_state", states, names[1:3], [4, 5], "trailing_pages"),
        ]
        assert all(map(all, rank.backend.batch_get_v2(back).values()))
        assert (content(rows, [3, 4, 5]), content(states, [4, 5])) == want


def hashes(token_ids, page_size):
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    return get_storage_hash_str(token_ids, None, page_size=page_size)


def span(sg, tag, pages, page_size=4):
    """Tokens of a request and the page hashes that SGLang gives them."""
    from array import array

    from sglang.srt.mem_cache.radix_cache import RadixKey

    source = np.random.default_rng(tag)
    ids = array("q", source.integers(0, 9999, pages * page_size).tolist())
    key = RadixKey(ids, None)
    return key, hashes(key, page_size)


def hybrid_pools(sg, pages):
    return {
        "swa": pools.mha(sg, "page_first", pages=pages, heads=2),
        "draft_swa": pools.mha(sg, "page_first", pages=pages, heads=2, layers=1),
        "mamba": pools.mamba(sg, "page_first", slots=pages),
        "indexer": pools.k_only(sg, "page_first", pages=pages),
    }


def transfers_for(sg, made, names, pages, window):
    """What SGLang's components and sidecars hand over with a node that ends at `pages`."""
    derived = {"swa": sg.storage.PoolName.SWA, "kv": sg.storage.PoolName.KV}
    tail = names[-window:]
    return [
        transfer(sg, "swa", made["swa"], tail, pages[-window:], "trailing_pages"),
        transfer(sg, "mamba", made["mamba"], names[-1:], pages[-1:], "trailing_pages"),
        transfer(
            sg, "draft_swa", None, tail, None, "trailing_pages", indices_from_pool=derived["swa"]
        ),
        transfer(sg, "indexer", None, None, None, indices_from_pool=derived["kv"]),
    ]


@pytest.mark.parametrize("latent", [False, True])
def test_backup_query_and_prefetch_through_the_hybrid_controller(sglang, url, latent):
    """200 pages: KV in two batches, side pools whole, a hit query, and all of it back."""
    sg, pages, window = sglang, 200, 3
    made = hybrid_pools(sg, 2 * pages + 1)
    anchor = anchor_of(sg, latent, pages=2 * pages + 1)
    key, names = span(sg, 11, pages)
    with Hybrid(sg, anchor, made, url, mla=latent) as rank:
        for seed, pool in enumerate([anchor, *made.values()]):
            fill(pool, seed)
        at = list(range(pages))
        done = rank.backup(names, at, transfers_for(sg, made, names, at, window))
        assert done.completed_tokens == pages * 4
        assert done.pool_storage_result.extra_pool_hit_pages == {
            "swa": window, "draft_swa": window, "mamba": 1, "indexer": pages
        }  # fmt: skip
        want = {name: content(pool, at) for name, pool in [("kv", anchor), *made.items()]}
        for seed, pool in enumerate([anchor, *made.values()]):
            fill(pool, 50 + seed)
        to = list(range(pages, 2 * pages))
        ask = transfers_for(sg, made, names, to, window)
        for one in ask[:3]:
            one.keys = ["__placeholder__"] * len(one.keys)
        operation = rank.query(key, ask)
        assert operation.storage_hit_count == pages * 4
        assert operation.query_pool_hit_pages == dict.fromkeys(["kv", *made], pages)
        assert rank.load(operation, to) == (
            pages, {"swa": window, "draft_swa": window, "mamba": 1}
        )  # fmt: skip
        for name, pool in {"kv": anchor, "indexer": made["indexer"]}.items():
            assert content(pool, to) == want[name]
        for name in ("swa", "draft_swa"):
            assert content(made[name], to[-window:]) == want[name][-window:]
        assert content(made["mamba"], to[-1:]) == want["mamba"][-1:]


def test_two_ranks_agree_on_a_length_that_both_can_restore(sglang, memory):
    """Checkpoints at 2, 4, 6 here and at 2, 3, 6 there, KV up to 5 there: 2, not min(6, 3)."""
    sg = sglang
    key, names = span(sg, 5, 6)
    barrier, packed = threading.Barrier(2, timeout=20), {}

    def reduce(tensor, op, groups):
        packed[threading.get_ident()] = tensor.clone()
        barrier.wait()
        tensor.copy_(torch.stack(list(packed.values())).amin(dim=0))
        barrier.wait()

    have = {0: (6, [2, 4, 6]), 1: (5, [2, 3, 6])}
    agreed = {}

    def ask(number):
        made = {"mamba": pools.mamba(sg, "page_first")}
        kv, states = have[number]
        with Hybrid(sg, pools.mha(sg, "page_first"), made, memory, tp=(number, 2)) as rank:
            assert rank.backup(names[:kv], range(kv), None).completed_tokens == kv * 4
            ends = [names[length - 1] for length in states]
            out = transfer(sg, "mamba", made["mamba"], ends, range(3))
            assert rank.backend.batch_set_v2([out]) == {"mamba": [True] * 3}
            alone = rank.backend.batch_exists_v2(names, [asked(sg, "mamba", "trailing_pages", 1)])
            assert alone.restorable_prefix_pages == [n for n in states if n <= kv]
            operation = rank.query(key, [asked(sg, "mamba", "trailing_pages", 1)], reduce)
            agreed[number] = operation.storage_hit_count // 4

    threads = [threading.Thread(target=ask, args=(number,)) for number in have]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert agreed == {0: 2, 1: 2}


def test_the_threads_of_the_hybrid_controller_at_once(sglang, url):
    """Backups and prefetches of many requests in flight together; every byte is right."""
    sg, pages, window, requests = sglang, 5, 2, 12
    made = hybrid_pools(sg, 2 * pages * requests + 1)
    anchor = pools.mha(sg, "page_first", pages=2 * pages * requests + 1)
    everything = {"kv": anchor, **made}
    for seed, pool in enumerate(everything.values()):
        fill(pool, seed)
    with Hybrid(sg, anchor, made, url, threads=True) as rank:
        spans = [span(sg, 100 + number, pages) for number in range(requests)]
        homes = [list(range(n * pages, (n + 1) * pages)) for n in range(requests)]
        away = [[page + pages * requests for page in home] for home in homes]
        for (_, names), home in zip(spans, homes, strict=True):
            rank.write(names, home, transfers_for(sg, made, names, home, window))
        for _ in spans:
            done = rank.acknowledged("ack_backup_queue")
            assert done.completed_tokens == pages * 4
        waiting = {}
        for number, (key, names) in enumerate(spans):
            ask = transfers_for(sg, made, names, away[number], window)
            waiting[rank.ask(f"request {number}", key, ask)] = number
        for _ in spans:
            operation = rank.acknowledged("prefetch_hit_queue")
            assert operation.storage_hit_count == pages * 4
            rank.fetch(operation, away[waiting[operation]])
        finished = set()
        while len(finished) < requests:
            ack = rank.acknowledged("ack_prefetch_queue")
            if ack.completed_req:
                finished.add(ack.rid)
            elif ack.pool_hits is not None:
                hits = {name: count for name, count in ack.pool_hits.items() if count}
                assert hits == {"swa": window, "draft_swa": window, "mamba": 1}
            else:
                assert ack.completed_tokens == pages * 4
    for home, there in zip(homes, away, strict=True):
        for name, pool in everything.items():
            tail = {"swa": window, "draft_swa": window, "mamba": 1}.get(name, pages)
            assert content(pool, there[-tail:]) == content(pool, home[-tail:])
