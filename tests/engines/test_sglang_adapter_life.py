"""The adapter's life: what is refused at attach, faults, damage, clear, statistics, close."""

import contextlib
import logging
import threading
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kvconnect
from kvconnect import selftest
from kvconnect.backend import Op, Status
from kvconnect.engines import sglang as adapter
from kvconnect.errors import ConfigError, KVConnectError, UnavailableError
from kvconnect.memory.backend import MemoryBackend
from kvconnect.wrappers import Faulty
from tests.engines import sglang_pools as pools
from tests.engines.sglang_rank import (
    Rank,
    config,
    content,
    engine,
    fill,
    keys,
    served_by,
    tokens,
)

pytestmark = pytest.mark.sglang


@pytest.fixture
def url():
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def pool(sglang):
    made = pools.mha(sglang, "page_first", pages=16)
    fill(made, 1)
    return made


def handles():
    return len(list(Path("/proc/self/fd").iterdir())), set(threading.enumerate())


def assert_nothing_left(before):
    """No more descriptors than before, and no other threads once those that end have ended."""
    for thread in set(threading.enumerate()) - before[1]:
        thread.join(5)
    files, threads = handles()
    assert files <= before[0]
    assert threads <= before[1]


# -- loading and refusing ----------------------------------------------------------------------


def test_the_class_is_a_storage_of_sglang(sglang):
    assert issubclass(adapter.KVConnectStorage, engine().storage.HiCacheStorage)
    assert not adapter.KVConnectStorage.__abstractmethods__


def test_an_attribute_that_is_not_there():
    with pytest.raises(AttributeError, match="KVConnectStore'"):
        adapter.KVConnectStore  # noqa: B018


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"ulr": "memory://"}, "did you mean url"),
        ({"url": ""}, "url"),
        ({"url": "nowhere://x"}, "no backend is called"),
        ({"url": "memory://x?capcity=1"}, "did you mean capacity"),
        ({"timeout": 0}, "timeout"),
        ({"self_test": "perhaps"}, "self_test"),
        ({"interface_v1": "False"}, "interface_v1"),
        ({"model_path": "/nowhere"}, "model_path"),
    ],
)
def test_options_that_are_wrong(sglang, pool, url, wrong, said):
    before = handles()
    settings = config(pool, url)
    settings.extra_config.update(wrong)
    given = dict(settings.extra_config)
    with pytest.raises((ConfigError, UnavailableError), match=said):
        engine().factory.create_backend("dynamic", settings, pool)
    assert settings.extra_config == given, "the caller's options were changed"
    assert_nothing_left(before)


def test_a_model_without_a_name(sglang, pool, url):
    with pytest.raises(ConfigError, match="'model'"):
        Rank(pool, url, served=None)
    with Rank(pool, url, served=None, model="org/model") as rank:
        assert rank.put(keys("named", 1), [0]) == 1


def test_constructor_arguments_that_nobody_gives(sglang, pool, url):
    with pytest.raises(ConfigError, match="extra config"):
        adapter.KVConnectStorage(config(pool, url), {"url": url})


REFUSED = {
    "heads": ({"kv_heads": 3, "tp": (0, 1)}, "KV heads|kv_heads"),
    "canonical staging too small": ({"object_layout": "canonical", "staging": 1}, "staging"),
    "a forced mode": ({"want": "split_heads"}, "split_heads"),
    "a mode there is not": ({"want": "fast"}, "fast"),
    "a chunk of layers": ({"layer_chunk": 2, "layers": 3, "head_group": 3}, "head_group"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_failed_attach_leaves_nothing_behind(sglang, pool, tmp_path, case):
    settings, said = REFUSED[case]
    with kvconnect.open(f"nvme://{tmp_path}?capacity=16MiB"):
        pass  # what the first open of a store leaves in the process is not ours
    before = handles()
    with pytest.raises(KVConnectError, match=said):
        Rank(pool, f"nvme://{tmp_path}?capacity=16MiB", **settings)
    assert_nothing_left(before)


def test_a_pool_whose_memory_is_gone(sglang, pool, url):
    before = handles()
    pool.destroy()
    with pytest.raises(KVConnectError, match="kv_buffer is None"):
        Rank(pool, url)
    assert_nothing_left(before)


def test_a_store_that_fails_the_self_test(sglang, pool, monkeypatch):
    broken = Faulty(MemoryBackend())
    broken.script(Op.STORE, [Status.NO_SPACE])
    served_by(monkeypatch, broken)
    before = content(pool, range(16))
    with pytest.raises(KVConnectError, match="self-test"):
        Rank(pool, "memory://")
    assert content(pool, range(16)) == before
    with pytest.raises(KVConnectError, match="close"):
        broken.exists(["x"], [1])


# -- clear, statistics, words ------------------------------------------------------------------


@pytest.mark.parametrize("store", ["memory", "nvme"])
def test_clear_removes_its_own_pages_only(sglang, pool, url, tmp_path, store):
    url = f"nvme://{tmp_path}?capacity=64MiB" if store == "nvme" else url
    names = keys("clear", 2)
    others = [{"served": "org/model-2"}, {"salt": "tenant"}, {"weights": "w"}, {"lcm": 2}]
    with Rank(pool, url) as mine:
        ranks = [Rank(pool, url, **settings) for settings in others]
        try:
            for rank in (mine, *ranks):
                assert rank.put(names, [0, 1]) == 2
            mine.backend.clear()
            assert mine.exists(names) == 0
            assert [rank.exists(names) for rank in ranks] == [2] * len(ranks)
            assert mine.put(names, [0, 1]) == 2
            assert mine.get(names, [3, 4]) == 2
        finally:
            for rank in ranks:
                rank.close()


@pytest.mark.parametrize("settings", [{}, {"lcm": 4}, {"interface": 0}])
def test_statistics_count_true_bytes(sglang, pool, monkeypatch, settings):
    """Pages and bandwidth of calls that moved every page, at a clock that runs a second a call."""
    faulty = served_by(monkeypatch, Faulty(MemoryBackend()))
    ticks = iter(range(10**6))
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr("kvconnect.engines.sglang.storage.time", clock)
    page, names = len(content(pool, [0])[0]), keys("stats", 6)
    with Rank(pool, "memory://", self_test=False, retries=0, **settings) as rank:
        assert rank.put(names[:4], range(4)) == 4
        assert rank.get(names[:4], range(8, 12)) == 4
        assert rank.get(names[:3], range(8, 11)) == 3
        stats = rank.backend.get_stats()
        assert (stats.backup_pgs, stats.prefetch_pgs) == ([4], [4, 3])
        assert stats.backup_bandwidth == [4 * page / 2**30]
        assert stats.prefetch_bandwidth == [4 * page / 2**30, 3 * page / 2**30]
        faulty.script(Op.STORE, [Status.NO_SPACE])
        rank.put(names[4:], [4, 5])
        assert rank.get(names, range(8, 14)) < 6
        again = rank.backend.get_stats()
        assert (again.backup_pgs, again.prefetch_pgs, again.prefetch_bandwidth) == ([], [], [])


def test_no_statistics_where_metrics_are_off(sglang, pool, url):
    with Rank(pool, url, metrics=False) as rank:
        rank.put(keys("off", 1), [0])
        assert rank.backend.get_stats() is None


def test_a_logical_anchor_has_no_pages_of_its_own(sglang, url):
    logical = sglang.paged.LogicalHostPool(64, 4)
    names = keys("logical", 3)
    settings = config(logical, url)
    with contextlib.closing(adapter.KVConnectStorage(settings, {})) as storage:
        storage.register_mem_pool_host(logical)
        indices = torch.arange(12)
        assert storage.batch_set_v1(names, indices) == [True] * 3
        assert storage.batch_get_v1(names, indices) == [True] * 3
        assert storage.batch_exists(names) == 0, "nothing says that there is anything to load"
        assert storage.batch_exists_v2(names, []).kv_hit_pages == 0
        blocks = engine().storage.PoolTransfer(
            name="swa", hit_policy=engine().storage.PoolHitPolicy.BLOCK_GROUPS
        )
        assert storage.batch_exists_v2(names, [blocks]).kv_hit_pages == 0
        storage.clear()


def test_a_logical_anchor_has_no_flat_pages(sglang, url):
    logical = sglang.paged.LogicalHostPool(64, 4)
    storage = adapter.KVConnectStorage(config(logical, url, interface=0), {})
    with pytest.raises(NotImplementedError, match='"interface_v1": 1'):
        storage.register_mem_pool_host(logical)


def test_a_logical_anchor_asks_the_side_pools(sglang, url):
    """What they hold decides: the anchor itself stands in nobody's way."""
    storage_module = engine().storage
    logical = sglang.paged.LogicalHostPool(24, 4)
    side = pools.paged(sglang, "page_first")
    side.kv_buffer.random_(0, 256)
    want, names = side.kv_buffer[:3].clone(), keys("side", 3)
    with contextlib.closing(
        adapter.KVConnectStorage(config(logical, url, mla=True), {})
    ) as storage:
        storage.register_mem_pool_host(logical)
        storage.register_mem_host_pool_v2(logical, storage_module.PoolName.KV)
        name = storage_module.PoolName.DEEPSEEK_V4_C4
        storage.register_mem_host_pool_v2(side, name)
        storage.on_host_pools_registered()

        def transfer(pages):
            return storage_module.PoolTransfer(
                name=name, host_indices=tokens(side, pages), keys=names[: len(pages)]
            )

        assert storage.batch_exists_v2(names, [transfer([0, 1, 2])]).kv_hit_pages == 0
        assert storage.batch_set_v2([transfer([0, 1])])[name] == [True, True]
        assert storage.batch_exists_v2(names, [transfer([0, 1, 2])]).kv_hit_pages == 2
        side.kv_buffer.zero_()
        assert storage.batch_get_v2([transfer([0, 1])])[name] == [True, True]
        assert torch.equal(side.kv_buffer[:2], want[:2])


def test_one_line_says_what_is_attached(sglang, pool, url, caplog):
    caplog.set_level(logging.INFO, "kvconnect.sglang")
    with Rank(pool, url, weights="w1", tp=(1, 2), lcm=4) as rank:
        namespace = rank.backend._anchor.connector.identity.namespace
    lines = [r.getMessage() for r in caplog.records if r.name == "kvconnect.sglang"]
    (line,) = [text for text in lines if "pool kv on memory: " in text]
    for words in (
        "16 pages of 4 tokens",
        "2 objects",
        "heads [8, 16) of 16",
        "bfloat16",
        "canonical order",
        "'w1'",
        namespace,
    ):
        assert words in line
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_weights_known_by_name_only_are_said_to_be(sglang, pool, url, caplog):
    with Rank(pool, url) as rank:
        assert rank.backend._anchor.connector.identity.weights == "name:org/model"
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "weights=" in warning
    assert "model_path=" in warning


def test_explain_says_what_would_be_stored_and_stores_nothing(sglang, pool, url):
    text = adapter.explain(pool, config(pool, url, tp=(0, 2), lcm=4, weights="w1"))
    for words in (
        "store memory",
        "16 pages x 4 slots",
        "object layout canonical",
        "objects: 2 a page",
        "weights='w1'",
        "model='org/model'",
        "writers: every rank",
    ):
        assert words in text
    assert "warning" not in text
    assert kvconnect.open(url).list_keys() == []
    assert kvconnect.open(url).records() == {}
    latent = pools.mla(sglang, "page_first")
    text = adapter.explain(latent, config(latent, url, mla=True, tp=(0, 4), interface=0))
    for words in ("4 ranks hold the same", "interface_v1 is 0", "warning: the weights"):
        assert words in text


def test_explain_names_the_key_that_an_attach_uses(sglang, pool, url):
    with Rank(pool, url, lcm=2) as rank:
        namespace = rank.backend._anchor.connector.identity.namespace
    assert namespace in adapter.explain(pool, config(pool, url, lcm=2))


# -- attaching to a server that runs -----------------------------------------------------------


@pytest.mark.parametrize("free", [3, 1, 0])
def test_a_pool_in_use_lends_a_free_page_to_the_self_test(sglang, pool, url, monkeypatch, free):
    """No byte of a page that is given away changes, not even for a moment."""
    written, real = [], selftest.write_page

    def noted(pool, ids, data):
        written.extend(ids.tolist())
        real(pool, ids, data)

    monkeypatch.setattr(selftest, "write_page", noted)
    taken = pool.alloc((16 - free) * pool.page_size)
    before, size = content(pool, range(16)), pool.available_size()
    with Rank(pool, url) as rank:
        given_away = set((taken // pool.page_size).tolist())
        assert given_away.isdisjoint(written)
        assert bool(written) == bool(free)
        assert pool.available_size() == size
        assert rank.put(keys("running", 2), [0, 1]) == 2
    assert content(pool, range(16)) == before
    pool.free(taken)
    assert pool.available_size() == 16 * pool.page_size


def test_side_pools_of_a_server_that_runs_are_not_touched(sglang, pool, url, monkeypatch):
    name = engine().storage.PoolName.SWA
    late = pools.mha(sglang, "page_first", layers=1)
    fill(late, 4)
    with Rank(pool, url) as rank:
        monkeypatch.setattr(selftest, "write_page", None)
        rank.backend.register_mem_host_pool_v2(late, name)
        transfer = engine().storage.PoolTransfer(
            name=name, host_indices=tokens(late, [0]), keys=keys("later", 1)
        )
        assert rank.backend.batch_set_v2([transfer])[name] == [True]
