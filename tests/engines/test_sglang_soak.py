"""SGLang's own threads under random load for a minute, and proof that the soak can fail."""

import os

import pytest
import torch

from tests.engines.sglang_soak import growth, page_bytes, soak

pytestmark = pytest.mark.sglang

SECONDS = float(os.environ.get("KVCONNECT_SOAK_SECONDS", "45"))


@pytest.fixture
def url(tmp_path):
    return f"nvme://{tmp_path}/store?capacity="


@pytest.mark.slow
def test_a_store_that_evicts_all_the_time(sglang, url):
    report = soak(sglang, f"{url}128MiB", seconds=SECONDS, seed=1)
    assert report["errors"] == []
    assert report["store"]["evicted"] > 1000
    assert report["counts"]["pages loaded"] > 1000
    assert report["counts"]["terminated"] > 0


@pytest.mark.slow
def test_a_store_that_never_evicts_loses_nothing(sglang, url):
    """Every page that a backup acknowledged is found by every later hit query, and loads."""
    report = soak(sglang, f"{url}8GiB", seconds=6, seed=2)
    assert report["errors"] == []
    assert report["store"]["evicted"] == 0
    assert report["counts"]["pages loaded"] > 1000


def test_memory(sglang):
    report = soak(sglang, "memory://soak?capacity=64MiB", seconds=4, seed=3, pages=64)
    assert report["errors"] == []
    assert report["counts"]["pages loaded"] > 100


def test_one_wrong_byte_fails_the_soak(sglang, monkeypatch):
    """The soak's own test: a storage that loads into a page and then changes one byte of it."""
    from kvconnect.engines.sglang import KVConnectStorage

    real = KVConnectStorage.batch_get_v1

    def damaging(self, keys, host_indices, extra_info=None):
        ok = real(self, keys, host_indices, extra_info)
        page = self.mem_pool_host.kv_buffer[1, int(host_indices[0])].view(-1)
        page.view(torch.int16)[-1] ^= 1
        return ok

    monkeypatch.setattr(KVConnectStorage, "batch_get_v1", damaging)
    report = soak(sglang, "memory://damaged", seconds=2, seed=4, pages=64)
    assert any("wrong bytes" in text for text in report["errors"])


def test_a_page_that_is_lost_fails_the_soak(sglang, monkeypatch):
    from kvconnect.engines.sglang import KVConnectStorage

    real = KVConnectStorage.batch_set_v1

    def forgetful(self, keys, host_indices, extra_info=None):
        slots = self.mem_pool_host.page_size
        real(self, keys[:-1], host_indices[:-slots], extra_info)
        return [True] * len(keys)

    monkeypatch.setattr(KVConnectStorage, "batch_set_v1", forgetful)
    report = soak(sglang, "memory://forgetful", seconds=2, seed=5, pages=64)
    assert any("stored but not found" in text for text in report["errors"])


def test_growth_is_noticed_and_a_start_is_not():
    flat = [{"fds": 20, "threads": 30, "rss": 1 << 30}] * 12
    start = [{"fds": 3, "threads": 4, "rss": 1 << 28}] * 4
    assert growth(start + flat[:8]) == []
    for name, value in (("fds", 23), ("threads", 33), ("rss", (1 << 30) + (100 << 20))):
        more = flat[:8] + [flat[0] | {name: value}] * 4
        assert [text.split()[0] for text in growth(more)] == [name]


def test_the_oracle_is_the_hash_and_nothing_else():
    one, two = "0" * 63 + "1", "0" * 63 + "2"
    assert page_bytes(one, 100).tobytes() == page_bytes(one, 104).tobytes()[:100]
    assert page_bytes(one, 100).tobytes() != page_bytes(two, 100).tobytes()
