"""Faults under the adapter: late, failed and damaged pages, and many clients at once."""

import threading
import uuid

import pytest

import kvconnect
from kvconnect.backend import Op, Status
from kvconnect.errors import TransferTimeoutError, UnavailableError
from kvconnect.memory.backend import MemoryBackend
from kvconnect.wrappers import Faulty
from kvconnect.wrappers.deferring import Deferring
from tests.engines import sglang_pools as pools
from tests.engines.sglang_rank import (
    Rank,
    buffers,
    content,
    engine,
    fill,
    keys,
    served_by,
    tokens,
    wipe,
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


class Held(Deferring):
    """Holds batches back until the gate opens, and lets nobody cancel them."""

    def __init__(self, inner):
        super().__init__(inner)
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Event()
        self.obeys_cancel = False

    def admit(self, transfer, piece):
        self.arrived.set()
        assert self.gate.wait(20)
        return Status.OK


@pytest.mark.parametrize("interface", [1, 0])
def test_a_late_transfer_keeps_the_call_until_it_is_quiet(sglang, pool, monkeypatch, interface):
    """SGLang reuses the pages once the call is over, so it must not be over before."""
    held = served_by(monkeypatch, Held(MemoryBackend()))
    names, got = keys("late", 2), []
    with Rank(pool, "memory://", timeout=0.2, interface=interface) as rank:
        assert rank.put(names, [0, 1]) == 2
        wipe(pool)
        held.gate.clear()
        held.arrived.clear()
        reader = threading.Thread(target=lambda: got.append(rank.get(names, [8, 9])))
        reader.start()
        assert held.arrived.wait(10)
        reader.join(0.6)  # three times the deadline
        assert reader.is_alive(), "the call gave pages back that a transfer still holds"
        with pytest.raises(TransferTimeoutError, match="in flight"):
            rank.backend.close()
        held.gate.set()
        reader.join(20)
        assert got == [0], "what came after its deadline is a miss"
    assert rank.backend._open == [], "the second close finds all at rest"


def test_a_failed_store_is_tried_again_once(sglang, pool, monkeypatch, caplog):
    faulty = served_by(monkeypatch, Faulty(MemoryBackend()))
    names = keys("again", 4)
    with Rank(pool, "memory://", self_test=False) as rank:
        faulty.script(Op.STORE, [0, Status.BACKEND_ERROR, 0, 0])
        assert rank.put(names, range(4)) == 4
        others = keys("never", 4)
        faulty.script(Op.STORE, [0, Status.BACKEND_ERROR, 0, 0], [Status.BACKEND_ERROR])
        stored = rank.backend.batch_set_v1(others, tokens(pool, range(4)))
        assert stored == [True, False, True, True]
        assert rank.exists(others) == 1
    assert any("1 of 4 pages BACKEND_ERROR" in r.message for r in caplog.records)


def test_failed_loads_are_misses_page_by_page(sglang, pool, monkeypatch):
    faulty = served_by(monkeypatch, Faulty(MemoryBackend()))
    want, names = content(pool, range(4)), keys("loads", 4)
    with Rank(pool, "memory://", self_test=False, retries=0) as rank:
        assert rank.put(names, range(4)) == 4
        faulty.script(Op.LOAD, [0, 0, Status.CHECKSUM, Status.TIMEOUT])
        assert rank.get(names, range(8, 12)) == 2
        assert content(pool, [8, 9]) == want[:2]
        faulty.script(Op.LOAD, UnavailableError("gone"))
        assert rank.get(names, range(8, 12)) == 0
        faulty.script_exists(UnavailableError("gone"))
        assert rank.exists(names) == 0
        assert rank.get(names, range(8, 12)) == 4


def flip(url, path, data):
    """Change one byte of the stored object that holds `data`."""
    if path is None:
        store = kvconnect.open(url).objects
        with store.lock:
            (found,) = [o for o in store.objects.values() if data in o.data]
            at = found.data.index(data) + len(data) // 2
            found.data = found.data[:at] + bytes([found.data[at] ^ 1]) + found.data[at + 1 :]
        return
    for slab in path.glob("slab-*"):
        whole = slab.read_bytes()
        at = whole.find(data)
        if at >= 0:
            at += len(data) // 2
            with slab.open("r+b") as file:
                file.seek(at)
                file.write(bytes([whole[at] ^ 1]))
            return
    raise AssertionError("the page is in no slab")


@pytest.mark.parametrize("store", ["memory", "nvme"])
@pytest.mark.parametrize("settings", [{}, {"lcm": 2}, {"interface": 0}])
def test_a_damaged_page_is_a_miss_and_heals(sglang, pool, url, tmp_path, store, settings):
    path = tmp_path if store == "nvme" else None
    url = f"nvme://{tmp_path}?capacity=16MiB" if path else url
    want, names = content(pool, range(6)), keys("damage", 6)
    with Rank(pool, url, **settings) as rank:
        assert rank.put(names, range(6)) == 6
        assert rank.exists(names) == 6
        # The last layer of a slot of one head is in one piece whatever the order in the store.
        flip(url, path, buffers(pool)[0][3].numpy().reshape(-1)[:32].tobytes())
        assert rank.get(names, range(8, 14)) == 3
        assert content(pool, range(8, 11)) == want[:3]
        assert rank.exists(names) == 3, "a page that was found damaged is still said to be there"
        assert rank.put(names, range(6)) == 6
        assert rank.exists(names) == 6, "the page that was stored again is not found"
        assert rank.get(names, range(8, 14)) == 6
        assert content(pool, range(8, 14)) == want


def test_two_clients_at_once(sglang, pool, tmp_path):
    """A writer and two readers that ask at all times: what is loaded is what was stored."""
    url = f"nvme://{tmp_path}?capacity=64MiB"
    second = pools.mha(sglang, "page_first", pages=16)
    want, wrong, loaded = content(pool, range(4)), [], []
    with Rank(pool, url) as one, Rank(second, url) as two:

        def read(rank, names, stop):
            while True:
                last = stop.is_set()
                count = rank.exists(names)
                got = rank.get(names[:count], range(8, 8 + count)) if count else 0
                loaded.append(got)
                if content(rank.pool, range(8, 8 + got)) != want[:got]:
                    wrong.append((names, got))
                if last:
                    return

        for turn in range(12):
            names, stop = keys(f"turn{turn}", 4), threading.Event()
            readers = [threading.Thread(target=read, args=(r, names, stop)) for r in (one, two)]
            for reader in readers:
                reader.start()
            assert one.put(names, range(4)) == 4
            stop.set()
            for reader in readers:
                reader.join(30)
                assert not reader.is_alive()
    assert not wrong
    assert loaded.count(4) >= 24, "after the last store every reader finds every page"


def test_the_engines_own_threads(sglang, pool, url):
    """Backup, hit query and prefetch through the controller's threads and queues."""
    want, names = content(pool, range(4)), keys("threads", 4)
    with Rank(pool, url, threads=True) as rank:
        controller = rank._controller
        count = 4 * pool.page_size
        controller.write_storage(tokens(pool, range(4)), [0] * count, hash_value=names)
        done = controller.ack_backup_queue.get(timeout=20)
        assert done.completed_tokens == count
        operation = engine().controller.PrefetchOperation("request", [0] * count)
        operation.hash_value = names
        operation.host_indices = tokens(pool, range(8, 12))
        controller.prefetch_buffer.put(operation)
        ack = controller.ack_prefetch_queue.get(timeout=20)
        assert ack.completed_tokens == count
        assert content(pool, range(8, 12)) == want
