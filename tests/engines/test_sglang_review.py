"""What shapes do not show, what a failed attach leaves behind, and what must not be in a log."""

import gc
import logging
import threading
import uuid
import weakref
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from kvconnect.backend import Op, Status
from kvconnect.engines import sglang as adapter
from kvconnect.engines.sglang import attached, served
from kvconnect.errors import KVConnectError
from kvconnect.memory.backend import MemoryBackend
from kvconnect.wrappers.base import Wrapper
from kvconnect.wrappers.deferring import Deferring
from tests.engines import sglang_pools as pools
from tests.engines.sglang_rank import Rank, config, content, engine, fill, keys, served_by, tokens

pytestmark = pytest.mark.sglang


@pytest.fixture
def url():
    return f"memory://{uuid.uuid4().hex}"


# -- what a pool's shape does not show ---------------------------------------------------------


@pytest.fixture
def serving(monkeypatch):
    """Pretend that the engine was started with these arguments."""
    return lambda **given: monkeypatch.setattr(
        served, "_server_arguments", lambda: SimpleNamespace(**given)
    )


def mirrored(sg, dtype, layout="page_first", order="nhd", heads=4):
    """The host pool of a real device pool, whose dtype on the host is the engine's choice."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    device = MHATokenToKVPool(
        size=32, page_size=4, dtype=dtype, head_num=heads, head_dim=16, layer_num=3, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    info = device._mha_buffer_info()
    if order != "nhd":
        kind = type(info.buffers.layout)
        buffers = msgspec.structs.replace(info.buffers, layout=kind(order))
        info = msgspec.structs.replace(info, buffers=buffers)
    with pools.budget(sg):
        return sg.mha.get_mha_host_pool_cls(info)(
            info, 2.0, 0, 4, layout, pin_memory=False, device_capacity_tokens=4, start_layer=0,
            end_layer=3, host_token_capacity=32,
        )  # fmt: skip


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("interface", [1, 0])
def test_the_engines_float8_pools_do_not_exchange_pages(sglang, url, serving, interface):
    """The engine keeps both kinds as uint8, so that only its command line tells them apart."""
    one, two = mirrored(sglang, E4M3), mirrored(sglang, E5M2)
    assert one.dtype == two.dtype == torch.uint8
    fill(one, 1)
    names, want = keys("float8", 2), content(one, range(2))
    serving(kv_cache_dtype="fp8_e4m3")
    with Rank(one, url, interface=interface) as writer:
        assert writer.put(names, [0, 1]) == 2
        serving(kv_cache_dtype="fp8_e5m2")
        with Rank(two, url, interface=interface) as reader:
            assert (reader.exists(names), reader.get(names, [0, 1])) == (0, 0)
        # Left to itself the engine takes e4m3 where the checkpoint says float8.
        for settings in ({"kv_cache_dtype": "auto"}, {"kv_cache_dtype": "fp8_e4m3"}):
            serving(**settings)
            with Rank(mirrored(sglang, E4M3), url, interface=interface) as same:
                assert same.get(names, [4, 5]) == 2
                assert content(same.pool, [4, 5]) == want


def test_rotary_scaling_that_is_overridden_is_another_model(sglang, url, serving):
    names = keys("rope", 2)
    serving(json_model_override_args="{}")
    with Rank(mirrored(sglang, torch.bfloat16), url) as plain:
        assert plain.put(names, [0, 1]) == 2
        serving(json_model_override_args='{"rope_scaling": {"factor": 4.0}}')
        with Rank(mirrored(sglang, torch.bfloat16), url) as scaled:
            assert scaled.exists(names) == 0


def test_the_real_arguments_are_read(sglang, monkeypatch):
    from sglang.srt import runtime_context
    from sglang.srt.server_args import ServerArgs

    context = runtime_context.get_context()
    for name in ("_server_args", "_config_bags"):
        monkeypatch.setattr(context, name, getattr(context, name))
    context.set_server_args(
        ServerArgs(model_path="org/none", kv_cache_dtype="fp8_e5m2", weight_version="7")
    )
    settings = served.find_facts(SimpleNamespace(weights="w", model_path=None)).settings
    assert (settings.kv, settings.pairs) == ("fp8_e5m2", (("weight_version", "7"),))
    context.override("test", kv_cache_dtype="fp8_e4m3")  # as the engine resolves it later
    settings = served.find_facts(SimpleNamespace(weights="w", model_path=None)).settings
    assert settings.kv == "fp8_e4m3"


def test_pages_in_another_order_on_the_device(sglang, url):
    """The host has the device's order, which says another thing under the same axes."""
    names = keys("order", 2)
    with Rank(mirrored(sglang, torch.bfloat16), url, lcm=2) as plain:
        assert plain.put(names, [0, 1]) == 2
        assert plain.backend._anchor.connector.plan.objects == 2
        with Rank(mirrored(sglang, torch.bfloat16, order="hnd"), url, lcm=2) as other:
            assert other.exists(names) == 0
            assert other.backend._anchor.connector.plan.objects == 1, "cut by heads"


# -- an attach that fails ----------------------------------------------------------------------


class Slow(Deferring):
    """Loads begin when the gate opens, whatever became of who asked, and nothing is removed."""

    def __init__(self, inner):
        super().__init__(inner)
        self.gate, self.over = threading.Event(), threading.Event()
        self.obeys_cancel = False

    def admit(self, transfer, piece):
        if piece.op is Op.LOAD:
            assert self.gate.wait(20)
        return Status.OK

    def leave(self, piece):
        if piece.op is Op.LOAD:
            self.over.set()

    def remove(self, keys):
        return np.zeros(len(keys), dtype=np.bool_)

    def close(self):
        pass


@pytest.fixture
def slow(monkeypatch):
    made = served_by(monkeypatch, Slow(MemoryBackend()))
    monkeypatch.setattr(attached, "_held", [])
    yield made
    made.gate.set()
    for connector in attached._held:
        connector.close(20)


@pytest.mark.parametrize("used", [15, 0])
def test_a_page_that_a_failed_self_test_may_still_write_is_given_to_nobody(sglang, slow, used):
    pool = pools.mha(sglang, "page_first", pages=16)
    if used:
        pool.alloc(used * pool.page_size)
    with pytest.raises(KVConnectError, match="self-test"):
        Rank(pool, "memory://", timeout=0.2)
    rest = pool.alloc(pool.available_size())
    given = set() if rest is None else set((rest // pool.page_size).tolist())
    fill(pool, 5)
    before = content(pool, range(16))
    slow.gate.set()
    assert slow.over.wait(20)
    (held,) = attached._held
    held.close(20)
    after = content(pool, range(16))
    changed = {page for page in range(16) if after[page] != before[page]}
    assert len(changed) == 1, "the load did come late"
    assert changed.isdisjoint(given)
    assert len(given) == 15 - used


def test_a_page_that_is_lost_costs_the_next_attach_none(sglang, slow):
    pool = pools.mha(sglang, "page_first", pages=16)
    with pytest.raises(KVConnectError, match="self-test"):
        Rank(pool, "memory://", timeout=0.2)
    assert pool.available_size() == 15 * pool.page_size
    slow.gate.set()
    with Rank(pool, "memory://", timeout=20):
        assert pool.available_size() == 15 * pool.page_size
    assert slow.over.wait(20)
    with Rank(pool, "memory://", timeout=20):
        assert pool.available_size() == 15 * pool.page_size
    pool.clear()
    assert pool.available_size() == 16 * pool.page_size


def test_a_side_pool_is_held_until_its_failed_self_test_is_quiet(sglang, slow):
    """Its registration fails without a word to the engine, which goes on to use its pages."""
    pool, side = (pools.mha(sglang, "page_first", pages=16) for _ in range(2))
    slow.gate.set()
    with Rank(pool, "memory://", timeout=0.2) as rank:
        # What tells a server that runs was set by `Rank`: this one is still to come.
        rank.backend._context.in_use.clear()
        slow.gate.clear()
        slow.over.clear()
        name = engine().storage.PoolName.SWA
        register = threading.Thread(
            target=rank.backend.register_mem_host_pool_v2, args=(side, name)
        )
        register.start()
        register.join(1.5)
        assert register.is_alive(), "the engine was given a page that a transfer still writes"
        slow.gate.set()
        register.join(20)
        assert not register.is_alive()
        assert slow.over.is_set()
        assert attached._held == []
        fill(side, 7)
        before = content(side, range(16))
        assert list(rank.backend._side.refused) == ["swa"]
        assert content(side, range(16)) == before


def test_flat_pages_stay_while_a_failed_self_test_may_still_write_them(sglang, slow):
    pool = pools.mha(sglang, "page_first", pages=16)
    with pytest.raises(KVConnectError, match="self-test"):
        Rank(pool, "memory://", timeout=0.2, interface=0)
    (held,) = attached._held
    before = bytes(memory_of(held))
    slow.gate.set()
    assert slow.over.wait(20)
    held.close(20)
    assert bytes(memory_of(held)) != before


def memory_of(connector):
    (plane,) = connector.pool.planes
    region = plane.region
    return (np.ctypeslib.ctypes.c_uint8 * region.nbytes).from_address(region.address)


def test_memory_of_a_pool_that_is_destroyed_stays_until_the_detach(sglang, url):
    """On its way out the engine destroys its pools with its storage threads at work."""
    pool = pools.k_only(sglang, "page_first")
    buffer = weakref.ref(pool.k_buffer)
    with Rank(pool, url) as rank:
        assert rank.put(keys("exit", 1), [0]) == 1
        pool.destroy()
        assert pool.k_buffer is None
        gc.collect()
        assert buffer() is not None, "stores would read memory that is somebody else's"
        assert rank.put(keys("later", 1), [1]) == 1
    gc.collect()
    assert buffer() is None


# -- a store that breaks its contract ----------------------------------------------------------


class Wild(Wrapper):
    """Raises what no contract names, when told to."""

    def __init__(self, inner):
        super().__init__(inner)
        self.error = None

    def _act(self):
        if self.error is not None:
            raise self.error

    def exists(self, keys, nbytes):
        self._act()
        return self.inner.exists(keys, nbytes)

    def submit(self, batch):
        self._act()
        return self.inner.submit(batch)


@pytest.mark.parametrize("error", [RuntimeError("wild"), OSError(5, "eio"), MemoryError("none")])
@pytest.mark.parametrize("interface", [1, 0])
def test_what_a_store_raises_is_a_miss(sglang, monkeypatch, caplog, error, interface):
    wild = served_by(monkeypatch, Wild(MemoryBackend()))
    pool, names = pools.mha(sglang, "page_first", pages=8), keys("wild", 2)
    fill(pool, 1)
    want = content(pool, range(2))
    with Rank(pool, "memory://", interface=interface, retries=0) as rank:
        assert rank.put(names, [0, 1]) == 2
        wild.error = error
        assert (rank.exists(names), rank.get(names, [4, 5])) == (0, 0)
        assert rank.put(keys("other", 2), [2, 3]) == 0
        wild.error = None
        assert rank.get(names, [4, 5]) == 2
        assert content(pool, [4, 5]) == want
    assert any(repr(error) in r.getMessage() for r in caplog.records if "kvconnect" in r.name)


def test_the_engines_threads_outlive_what_a_store_raises(sglang, monkeypatch):
    wild = served_by(monkeypatch, Wild(MemoryBackend()))
    pool = pools.mha(sglang, "page_first", pages=8)
    with Rank(pool, "memory://", threads=True) as rank:
        control = rank._controller
        for error, stored in ((RuntimeError("wild"), 0), (None, 1)):
            wild.error = error
            control.write_storage(tokens(pool, [0]), [0] * 4, hash_value=keys("alive", 1))
            done = control.ack_backup_queue.get(timeout=20)
            assert done.completed_tokens == stored * pool.page_size
            control.prefetch("request", [0] * 4)
            asked = control.prefetch_hit_queue.get(timeout=20)
            assert asked.storage_hit_count == 0, "these tokens have another hash"


# -- secrets -----------------------------------------------------------------------------------


def test_options_of_the_url_are_in_no_log(sglang, monkeypatch, caplog):
    """They may be credentials: nixl+s3 takes them there."""
    caplog.set_level(logging.DEBUG)
    served_by(monkeypatch, MemoryBackend())
    monkeypatch.setattr("kvconnect.engines.sglang.explaining.open_url", lambda url: MemoryBackend())
    pool = pools.mha(sglang, "page_first")
    url = "nixl+s3://bucket?access_key=AKIA&secret_key=hush"
    with Rank(pool, url):
        text = adapter.explain(pool, config(pool, url))
    assert "nixl+s3://bucket" in caplog.text
    assert "nixl+s3://bucket" in text
    assert "hush" not in caplog.text + text
