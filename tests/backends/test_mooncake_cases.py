"""Mooncake: what its return codes hide must never become a hit, nor a store that is none."""

import threading
import time

import numpy as np
import pytest

from kvconnect.backend import Op, Status
from kvconnect.errors import (
    BackendError,
    CapabilityError,
    ConfigError,
    RegistrationError,
    UnavailableError,
)
from kvconnect.testing.memory import GuardedBuffer, Objects
from kvconnect.testing.suite import key, keys
from kvconnect.testing.suite.base import content, expect, filled, get, move, put, stored
from kvconnect_mooncake.breakers import Breakers
from kvconnect_mooncake.client import Client
from kvconnect_mooncake.foreign import Code
from kvconnect_mooncake.quiet import Rule

from .mooncake_master import Master, opened, wait_for

MIB = 1 << 20


@pytest.fixture(scope="module")
def master(tmp_path_factory):
    with Master(tmp_path_factory.mktemp("master")) as one:
        one.owner(64)
        yield one


@pytest.fixture(scope="module")
def shared(master):
    """One client for the tests that only differ in keys."""
    with opened(master) as store:
        yield store


@pytest.fixture
def raw(shared):
    """The library's own client, to do what kvconnect would not."""
    return shared.core.client._store


@pytest.fixture
def names(shared, request):
    return lambda count: keys(count, request.node.name)


@pytest.fixture
def impatient(shared):
    """Hold memory for a third of the time: these transfers fail in name only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared.core.keeper, "rule", Rule(256, 4, 1.0))
        yield


def raw_put(shared, name, data):
    """Put bytes under the store's name of a key, past kvconnect."""
    assert shared.core.client._store.put(shared.core.names.name(name), data) == 0


def test_a_short_object_is_a_miss(shared, names):
    (name,) = names(1)
    raw_put(shared, name, content(name, 100))
    assert not shared.exists([name], [2304]).any()
    outcome, held = get(shared, [name], [2304])
    expect(outcome, Status.SIZE_MISMATCH)
    assert held.untouched(0)


def test_a_foreign_object_is_a_miss_and_heals(shared, names):
    (name,) = names(1)
    raw_put(shared, name, bytes(2304 + 40))  # the right size, nobody's trailer
    outcome, _ = get(shared, [name], [2304])
    expect(outcome, Status.CHECKSUM)
    expect(put(shared, [name], [2304]), Status.OK)
    stored(shared, [name], [2304])


def test_swapped_objects_are_misses(shared, raw, names):
    one, other = names(2)
    put(shared, [one, other], [2304] * 2)
    data = [raw.get(shared.core.names.name(name)) for name in (one, other)]
    assert data[0][:2304] == content(one, 2304)
    raw.upsert(shared.core.names.name(one), data[1])
    outcome, _ = get(shared, [one, other], [2304] * 2)
    expect(outcome, Status.IDENTITY, Status.OK)
    outcome, _ = get(shared, [one], [2304])
    expect(outcome, Status.ABSENT)


def test_existing_bytes_are_not_believed(shared, names):
    # The library answers success to a put of a key that exists, and keeps the old bytes.
    (name,) = names(1)
    raw_put(shared, name, bytes(2304 + 40))
    expect(put(shared, [name], [2304], "mine"), Status.OK)
    stored(shared, [name], [2304], "mine")


def test_another_writer_has_the_key_open(master, shared, names):
    (name,) = names(1)
    with opened(master) as other:
        module = other.core.client._module
        full = other.core.names.name(name)
        begun = other.core.client._store.batch_put_session_start(
            [full], [99], module.ReplicateConfig()
        )
        assert begun == [0]
        begin = time.monotonic()
        expect(put(shared, [name], [2304]), Status.OK)
        # Discarded by the master three seconds after it began, and not reported OK before.
        assert time.monotonic() - begin > 1
        stored(shared, [name], [2304])


def test_a_lease_that_runs_out(master, names):
    (name,) = names(1)
    with opened(master, lease="0.001") as store:
        put(store, [name], [8 * MIB])
        outcome, _ = get(store, [name], [8 * MIB])
        expect(outcome, Status.LEASE_EXPIRED)
        assert outcome.dirty.all()
        assert store.capabilities.lease_seconds == 0.001


def test_no_space_is_tried_again(tmp_path):
    # Full of what may be evicted: the library refuses the first put and makes room meanwhile.
    with Master(tmp_path / "small") as small:
        small.owner(16)
        with opened(small, space_wait="3") as store:
            for number in range(10):
                expect(put(store, [key(number)], [4 * MIB]), Status.OK)
            expect(put(store, [key("huge")], [32 * MIB]), Status.NO_SPACE)


def test_more_entries_than_the_library_takes(shared, names):
    # 3000 objects of three runs and a trailer are 12 000 entries; the library fails at 2050.
    some = names(3000)
    source, target = Objects([[16, 16, 16]] * 3000), Objects([[48]] * 3000)
    for index, name in enumerate(some):
        source.write(index, content(name, 48))
    with shared.register([source.region, target.region]):
        assert move(shared, source.batch(Op.STORE, some)).prefix == 3000
        assert move(shared, target.batch(Op.LOAD, some)).prefix == 3000
    assert all(target.read(i) == content(name, 48) for i, name in enumerate(some))
    assert shared.core.budget.used == 0
    assert shared.core.slots.used == 0


def test_unregistered_memory_is_refused(shared, names):
    held = Objects([[64]])  # the library over TCP would move it
    for op in Op:
        with pytest.raises(RegistrationError, match="register the whole pool"):
            shared.submit(held.batch(op, names(1)))


@pytest.mark.parametrize("answer", [[1024], [0], [-600], [-704], [None], [], [2344, 2344], None])
def test_answers_that_are_no_hit(shared, names, answer, monkeypatch, impatient):
    # Case 6: a store that answers anything but exactly the object's size.
    (name,) = names(1)
    put(shared, [name], [2304])
    client = shared.core.client

    class Answering:
        def __getattr__(self, call):
            if call == "batch_get_into_multi_buffers":
                return lambda *a: answer
            return getattr(real, call)

    real = client._store
    monkeypatch.setattr(client, "_store", Answering())
    outcome, _ = get_quiet(shared, [name], [2304])
    monkeypatch.undo()
    assert not outcome.ok.any()
    wait_for(lambda: shared.core.breakers.open() == [] or heal(shared))
    stored(shared, [name], [2304])


def heal(store):
    for name in store.core.breakers.open():
        store.core.breakers.heal(name)
    return True


def get_quiet(store, some, sizes):
    """Load; wait until the memory is free again, however long after the answer."""
    held = Objects([[size] for size in sizes])
    with store.register([held.region]):
        transfer = store.submit(held.batch(Op.LOAD, some))
        outcome = transfer.wait(20)
        wait_for(transfer.done, 30, "quiet")
    return outcome, held


@pytest.mark.parametrize("code", [-800, -5])
def test_failed_transfers_are_held_until_quiet(shared, names, code, monkeypatch, impatient):
    # A key that fails may have entries that go on: statuses at once, memory later.
    (name,) = names(1)
    put(shared, [name], [2304])
    client, real = shared.core.client, shared.core.client._store

    class Failing:
        def __getattr__(self, call):
            if call == "batch_get_into_multi_buffers":
                return lambda *a: [code]
            return getattr(real, call)

    monkeypatch.setattr(client, "_store", Failing())
    held = Objects([[2304]])
    registration = shared.register([held.region])
    begin = time.monotonic()
    transfer = shared.submit(held.batch(Op.LOAD, [name]))
    expect(transfer.wait(5), Status.BACKEND_ERROR)
    assert time.monotonic() - begin < 2
    monkeypatch.undo()
    assert not transfer.done()
    numbers = shared.stats()
    assert (numbers["quarantine_chunks"], numbers["quarantine_bytes"]) == (1, 2304)
    assert numbers["side_used_bytes"] == 64
    wait_for(transfer.done, 20, "quiet")
    assert time.monotonic() - begin > shared.core.keeper.rule.settle
    registration.close()
    heal(shared)
    wait_for(lambda: shared.stats()["side_used_bytes"] == 0)
    stored(shared, [name], [2304])


def test_a_failed_store_is_not_visible(shared, names, monkeypatch, impatient):
    # Case 18: one of seven fails; the others are stored, it is not, and can be later.
    some = names(7)
    client, real = shared.core.client, shared.core.client._store

    class Failing:
        def __getattr__(self, call):
            found = getattr(real, call)
            if call != "batch_put_from_multi_buffer_ranges":
                return found
            return lambda *a: [-800 if i == 5 else n for i, n in enumerate(found(*a))]

    held = filled([[2304]] * 7, some)
    with shared.register([held.region]):
        monkeypatch.setattr(client, "_store", Failing())
        transfer = shared.submit(held.batch(Op.STORE, some))
        outcome = transfer.wait(10)
        monkeypatch.undo()
        assert outcome.ok.tolist() == [True] * 5 + [False, True]
        assert outcome.prefix == 5
        heal(shared)
        assert shared.exists(some, [2304] * 7).tolist() == outcome.ok.tolist()
        wait_for(transfer.done, 20, "quiet")
    wait_for(lambda: not shared.core.claims.held, 5, "the put to be given up")
    expect(put(shared, some, [2304] * 7), *[Status.OK] * 7)
    stored(shared, some, [2304] * 7)


def test_without_checksums(tmp_path, names):
    # No trailer: what exists is replaced, as nothing proves that it is the same.
    some = names(2)
    with (
        Master(tmp_path / "leases", lease=1.0) as master,
        opened(master, checksum="false") as plain,
    ):
        master.owner()
        for version in ("a", "b"):
            expect(put(plain, some, [2304] * 2, version), Status.OK, Status.OK)
            stored(plain, some, [2304] * 2, version)
        held = filled([[64]], some[:1])
        with plain.register([held.region]), pytest.raises(CapabilityError, match="ttl"):
            plain.submit(held.batch(Op.STORE, some[:1], ttl=1.0))
        assert plain.exists(some, [2304] * 2).all()  # takes a lease, which clear waits out
        assert plain.clear(some[0][:16]) == 2
        assert plain.list_keys(some[0][:16]) == []


def test_a_longer_life_is_stored(shared, names):
    # The same bytes with a later expiry, or pinned, are not the same object.
    (name,) = names(1)
    for ttl, pin in ((0.7, False), (60.0, False), (None, True)):
        held = filled([[2304]], [name])
        with shared.register([held.region]):
            expect(move(shared, held.batch(Op.STORE, [name], ttl=ttl, pin=pin)), Status.OK)
    time.sleep(0.8)
    stored(shared, [name], [2304])


def test_pages_of_one_group_and_soft_pins(master, names):
    some = names(4)
    with opened(master, group="page", soft_pin="5", replicas="2", prefer="nobody") as store:
        expect(put(store, some, [2304] * 4), *[Status.OK] * 4)
        stored(store, some, [2304] * 4)


def test_the_library_registers_once(shared):
    # Twice would be -600: two handles on one region are one registration there.
    buffer = GuardedBuffer(1 << 16)
    before = shared.stats()["registered_bytes"]
    with shared.register([buffer.region]), shared.register([buffer.region]):
        assert shared.stats()["registered_bytes"] == before + (1 << 16)
    assert shared.stats()["registered_bytes"] == before


def test_two_threads_store_the_same_key(shared, names):
    (name,) = names(1)
    versions, errors = [str(n) for n in range(4)], []

    def write(version):
        try:
            for _ in range(5):
                expect(put(shared, [name], [MIB], version), Status.OK)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=write, args=(v,), daemon=True) for v in versions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    outcome, held = get(shared, [name], [MIB])
    assert outcome.prefix == 1
    assert held.read(0) in [content(name, MIB, version) for version in versions]


@pytest.mark.parametrize("bad", ["", "x" * 257, "a\nb"])
def test_impossible_keys(shared, bad):
    with pytest.raises(ConfigError, match="key"):
        shared.exists([bad], [1])


def test_breakers():
    now = [0.0]
    one = Breakers(10.0, lambda: now[0])
    assert one.passes("a")
    one.trip("a")
    assert not one.passes("a")
    assert one.passes("b")
    assert one.tripped(["a"])
    assert not one.tripped(["a", "b"])
    now[0] = 10.0
    assert one.passes("a"), "one call tries"
    assert not one.passes("a"), "and only one"
    one.heal("a")
    assert one.passes("a")
    assert one.passes("a")
    assert one.open() == []


def test_codes_of_a_lost_master_open_its_breaker():
    class Lost:
        def batch_is_exist(self, keys):
            return [int(Code.RPC_FAILED)] * len(keys)

    client = Client.__new__(Client)
    client._store, client.breakers = Lost(), Breakers(10.0)
    with pytest.raises(UnavailableError, match="-900"):
        client.find(["a"])
    with pytest.raises(BackendError, match="asked again every 10 s"):
        client.find(["a"])


def test_stats_say_what_is_held(shared, names):
    put(shared, names(2), [2304] * 2)
    numbers = shared.stats()
    assert numbers["entries_used"] == numbers["quarantine_chunks"] == 0
    assert numbers["put.bytes"] >= 2 * 2304
    assert numbers["breakers_open"] == "none"
    assert np.isclose(numbers["side_bytes"], 256 << 10)
