"""The self-test at attach: it finds what is broken, gives the page back and leaves nothing."""

import ctypes
import logging

import numpy as np
import pytest

from kvconnect.backend import Capabilities, Op, Status
from kvconnect.errors import BackendError, ConfigError, TransferTimeoutError, UnavailableError
from kvconnect.memory import MemoryBackend, ObjectStore
from kvconnect.selftest import read_page, write_page
from kvconnect.wrappers import Delayed, Dirt, Faulty, Lie, Wrapper
from tests.unit.attached import attach
from tests.unit.held_pools import NAMED, held

PAGES = 4


@pytest.fixture(params=["auto", "staged"])
def want(request):
    return request.param


@pytest.fixture
def one():
    one = held("clpshd", pages=PAGES)
    one.write(range(PAGES), one.random(PAGES))
    return one


def attached(one, store, **options):
    return attach(one, store, self_test=True, **options)


def test_it_passes_says_so_and_leaves_no_trace(one, want, caplog):
    before = one.snapshot()
    caplog.set_level(logging.INFO, "kvconnect")
    with MemoryBackend() as store, attached(one, store, want=want) as connector:
        assert one.untouched_outside([], before)
        assert store.list_keys() == []
        assert connector.stats() == {"quarantined.pages": 0, "staging.bytes": staging(connector)}
        (line,) = [r.getMessage() for r in caplog.records if r.name == "kvconnect"]
        assert "self-test ok (384 B there and back)" in line
        assert connector.identity.namespace in line


def staging(connector):
    return connector._staging.region.nbytes if connector._staging else 0


class OneRun(Wrapper):
    capabilities = Capabilities(scatter_gather=False)


class Watching(Wrapper):
    """Notes the pages that batches touch, and how often it was asked for anything."""

    def __init__(self, inner):
        super().__init__(inner)
        self.batches = []

    def submit(self, batch):
        self.batches.append(batch)
        return super().submit(batch)


def test_the_off_switch_moves_nothing(one):
    store = Watching(MemoryBackend())
    with store, attach(one, store, self_test=False):
        assert store.batches == []


@pytest.mark.parametrize(("page", "used"), [(None, PAGES - 1), (0, 0), (2, 2)])
def test_it_borrows_the_page_it_is_told_to(page, used):
    one = held("pclshd", pages=PAGES)
    store = Watching(MemoryBackend())
    with store, attached(one, store, self_test_page=page):
        assert {batch.op for batch in store.batches} == set(Op)
        start = one.buffers[0].region.address + used * 384
        for batch in store.batches:
            assert (batch.address >= start).all()
            assert (batch.address + batch.nbytes <= start + 384).all()


@pytest.mark.parametrize("page", [-1, PAGES, 99])
def test_a_page_outside_the_pool_is_refused(one, page):
    with MemoryBackend() as store:
        with pytest.raises(ConfigError, match=f"self_test_page={page} is outside .* {PAGES} pages"):
            attached(one, store, self_test_page=page)
        assert store._registrations.regions == ()


class Corrupting(Wrapper):
    """Flips one byte of every load after it has landed, and says OK."""

    def submit(self, batch):
        transfer = super().submit(batch)
        wait = transfer.wait

        def corrupt(timeout=None):
            outcome = wait(timeout)
            if batch.op is Op.LOAD:
                byte = ctypes.c_uint8.from_address(int(batch.address[-1]))
                byte.value ^= 1
            return outcome

        transfer.wait = corrupt
        return transfer


class Silent(Wrapper):
    """Says OK to loads whose bytes it never delivers: the destination is as it was."""

    def submit(self, batch):
        if batch.op is Op.STORE:
            return super().submit(batch)
        places = list(zip(batch.address.tolist(), batch.nbytes.tolist(), strict=True))
        before = [ctypes.string_at(address, nbytes) for address, nbytes in places]
        transfer = super().submit(batch)
        wait = transfer.wait

        def undone(timeout=None):
            outcome = wait(timeout)
            for (address, _), data in zip(places, before, strict=True):
                ctypes.memmove(address, data, len(data))
            return outcome

        transfer.wait = undone
        return transfer


class Blind(Wrapper):
    """Stores, and then does not find it."""

    def exists(self, keys, nbytes):
        return np.zeros(len(keys), dtype=np.bool_)


def scripted(op, *steps):
    def make(inner):
        faulty = Faulty(inner, dirt=Dirt.HALF)
        faulty.script(op, *steps)
        return faulty

    return make


def down(inner):
    faulty = Faulty(inner)
    faulty.script_exists(UnavailableError("store is down"))
    return faulty


BROKEN = {
    "corrupts": (Corrupting, r"self-test: 1 of 384 bytes came back wrong from corrupting\(memory"),
    "silent": (Silent, r"self-test: 384 of 384 bytes came back wrong"),
    "blind": (Blind, r"blind\(memory\) does not find what it stored"),
    "full": (scripted(Op.STORE, [Status.NO_SPACE]), r"put failed on .*NO_SPACE 1"),
    "forgets": (scripted(Op.STORE, Lie.FORGOTTEN), "does not find what it stored"),
    "unreadable": (scripted(Op.LOAD, [Status.BACKEND_ERROR]), r"get failed.*BACKEND_ERROR 1"),
    "checksum": (scripted(Op.LOAD, [Status.CHECKSUM]), r"get failed on .*CHECKSUM 1.*injected"),
    "short": (scripted(Op.LOAD, Lie.SHORT_BYTES), r"get failed on .*B confirmed"),
    "down": (down, "store is down"),
}


@pytest.mark.parametrize(("make", "words"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_store_is_found_and_everything_is_given_back(one, want, make, words):
    before = one.snapshot()
    inner = MemoryBackend()
    with make(inner) as store:
        with pytest.raises(BackendError, match=words):
            attached(one, store, want=want, retries=0)
        assert one.untouched_outside([], before), "the page has its bytes back"
        assert inner.list_keys() == []
        assert inner._registrations.regions == ()


def test_a_failing_cleanup_does_not_hide_what_was_found(one):
    class Both(Blind):
        def remove(self, keys):
            raise UnavailableError("and now it is down")

    with Both(MemoryBackend()) as store, pytest.raises(BackendError, match="does not find"):
        attached(one, store)


def test_a_hanging_store_is_the_error_even_if_it_cannot_be_detached(one):
    """The memory is still leased, so the pool stays registered; the first error is the one told."""
    with Delayed(MemoryBackend(), obeys_cancel=False) as store, store.held():
        with pytest.raises(BackendError, match=r"put failed on delayed.*TIMEOUT 1") as found:
            attached(one, store, timeout=0.05)
        assert not isinstance(found.value, TransferTimeoutError)
        assert any("still in flight" in note for note in found.value.__notes__)


def test_what_cannot_be_removed_expires(one):
    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    class Keeps(Wrapper):
        def __init__(self, inner):
            self.inner = inner

    clock = Clock()
    inner = MemoryBackend(ObjectStore(clock=clock))
    with Keeps(inner) as store, attached(one, store, timeout=10):
        assert len(inner.list_keys()) == 1
        clock.now = 10 * 4 + 1
        assert inner.list_keys() == []


@pytest.mark.parametrize("order", [*NAMED.values(), "pblcshd"])
@pytest.mark.parametrize(
    "options", [{}, {"head_group": 2}, {"object_layout": "canonical", "layer_chunk": 1}]
)
def test_it_passes_on_every_layout(order, options):
    one = held(order, pages=PAGES, block=2 if "b" in order else 0)
    before = one.snapshot()
    for kind in (Wrapper, OneRun):
        with kind(MemoryBackend()) as store, attached(one, store, **options):
            assert one.untouched_outside([], before)


@pytest.mark.parametrize("order", [*NAMED.values(), "pblcshd", "plsd"])
def test_reading_and_writing_a_page_touch_all_of_it_and_nothing_else(order):
    heads, dims = (1, (8, 0)) if order == "plsd" else (4, (4, 4))
    one = held(order, heads=heads, dims=dims, block=2 if "b" in order else 0, pads=(1, 2, 3))
    ids = np.array([2], dtype=np.uint64)
    data = np.random.default_rng(5).integers(0, 256, one.pool.page_nbytes, dtype=np.uint8)
    before = one.snapshot()
    old = read_page(one.pool, ids)
    write_page(one.pool, ids, data)
    assert one.untouched_outside([2], before)
    stored = np.concatenate([value.reshape(-1) for value in one.read([2]).values()])
    assert sorted(stored.tolist()) == sorted(data.tolist())
    assert (read_page(one.pool, ids) == data).all()
    write_page(one.pool, ids, old)
    assert one.untouched_outside([], before)
