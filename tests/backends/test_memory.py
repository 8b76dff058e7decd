"""The reference backend against the conformance suite, and what only it promises."""

import gc
import itertools
import threading

import pytest
from hypothesis import settings

import kvconnect
from kvconnect.backend import Backend, Op, Status
from kvconnect.errors import ConfigError, RegistrationError
from kvconnect.memory import MemoryBackend, ObjectStore, open_backend
from kvconnect.testing.machine import backend_machine
from kvconnect.testing.memory import Objects
from kvconnect.testing.suite import BackendSuite, key, keys, move
from kvconnect.testing.suite.base import content, expect, filled, get, put, stored


class Clock:
    """Seconds that pass when told, or by `step` at every look."""

    def __init__(self, step=0.0):
        self.now, self.step = 100.0, step

    def __call__(self):
        self.now += self.step
        return self.now


class TestMemory(BackendSuite):
    durable = True  # memory://NAME lives as long as the process
    corruptible = True
    bounded = True

    def open_store(self, path):
        store = open_backend(str(path), {})
        self.clock = store.objects._clock = Clock()
        return store

    def open_small(self, path):
        return open_backend(str(path), {"capacity": "64KiB"})

    def corrupt(self, store, path, name, data):
        found = store.objects.objects[name]
        assert found.data == data
        found.data = data[:-1] + bytes([data[-1] ^ 1])

    def pass_time(self, store, seconds):
        self.clock.now += seconds


numbers = itertools.count()


def open_machine_store():
    name = f"machine{next(numbers)}"
    return lambda: open_backend(name, {})


TestMachine = backend_machine(open_machine_store, durable=True).TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_urls_open_it(tmp_path):
    with kvconnect.open("memory://") as own, kvconnect.open("memory://") as other:
        assert isinstance(own, MemoryBackend)
        put(own, keys(1), [8])
        assert not other.exists(keys(1), [8]).any()
    url = f"memory://{tmp_path.name}"
    with kvconnect.open(url) as one, kvconnect.open(url) as two:
        put(one, keys(1), [8])
        stored(two, keys(1), [8])


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"capacty": "1GiB"}, "capacity"),
        ({"capacity": "many"}, "many"),
        ({"capacity": "0"}, "at least 1 B"),
        ({"deadline": "0"}, "above 0"),
        ({"deadline": "inf"}, "finite"),
        ({"deadline": "nan"}, "finite"),
    ],
)
def test_wrong_options_are_named(options, word):
    with pytest.raises(ConfigError, match=word):
        open_backend("", options)


def test_one_name_has_one_capacity(tmp_path):
    with open_backend(str(tmp_path), {"capacity": "1MiB"}):
        open_backend(str(tmp_path), {}).close()
        open_backend(str(tmp_path), {"capacity": "1048576"}).close()
        with pytest.raises(ConfigError, match="1048576 B"):
            open_backend(str(tmp_path), {"capacity": "2MiB"})


def test_submit_returns_before_a_byte_moves():
    with MemoryBackend() as store:
        held = filled([[64]], keys(1))
        with store.register([held.region]):
            with store.objects.lock:  # the worker thread cannot get at the store
                transfer = store.submit(held.batch(Op.STORE, keys(1)))
                early = transfer.wait(0.01)
                assert not transfer.done()
                expect(early, Status.TIMEOUT)
            expect(transfer.wait(10), Status.OK)


def test_distinct_keys_are_demanded():
    with MemoryBackend() as store:
        held = Objects([[8], [8]])
        with store.register([held.region]), pytest.raises(ConfigError, match="distinct"):
            store.submit(held.batch(Op.LOAD, [key(1), key(1)]))


def test_swapped_objects_are_misses():
    with MemoryBackend() as store:  # case 29
        names = keys(2)
        put(store, names, [64, 64])
        first, second = (store.objects.objects[name] for name in names)
        first.data, second.data = second.data, first.data
        first.checksum, second.checksum = second.checksum, first.checksum
        outcome, held = get(store, names, [64, 64])
        expect(outcome, Status.CHECKSUM, Status.CHECKSUM)
        assert held.buffer.canaries().all()


def test_a_lease_that_ends_during_the_load_is_a_miss():
    # Case 20: the clock moves 2 s at every look, so the object is there and then is not.
    clock = Clock()
    with MemoryBackend(ObjectStore(clock=clock)) as store:
        held = filled([[64]], keys(1))
        with store.register([held.region]):
            move(store, held.batch(Op.STORE, keys(1), ttl=3.0))
        clock.step = 2.0
        outcome, _ = get(store, keys(1), [64])
        expect(outcome, Status.LEASE_EXPIRED)
        assert outcome.nbytes == 0
        assert outcome.dirty.tolist() == [True]


def test_the_same_bytes_again_keep_the_later_expiry_and_the_pin():
    clock = Clock()
    objects = ObjectStore(clock=clock)
    assert objects.put("k", b"x", ttl=10, pin=True) is Status.OK
    assert objects.put("k", b"x", ttl=1) is Status.OK
    clock.now += 5
    assert objects.find("k").pinned
    assert objects.put("k", b"x") is Status.OK
    clock.now += 1e9
    assert objects.find("k") is not None


def test_least_recently_used_goes_first():
    objects = ObjectStore(capacity=30)
    for name in "abc":
        objects.put(name, name.encode() * 10)
    objects.touch("a")
    objects.put("d", b"d" * 11)
    assert objects.keys() == ["a", "d"], "b and c had to go for 11 bytes"
    assert objects.used == 21
    assert objects.stats()["evicted"] == 2


def test_no_space_changes_nothing():
    objects = ObjectStore(capacity=30)
    objects.put("pinned", b"p" * 20, pin=True)
    objects.put("other", b"o" * 10)
    assert objects.put("new", b"n" * 11) is Status.NO_SPACE
    assert objects.put("other", b"n" * 11) is Status.NO_SPACE
    assert objects.keys() == ["other", "pinned"]
    assert objects.find("other").data == b"o" * 10
    assert objects.used == 30


def test_the_expired_make_room_before_the_living():
    clock = Clock()
    objects = ObjectStore(capacity=30, clock=clock)
    objects.put("old", b"o" * 15)
    objects.put("short", b"s" * 15, ttl=1)
    clock.now += 2
    assert objects.put("new", b"n" * 15) is Status.OK
    assert objects.keys() == ["new", "old"]
    assert objects.stats()["expired"] == 1


def test_a_batch_does_not_evict_itself():
    with open_backend("", {"capacity": "10KiB"}) as store:
        put(store, [key("before")], [4096])
        outcome = put(store, keys(4), [4096] * 4)
        expect(outcome, Status.OK, Status.OK, Status.NO_SPACE, Status.NO_SPACE)
        assert "do not fit" in outcome.causes[2]
        stored(store, keys(2), [4096] * 2)
        assert not store.exists([key("before")], [4096]).any()


def test_device_memory_is_refused_by_name():
    from kvconnect.region import Region

    with MemoryBackend() as store, pytest.raises(RegistrationError, match="cuda:0"):
        store.register([Region("gpu", 1 << 30, 4096, "cuda:0")])


def test_a_closed_registration_in_one_thread_keeps_the_other(tmp_path):
    with MemoryBackend() as store:
        held = filled([[64]] * 8, keys(8))
        outer = store.register([held.region])

        def churn():
            for _ in range(200):
                store.register([held.region]).close()

        thread = threading.Thread(target=churn)
        thread.start()
        for _ in range(200):
            assert move(store, held.batch(Op.STORE, keys(8))).prefix == 8
        thread.join(30)
        outer.close()
        assert not store._registrations.regions


def test_a_forgotten_backend_leaves_no_thread():
    store = MemoryBackend()
    worker = store._worker
    del store
    gc.collect()
    worker.join(5)
    assert not worker.is_alive()


def test_reprs_tell_the_state():
    with MemoryBackend(ObjectStore(capacity=100)) as store:
        assert isinstance(store, Backend)
        put(store, keys(1), [40])
        assert repr(store) == "MemoryBackend(ObjectStore(1 objects, 40 of 100 B))"
        held = Objects([[8]])
        with store.register([held.region]) as registration:
            assert repr(registration).endswith("open)")
            transfer = store.submit(held.batch(Op.LOAD, keys(1)))
            transfer.wait(5)
            assert repr(transfer) == "Transfer(load, 1 keys, done)"
        assert repr(registration).endswith("closed)")
    assert repr(store).endswith("closed)")


def test_content_depends_on_name_size_and_version():
    assert len({content("a", 8), content("b", 8), content("a", 8, "1")}) == 3
