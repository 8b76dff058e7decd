"""Wrappers are backends: the suite runs on them, and each does the one thing it is for."""

import inspect
import threading
import time

import pytest

from kvconnect import backend as protocols
from kvconnect.backend import Op, Status
from kvconnect.errors import (
    ClosedError,
    ConfigError,
    RegistrationError,
    TransferTimeoutError,
    UnavailableError,
)
from kvconnect.memory import MemoryBackend, open_backend
from kvconnect.region import Region
from kvconnect.testing.memory import GuardedBuffer, Objects
from kvconnect.testing.suite import BackendSuite, keys
from kvconnect.testing.suite.base import content, expect, filled, get, put, stored
from kvconnect.wrappers import Delayed, Faulty, Lie, Limited, Metered, Wrapper
from kvconnect.wrappers.base import OPTIONAL, members

ALL = [Wrapper, Metered, Limited, Delayed, Faulty]


class Wrapped(BackendSuite):
    """The suite on `memory://NAME` inside a wrapper."""

    durable = True
    bounded = True
    rounds = 200
    many = 2000

    def wrap(self, inner):
        raise NotImplementedError

    def open_store(self, path):
        return self.wrap(open_backend(str(path), {}))

    def open_small(self, path):
        return self.wrap(open_backend(str(path), {"capacity": "64KiB"}))

    def pass_time(self, store, seconds):
        objects = store.inner.objects
        now = objects._clock() + seconds
        objects._clock = lambda: now


class TestMetered(Wrapped):
    def wrap(self, inner):
        return Metered(inner)


class TestFaultlessFaulty(Wrapped):
    def wrap(self, inner):
        return Faulty(inner)


class TestDelayed(Wrapped):
    def wrap(self, inner):
        return Delayed(inner, (0.0, 0.002), seed=7)


class TestLimited(Wrapped):
    def wrap(self, inner):
        return Limited(inner, max_in_flight_bytes=5000, max_keys_per_batch=3)


class TestAllAtOnce(Wrapped):
    def wrap(self, inner):
        metered = Metered(Limited(Delayed(inner), max_keys_per_batch=50))
        metered.objects = inner.objects
        return metered

    def pass_time(self, store, seconds):
        now = store.objects._clock() + seconds
        store.objects._clock = lambda: now


# Forwarding


class Bare:
    """A backend with the core methods only, which notes every call."""

    name = "bare"
    capabilities = protocols.Capabilities(alignment=512)

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):  # register, exists, submit, close
        if name not in {"register", "exists", "submit", "close"}:
            raise AttributeError(name)
        return lambda *args: self.calls.append((name, *args))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def with_abilities(*abilities):
    """A bare backend that also has the methods of these protocols, and notes the calls."""
    inner = Bare()
    for ability in abilities:
        for name in members(ability):
            setattr(inner, name, lambda *args, name=name: inner.calls.append((name, *args)) or name)
    return inner


def test_the_table_of_protocols_is_complete():
    assert set(OPTIONAL) == {v for n, v in vars(protocols).items() if n.startswith("Supports")}


@pytest.mark.parametrize("ability", OPTIONAL, ids=lambda a: a.__name__)
@pytest.mark.parametrize("wrapper", ALL)
def test_abilities_are_those_of_the_inner_backend(wrapper, ability):
    outer = wrapper(with_abilities(ability))
    for other in OPTIONAL:
        own = wrapper is Metered and other is protocols.SupportsStats
        assert isinstance(outer, other) == (other is ability or own)
        # What isinstance looks at from Python 3.12 on: no __getattr__ there.
        static = all(inspect.getattr_static(outer, n, None) is not None for n in members(other))
        assert static == (other is ability or own)


@pytest.mark.parametrize("wrapper", ALL)
def test_every_optional_method_is_forwarded(wrapper):
    inner = with_abilities(*OPTIONAL)
    outer = wrapper(inner)
    for ability in OPTIONAL:
        for name in members(ability):
            if (wrapper, name) == (Metered, "stats"):
                continue
            arguments = [object() for _ in inspect.signature(getattr(ability, name)).parameters][1:]
            assert getattr(outer, name)(*arguments) == name
            assert inner.calls[-1] == (name, *arguments)


@pytest.mark.parametrize("wrapper", ALL)
def test_the_core_is_forwarded(wrapper):
    inner = MemoryBackend()
    outer = wrapper(inner)
    assert isinstance(outer, protocols.Backend)
    assert outer.name == f"{wrapper.__name__.lower()}(memory)"
    assert repr(outer) == f"{wrapper.__name__}({inner!r})"
    assert outer.capabilities is inner.capabilities
    outer.close()
    with pytest.raises(ClosedError):
        inner.exists([], [])


# Delayed


def test_the_gate_holds_the_bytes_and_the_lease():
    with Delayed(MemoryBackend()) as store:
        names, sizes = keys(2), [2304] * 2
        held = filled([[2304]] * 2, names)
        with store.register([held.region]):
            with store.held():
                transfer = store.submit(held.batch(Op.STORE, names))
                expect(transfer.wait(0.02), Status.TIMEOUT, Status.TIMEOUT)
                assert not transfer.done()
                assert store.waiting == 1
                assert not store.exists(names, sizes).any()
            assert transfer.wait(5).prefix == 2
        assert store.waiting == 0
        stored(store, names, sizes)


def test_a_late_load_overwrites_memory_that_was_reused_too_soon():
    with Delayed(MemoryBackend(), obeys_cancel=False) as store:
        put(store, keys(1), [2304])
        target = Objects([[2304]])
        with store.register([target.region]):
            store.hold()
            transfer = store.submit(target.batch(Op.LOAD, keys(1)))
            early = transfer.wait(0.01)
            transfer.cancel()
            assert early.dirty.all()
            target.write(0, bytes(2304))
            time.sleep(0.02)
            assert not transfer.done(), "a stubborn transport does not hear cancel"
            store.release()
            transfer.wait(5)
        assert target.read(0) == content(keys(1)[0], 2304)


def test_cancel_ends_a_held_transfer():
    with Delayed(MemoryBackend()) as store:
        held = filled([[64]], keys(1))
        with store.register([held.region]), store.held():
            transfer = store.submit(held.batch(Op.STORE, keys(1)))
            transfer.cancel()
            expect(transfer.wait(5), Status.CANCELLED)
            assert transfer.done()
        assert not store.exists(keys(1), [64]).any()


def test_a_held_transfer_times_out_and_close_ends_it():
    with Delayed(MemoryBackend(), deadline=0.05) as store:
        held = filled([[64]], keys(1))
        with store.register([held.region]), store.held():
            expect(store.submit(held.batch(Op.STORE, keys(1))).wait(5), Status.TIMEOUT)
    store = Delayed(MemoryBackend(), obeys_cancel=False)
    registration = store.register([held.region])
    store.hold()
    transfer = store.submit(held.batch(Op.STORE, keys(1)))
    store.close()
    expect(transfer.wait(0), Status.CANCELLED)
    registration.close()


def test_closing_a_registration_under_a_held_transfer_is_refused():
    with Delayed(MemoryBackend(), deadline=0.05, obeys_cancel=False) as store:
        held = filled([[64]], keys(1))
        registration = store.register([held.region])
        store.deadline = 5.0
        with store.held():
            transfer = store.submit(held.batch(Op.STORE, keys(1)))
            store.deadline = 0.05
            with pytest.raises(TransferTimeoutError, match="still leased"):
                registration.close()
            assert not transfer.done()
        transfer.wait(5)
        registration.close()


# Limited


class Watcher(Wrapper):
    """Notes the largest batch, and the most bytes that were under way at once."""

    def __init__(self, inner):
        super().__init__(inner)
        self.batches, self.most, self.now, self.asked = [], 0, [], []

    def exists(self, names, nbytes):
        self.asked.append(len(names))
        return super().exists(names, nbytes)

    def submit(self, batch):
        self.now = [(t, n) for t, n in self.now if not t.done()]
        transfer = super().submit(batch)
        self.now.append((transfer, int(batch.nbytes.sum())))
        self.most = max(self.most, sum(n for _, n in self.now))
        self.batches.append(len(batch))
        return transfer


def test_limits_hold():
    delayed = Delayed(MemoryBackend(), (0.001, 0.003))
    watcher = Watcher(delayed)
    with Limited(watcher, max_in_flight_bytes=2500, max_keys_per_batch=4) as store:
        names, sizes = keys(30), [1000] * 29 + [9000]
        held = filled([[size] for size in sizes], names)
        with store.register([held.region]):
            parts = [range(at, at + 10) for at in range(0, 30, 10)]
            moving = [
                store.submit(held.batch(Op.STORE, [names[i] for i in part], part)) for part in parts
            ]
            assert all(transfer.wait(10).prefix == 10 for transfer in moving)
        assert max(watcher.batches) == 2, "2500 B hold two objects"
        assert watcher.most == 9000, "the large one went alone"
        assert store.in_flight_bytes == 0
        watcher.most = 0
        put(store, names[:12], [100] * 12, "small")
        assert max(watcher.batches) == 4
        assert watcher.most <= 2500
        assert store.exists(names[:12], [100] * 12).all()
        assert watcher.asked == [4, 4, 4]
        stored(store, names[:12], [100] * 12, "small")


def test_limited_reports_by_key_across_pieces():
    faulty = Faulty(MemoryBackend())
    with Limited(faulty, max_keys_per_batch=2) as store:
        steps = [[0, Status.BACKEND_ERROR], UnavailableError("gone"), Lie.TOO_FEW]
        faulty.script(Op.STORE, *steps)
        outcome = put(store, keys(7), [64] * 7)
        bad = Status.BACKEND_ERROR
        expect(outcome, Status.OK, bad, bad, bad, bad, bad, Status.OK)
        assert outcome.nbytes == 128
        assert outcome.causes[1] == "injected"
        assert "gone" in outcome.causes[3]
        assert "1 results for 2 keys" in outcome.causes[5]


@pytest.mark.parametrize("field", ["max_in_flight_bytes", "max_keys_per_batch"])
def test_limits_must_be_positive(field):
    with MemoryBackend() as inner, pytest.raises(ConfigError, match=f"{field}=0"):
        Limited(inner, **{field: 0})


# Metered


def test_a_failed_batch_has_no_bytes_and_no_rate():
    ticks = iter(range(1000))  # case 27
    faulty = Faulty(MemoryBackend())
    with Metered(faulty, clock=lambda: float(next(ticks))) as store:
        faulty.script(Op.STORE, [Status.BACKEND_ERROR] * 3, Lie.TOO_FEW)
        put(store, keys(3), [1000] * 3)
        held = filled([[1000]] * 3, keys(3))
        with store.register([held.region]):
            store.submit(held.batch(Op.STORE, keys(3))).wait(5)
        stats = store.stats()
        assert stats["metered.store.backend_error"] == 6
        assert stats["metered.store.calls"] == 2
        assert not {n for n in stats if n in {"metered.store.bytes", "metered.store.rate"}}
        put(store, keys(3), [1000] * 3)
        assert store.stats()["metered.store.bytes"] == 3000
        assert store.stats()["metered.store.rate"] == 3000.0, "one second, by this clock"


def test_counters_by_reason():
    with Metered(MemoryBackend()) as store:
        put(store, keys(2), [100, 200])
        get(store, keys(3), [100, 201, 300])
        store.exists(keys(3), [100, 200, 300])
        held = Objects([[8]])
        with pytest.raises(RegistrationError):
            store.submit(held.batch(Op.LOAD, keys(1)))
        stats = store.stats()
        wanted = {
            "store.ok": 2,
            "store.bytes": 300,
            "load.ok": 1,
            "load.size_mismatch": 1,
            "load.absent": 1,
            "load.bytes": 100,
            "load.calls": 1,
            "exists.calls": 1,
            "exists.keys": 3,
            "exists.hits": 2,
            "load.submit.RegistrationError": 1,
        }
        assert {name: stats[f"metered.{name}"] for name in wanted} == wanted
        assert stats["objects"] == 2, "the inner stats are there too"


def test_an_outcome_counts_once():
    delayed = Delayed(MemoryBackend())
    with Metered(delayed) as store:
        held = filled([[64]], keys(1))
        with store.register([held.region]):
            with delayed.held():
                transfer = store.submit(held.batch(Op.STORE, keys(1)))
                transfer.wait(0.01)
            transfer.wait(5)
            transfer.wait(5)
        stats = store.stats()
        assert stats["metered.store.timeout"] == stats["metered.store.calls"] == 1
        assert "metered.store.ok" not in stats, "the caller was told of a time-out"


@pytest.mark.parametrize("wrapper", [Limited, Delayed])
def test_threads_end(wrapper):
    before = threading.active_count()
    with wrapper(MemoryBackend()) as store:
        put(store, keys(20), [64] * 20)
    end = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.005)
    assert threading.active_count() <= before


def test_a_region_that_overlaps_is_not_left_with_the_inner_backend():
    with Limited(MemoryBackend()) as store:
        buffer = GuardedBuffer(8192)
        part = Region("part", buffer.region.address + 8, 8)
        with store.register([buffer.region]):
            with pytest.raises(RegistrationError):
                store.register([part])
            assert store.inner._registrations.regions == (buffer.region,)
        assert not store.inner._registrations.regions
