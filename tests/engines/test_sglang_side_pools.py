"""Side pools through the adapter: round trips, hit policies, ranks, refusals, the controller."""

import logging
import random
import uuid

import numpy as np
import pytest
import torch

from kvconnect.backend import Op, Status
from kvconnect.errors import UnavailableError
from kvconnect.memory.backend import MemoryBackend
from kvconnect.wrappers import Faulty
from tests.engines import sglang_pools as pools
from tests.engines.sglang_rank import Rank, heads, keys, tokens
from tests.engines.sglang_side import (
    KINDS,
    anchor_of,
    asked,
    content,
    fill,
    pages_of,
    registered,
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


@pytest.mark.parametrize("case", KINDS)
def test_pages_of_every_kind_come_back_as_they_were(sglang, url, case, monkeypatch):
    """Three pages go out in one order and come back into other places in another."""
    name, mla, make = KINDS[case]
    pool = make(sglang, monkeypatch)
    fill(pool, 1)
    count = pages_of(pool)
    assert count >= 6
    before, names = content(pool, range(count)), keys(case, 3)
    with Rank(anchor_of(sglang, mla), url, mla=mla) as rank:
        registered(rank, sglang, name, pool)
        assert content(pool, range(count)) == before, "attaching changed a page"
        out = transfer(sglang, name, pool, names, [2, 0, 1])
        assert rank.backend.batch_set_v2([out]) == {name: [True] * 3}
        fill(pool, 2)
        wiped = content(pool, range(count))
        back = transfer(sglang, name, pool, [*names, "nobody's"], [4, 5, 3, 1])
        assert rank.backend.batch_get_v2([back]) == {name: [True] * 3 + [False]}
        after = content(pool, range(count))
        assert [after[page] for page in (4, 5, 3)] == [before[page] for page in (2, 0, 1)]
        assert [after[page] for page in (0, 2)] == [wiped[page] for page in (0, 2)]


def test_states_of_two_ranks_are_never_mixed_up(sglang, url):
    """Latent KV is stored once for both ranks; the states beside it are each rank's own."""
    sg, names = sglang, keys("ranks", 4)
    with (
        Rank(pools.mla(sg, "page_first"), url, tp=(0, 2), mla=True) as first,
        Rank(pools.mla(sg, "page_first"), url, tp=(1, 2), mla=True) as second,
    ):
        states = [pools.mamba(sg, "page_first") for _ in range(2)]
        for seed, (rank, pool) in enumerate(zip((first, second), states, strict=True)):
            registered(rank, sg, "mamba", pool)
            fill(pool, seed)
        own = [content(pool, range(4)) for pool in states]
        assert first.put(names, [0, 1, 2, 3]) == 4
        outs = [transfer(sg, "mamba", pool, names, [0, 1, 2, 3]) for pool in states]
        assert first.backend.batch_set_v2([outs[0]]) == {"mamba": [True] * 4}
        ask = [asked(sg, "mamba", "trailing_pages", 1)]
        assert first.backend.batch_exists_v2(names, ask).kv_hit_pages == 4
        assert second.exists(names) == 4
        assert second.backend.batch_exists_v2(names, ask).kv_hit_pages == 0
        assert second.backend.batch_get_v2([outs[1]]) == {"mamba": [False] * 4}
        assert second.backend.batch_set_v2([outs[1]]) == {"mamba": [True] * 4}
        for rank, pool, want in zip((first, second), states, own, strict=True):
            fill(pool, 9)
            back = transfer(sg, "mamba", pool, names, [5, 4, 3, 2])
            assert rank.backend.batch_get_v2([back]) == {"mamba": [True] * 4}
            assert content(pool, [5, 4, 3, 2]) == want
    with Rank(pools.mla(sg, "page_first"), url, tp=(0, 1), mla=True) as alone:
        registered(alone, sg, "mamba", states[0])
        assert alone.backend.batch_exists_v2(names, ask).kv_hit_pages == 0


def test_what_is_replicated_with_latent_kv_is_shared_and_heads_are_not(sglang, memory, caplog):
    """A draft of ordinary heads is cut over the ranks, however few heads each has."""
    sg, names = sglang, keys("draft", 2)
    settings = {"url": memory, "mla": True}
    with (
        Rank(pools.mla(sg, "page_first"), tp=(0, 2), **settings) as first,
        Rank(pools.mla(sg, "page_first"), tp=(1, 2), **settings) as second,
        caplog.at_level(logging.WARNING, "kvconnect.sglang"),
    ):
        for name, make in {
            "indexer": KINDS["DSA index"][2],
            "deepseek_v4_c4": KINDS["DeepSeek-V4 rows"][2],
            "draft": lambda sg, _: pools.mha(sg, "page_first", heads=1),
            "a_name_of_tomorrow": KINDS["DeepSeek-V4 rows"][2],
        }.items():
            here, there = make(sg, None), make(sg, None)
            fill(here, 1)
            first.backend.register_mem_host_pool_v2(here, name)
            second.backend.register_mem_host_pool_v2(there, name)
            out = sg.storage.PoolTransfer(name=name, host_indices=tokens(here, [0, 1]), keys=names)
            back = sg.storage.PoolTransfer(
                name=name, host_indices=tokens(there, [2, 3]), keys=names
            )
            assert first.backend.batch_set_v2([out]) == {name: [True, True]}
            shared = name in {"indexer", "deepseek_v4_c4"}
            assert second.backend.batch_get_v2([back]) == {name: [shared, shared]}
            if shared:
                assert content(there, [2, 3]) == content(here, [0, 1])
    lonely = [r.getMessage() for r in caplog.records if "on the first alone" in r.getMessage()]
    assert [line.split()[2] for line in lonely] == ["draft", "a_name_of_tomorrow"]


@pytest.mark.parametrize("wrong", ["no pool", "logical", "broken"])
def test_a_pool_that_cannot_be_served_breaks_nothing_else(sglang, memory, caplog, wrong):
    sg, names = sglang, keys("refused", 3)
    broken = pools.paged(sg, "page_first")
    broken.item_bytes += 1
    pool = {
        "no pool": object(),
        "logical": sg.paged.LogicalHostPool(24, 4),
        "broken": broken,
    }[wrong]
    with Rank(pools.mha(sg, "page_first"), memory) as rank:
        caplog.clear()
        registered(rank, sg, "indexer", pool)
        (line,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
        assert line.levelname == "ERROR"
        assert "indexer is not served" in line.getMessage()
        swa = registered(rank, sg, "swa", pools.mha(sg, "page_first"))
        assert rank.put(names, [0, 1, 2]) == 3
        good = transfer(sg, "swa", swa, names, [0, 1, 2])
        bad = sg.storage.PoolTransfer(name=sg.storage.PoolName.INDEXER, keys=names)
        bad.host_indices = good.host_indices
        both = {"indexer": [False] * 3, "swa": [True] * 3}
        assert rank.backend.batch_set_v2([bad, good]) == both
        assert rank.backend.batch_get_v2([bad, good]) == both
        assert rank.exists(names) == 3
        swa_ask = asked(sg, "swa", "trailing_pages", 2)
        assert rank.backend.batch_exists_v2(names, [swa_ask]).kv_hit_pages == 3
        found = rank.backend.batch_exists_v2(names, [asked(sg, "indexer"), swa_ask])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])
        # Block groups are a second form of the pages: without them KV is as good as before.
        groups = asked(sg, "indexer", "block_groups", block_pages=1, group_pages=1)
        found = rank.backend.batch_exists_v2(names, [groups, swa_ask])
        assert (found.kv_hit_pages, "indexer" in found.extra_pool_hit_pages) == (3, False)


def test_transfers_that_cannot_be_are_answered_key_by_key(sglang, memory):
    sg, names = sglang, keys("odd", 3)
    with Rank(pools.mha(sg, "page_first"), memory) as rank:
        pool = registered(rank, sg, "swa", pools.mha(sg, "page_first"))
        fill(pool, 1)
        before = content(pool, range(6))
        assert rank.backend.batch_set_v2([transfer(sg, "swa", pool, names, [0, 1, 2])])
        for what in (rank.backend.batch_get_v2, rank.backend.batch_set_v2):
            assert what([]) == {}
            assert what([transfer(sg, "swa", pool, None, None)]) == {"swa": []}
            assert what([transfer(sg, "swa", pool, names, None)]) == {"swa": [False] * 3}
            assert what([transfer(sg, "swa", pool, names, [0, 1])]) == {"swa": [False] * 3}
            assert what([transfer(sg, "swa", pool, names, [0, 1, 6])]) == {"swa": [False] * 3}
            assert what([transfer(sg, "mamba", pool, names, [0, 1, 2])]) == {"mamba": [False] * 3}
            loose = transfer(sg, "swa", pool, names, [0, 1, 2])
            loose.host_indices = loose.host_indices + 1
            assert what([loose]) == {"swa": [False] * 3}
        odd = asked(sg, "swa")
        odd.hit_policy = "some_pages"
        assert rank.put(names, [0, 1, 2]) == 3
        assert rank.backend.batch_exists_v2(names, [odd]).kv_hit_pages == 0
        no_geometry = asked(sg, "swa", "block_groups")
        assert rank.backend.batch_exists_v2(names, [no_geometry]).kv_hit_pages == 3
        assert content(pool, range(6)) == before


def test_thousands_of_keys_in_one_call_and_keys_that_come_twice(sglang, url):
    """SGLang cuts KV into batches of 128 and sends side pools whole."""
    sg, count = sglang, 3000
    names = keys("many", count)
    with Rank(pools.mla(sg, "page_first", pages=8), url, mla=True) as rank:
        pool = registered(rank, sg, "indexer", pools.paged(sg, "page_first", pages=count + 500))
        fill(pool, 1)
        before = content(pool, range(count))
        out = transfer(sg, "indexer", pool, names, range(count))
        assert rank.backend.batch_set_v2([out]) == {"indexer": [True] * count}
        fill(pool, 2)
        order = random.Random(1).sample(range(count), count)
        again = order[:200]
        asked_for = [names[at] for at in order + again]
        back = transfer(sg, "indexer", pool, asked_for, range(count + 200))
        assert rank.backend.batch_get_v2([back]) == {"indexer": [True] * (count + 200)}
        assert content(pool, range(count + 200)) == [before[at] for at in order + again]
        twice = transfer(sg, "indexer", pool, ["new", names[0], "new"], [1, 2, 1])
        assert rank.backend.batch_set_v2([twice]) == {"indexer": [True] * 3}


def served_by(monkeypatch, backend):
    monkeypatch.setattr("kvconnect.engines.sglang.storage.open_url", lambda _: backend)
    return backend


def test_failures_stay_with_their_keys_and_their_pool(sglang, memory, monkeypatch):
    sg, names = sglang, keys("faults", 4)
    faulty = served_by(monkeypatch, Faulty(MemoryBackend()))
    with Rank(pools.mha(sg, "page_first"), memory, retries=0, negative_ttl=0) as rank:
        swa = registered(rank, sg, "swa", pools.mha(sg, "page_first"))
        mamba = registered(rank, sg, "mamba", pools.mamba(sg, "page_first"))
        both = [
            transfer(sg, name, pool, names, [0, 1, 2, 3])
            for name, pool in (("swa", swa), ("mamba", mamba))
        ]
        assert rank.put(names, [0, 1, 2, 3]) == 4
        faulty.script(Op.STORE, [0, 0, Status.NO_SPACE, 0])
        assert rank.backend.batch_set_v2(both) == {
            "swa": [True, True, False, True],
            "mamba": [True] * 4,
        }
        ask = [asked(sg, "swa", "trailing_pages", 2), asked(sg, "mamba", "trailing_pages", 1)]
        assert rank.backend.batch_exists_v2(names, ask).restorable_prefix_pages == [1, 2]
        assert rank.backend.batch_set_v2(both) == {"swa": [True] * 4, "mamba": [True] * 4}
        faulty.script(Op.LOAD, UnavailableError("gone"), [0, Status.CHECKSUM, 0, 0])
        assert rank.backend.batch_get_v2(both) == {
            "swa": [False] * 4,
            "mamba": [True, False, True, True],
        }
        assert rank.backend.batch_get_v2(both) == {"swa": [True] * 4, "mamba": [True] * 4}


def test_an_error_nobody_foresaw_stays_with_its_pool(sglang, memory, monkeypatch):
    sg, names = sglang, keys("unforeseen", 2)
    faulty = served_by(monkeypatch, Faulty(MemoryBackend()))
    with Rank(pools.mha(sg, "page_first"), memory) as rank:
        swa = registered(rank, sg, "swa", pools.mha(sg, "page_first"))
        draft = registered(rank, sg, "draft", pools.mha(sg, "page_first", layers=1))
        assert rank.put(names, [0, 1]) == 2
        both = [
            transfer(sg, name, pool, names, [0, 1])
            for name, pool in (("swa", swa), ("draft", draft))
        ]
        faulty.script(Op.STORE, ZeroDivisionError("a bug"))
        assert rank.backend.batch_set_v2(both) == {"swa": [False] * 2, "draft": [True] * 2}
        assert rank.backend.batch_set_v2(both) == {"swa": [True] * 2, "draft": [True] * 2}
        faulty.script_exists(ZeroDivisionError("a bug"))
        present = np.array([True, True])
        ask = [asked(sg, "swa"), asked(sg, "draft")]
        assert rank.backend._side.exists(names, present, ask).kv_hit_pages == 0
        assert rank.backend._side.exists(names, present, ask).kv_hit_pages == 2


def test_a_name_is_served_by_one_pool_only(sglang, memory):
    sg, names = sglang, keys("name", 1)
    with Rank(pools.mha(sg, "page_first"), memory) as rank:
        pool = registered(rank, sg, "swa", pools.mha(sg, "page_first"))
        registered(rank, sg, "swa", pool)
        assert rank.backend.batch_set_v2([transfer(sg, "swa", pool, names, [0])])["swa"] == [True]
        other = registered(rank, sg, "swa", pools.mha(sg, "page_first"))
        before = content(pool, range(6))
        back = transfer(sg, "swa", other, names, [1])
        assert rank.backend.batch_get_v2([back]) == {"swa": [False]}
        assert content(pool, range(6)) == before


def test_clear_and_close_are_about_this_identity_and_happen_once(sglang, url):
    sg, names = sglang, keys("clear", 2)
    made = pools.mha(sg, "page_first")
    with Rank(pools.mha(sg, "page_first"), url, salt="other") as other:
        registered(other, sg, "swa", made)
        out = transfer(sg, "swa", made, names, [0, 1])
        with Rank(pools.mha(sg, "page_first"), url) as rank:
            registered(rank, sg, "swa", made)
            for one in (rank, other):
                assert one.backend.batch_set_v2([out]) == {"swa": [True, True]}
            rank.backend.clear()
            assert rank.backend.batch_get_v2([out]) == {"swa": [False, False]}
            assert other.backend.batch_get_v2([out]) == {"swa": [True, True]}
            assert rank.backend._side.stats()["swa.put.ok"] >= 2
        side = rank.backend._side
        side.close()
        assert side.get([out]) == side.set([out]) == {"swa": [False, False]}
        registered(rank, sg, "swa", made)
        assert "swa" in side.refused


def test_close_tries_every_pool_and_keeps_what_fails(sglang, memory, monkeypatch):
    from kvconnect.engines.sglang.attached import Attached

    sg, closed, fail = sglang, [], {"swa", "draft"}
    real = Attached.close

    def close(self, timeout=None):
        closed.append(self.name)
        if self.name in fail:
            raise UnavailableError(f"{self.name} is stuck")
        real(self, timeout)

    monkeypatch.setattr(Attached, "close", close)
    rank = Rank(pools.mha(sg, "page_first"), memory)
    for name in ("swa", "mamba", "draft"):
        make = pools.mamba if name == "mamba" else pools.mha
        registered(rank, sg, name, make(sg, "page_first"))
    side = rank.backend._side
    with pytest.raises(UnavailableError, match="swa is stuck") as raised:
        side.close()
    assert "draft is stuck" in raised.value.__notes__[0]
    assert closed == ["swa", "mamba", "draft"]
    fail.clear()
    side.close()
    assert closed[3:] == ["swa", "draft"]
    side.close()
    assert len(closed) == 5
    rank.close()


def test_pools_of_one_shape_do_not_share_pages(sglang, memory):
    sg, names = sglang, keys("alike", 2)
    with Rank(pools.mha(sg, "page_first"), memory) as rank:
        made = {name: pools.mha(sg, "page_first") for name in ("swa", "auxiliary_swa", "draft_swa")}
        for seed, (name, pool) in enumerate(made.items()):
            registered(rank, sg, name, pool)
            fill(pool, seed)
        fill(rank.pool, 9)
        want = {name: content(pool, [0, 1]) for name, pool in made.items()}
        assert rank.put(names, [0, 1]) == 2
        assert rank.backend.batch_get_v2(
            [transfer(sg, name, pool, names, [2, 3]) for name, pool in made.items()]
        ) == {name: [False, False] for name in made}
        rank.backend.batch_set_v2(
            [transfer(sg, name, pool, names, [0, 1]) for name, pool in made.items()]
        )
        assert rank.backend.batch_get_v2(
            [transfer(sg, name, pool, names, [4, 5]) for name, pool in made.items()]
        ) == {name: [True, True] for name in made}
        assert {name: content(pool, [4, 5]) for name, pool in made.items()} == want


@pytest.mark.parametrize("layout", ["page_head", "page_first"])
def test_a_window_of_heads_is_shared_between_tp_sizes(sglang, url, layout):
    """TP 1 writes 8 heads, each rank of TP 2 reads its 4; and the other way round."""
    sg, names, settings = sglang, keys("tp", 2), {"tp_sizes": [1, 2]}

    def made(heads_):
        return pools.mha(sg, layout, heads=heads_)

    with (
        Rank(made(8), url, tp=(0, 1), **settings) as one,
        Rank(made(4), url, tp=(0, 2), **settings) as low,
        Rank(made(4), url, tp=(1, 2), **settings) as high,
    ):
        swa = {
            rank: registered(rank, sg, "swa", made(n))
            for rank, n in ((one, 8), (low, 4), (high, 4))
        }
        for seed, pool in enumerate(swa.values()):
            fill(pool, seed)
        out = transfer(sg, "swa", swa[one], names, [0, 1])
        assert one.backend.batch_set_v2([out]) == {"swa": [True, True]}
        for rank, first in ((low, 0), (high, 4)):
            back = transfer(sg, "swa", swa[rank], names, [3, 2])
            assert rank.backend.batch_get_v2([back]) == {"swa": [True, True]}
            for here, there in ((3, 0), (2, 1)):
                for got, whole in zip(heads(swa[rank], here), heads(swa[one], there), strict=True):
                    assert torch.equal(got, whole[:, :, first : first + 4])
        halves = keys("halves", 1)
        assert low.backend.batch_set_v2([transfer(sg, "swa", swa[low], halves, [0])])["swa"] == [
            True
        ]
        back = transfer(sg, "swa", swa[one], halves, [5])
        assert one.backend.batch_get_v2([back]) == {"swa": [False]}
        assert high.backend.batch_set_v2([transfer(sg, "swa", swa[high], halves, [0])])["swa"] == [
            True
        ]
        assert one.backend.batch_get_v2([back]) == {"swa": [True]}
        for whole, *parts_ in zip(
            heads(swa[one], 5), heads(swa[low], 0), heads(swa[high], 0), strict=True
        ):
            assert torch.equal(whole, torch.cat(parts_, dim=2))
