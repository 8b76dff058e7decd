"""A store that is stuck in Mooncake holds up its own keys and nobody else's."""

import os
import threading
import time

import pytest

from kvconnect.backend import Op, Status
from kvconnect.testing.suite import keys
from kvconnect.testing.suite.base import expect, filled, put, stored
from kvconnect_mooncake.breakers import STORES, Breakers
from kvconnect_mooncake.claims import Claim, Claims
from kvconnect_mooncake.workers import MOST_TIMES, Workers

from .mooncake_master import Master, opened, wait_for

MIB = 1 << 20
MINE, BUSY, STUCK = Claim.MINE, Claim.BUSY, Claim.STUCK


@pytest.fixture
def master(tmp_path):
    # An owner that stands still stays an owner: puts are sent its way.
    with Master(tmp_path / "master", "--client_ttl=60") as one:
        one.owner()
        yield one


@pytest.fixture
def stuck(master):
    """A store whose owner stands still, with a put of 16 MiB in the library that counts as stuck.

    Also registered memory of 32 objects of 1 MiB, and their keys; the put has the first 16.
    """
    names = keys(32)
    held = filled([[MIB]] * 32, names)
    with opened(master, breaker="1") as store, store.register([held.region]):
        master.owners[0].stop()
        transfer = store.submit(part(held, names, 0, 16))
        wait_for(lambda: store.core.counts["calls.stalled"], 20, "the put to stall")
        yield store, held, names
        master.owners[0].go_on()
        wait_for(transfer.done, 60, "the end of the put")


def part(held, names, low, high):
    """Return the batch that stores some of the objects."""
    return held.batch(Op.STORE, names[low:high], range(low, high))


def test_claims():
    claims = Claims()
    assert claims.take(["a", "b"]) == [MINE, MINE]
    assert claims.take(["b", "c"]) == [BUSY, MINE]
    claims.stick(["b", "nobody has it"])
    assert claims.take(["a", "b", "nobody has it"]) == [BUSY, STUCK, MINE]
    claims.give(["a", "b", "nobody ever had it"])
    assert claims.take(["a", "b", "c"]) == [MINE, MINE, BUSY]


def test_a_breaker_doubts_until_something_goes_well():
    now = [0.0]
    one = Breakers(10.0, lambda: now[0])
    assert not one.doubts(STORES)
    one.trip(STORES)
    now[0] = 10.0
    assert one.passes(STORES)
    assert one.doubts(STORES), "the trial has not ended"
    one.heal(STORES)
    assert not one.doubts(STORES)


def test_threads_come_for_those_that_hang_and_go_again():
    hang, ended = threading.Event(), []
    workers = Workers(1, "test")
    workers.submit(hang.wait)
    assert [workers.grow() for _ in range(MOST_TIMES)] == [True] * (MOST_TIMES - 1) + [False]
    assert workers.call(lambda: 1).result(5) == 1
    for _ in range(MOST_TIMES - 1):
        workers.shrink()
    wait_for(lambda: alive("test") == 1, 5, "the others to go")
    hang.set()
    assert workers.call(lambda: 2).result(5) == 2
    assert workers.grow(), "there is room for one again"
    workers.submit(lambda: ended.append(True))
    assert workers.stop(5)
    assert (alive("test"), ended) == (0, [True])


def alive(name):
    return sum(thread.name.startswith(f"{name}-") for thread in threading.enumerate())


def test_a_thread_is_as_nice_as_it_is_told():
    plain, nice = Workers(1, "plain"), Workers(1, "nice", nice=7)
    told = [w.call(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result(5)
            for w in (plain, nice)]  # fmt: skip
    here = os.getpriority(os.PRIO_PROCESS, 0)
    assert told == [here, max(here, 7)]
    assert plain.stop(5)
    assert nice.stop(5)


def test_a_key_that_is_stuck_is_no_reason_to_wait(stuck):
    store, held, names = stuck
    wait_for(lambda: not store.core.breakers.open(), 5, "the breaker's pause")
    begin = time.monotonic()
    outcome = store.submit(part(held, names, 0, 16)).wait(30)
    assert time.monotonic() - begin < 1
    expect(outcome, *[Status.BACKEND_ERROR] * 16)
    assert "an earlier store of it is stuck" in outcome.causes[0]


def test_after_a_failure_one_object_is_tried(stuck, master):
    store, held, names = stuck
    wait_for(lambda: not store.core.breakers.open(), 5, "the breaker's pause")
    before = store.core.claims.held
    second = store.submit(part(held, names, 16, 32))
    wait_for(lambda: store.core.claims.held > before, 5, "the second put")
    time.sleep(0.5)
    assert store.core.claims.held == before + 1
    assert not second.done()
    master.owners[0].go_on()
    outcome = second.wait(60)
    wait_for(second.done, 60, "the end of the second put")
    good = outcome.ok.tolist()
    assert good == [True] * 16 or not any(good), "all of it after one went well, or nothing"
    wait_for(lambda: store.submit(part(held, names, 16, 32)).wait(30).prefix == 16, 60, "recovery")
    stored(store, names[16:], [MIB] * 16)


def test_the_place_of_a_store_that_failed_stays_empty(master):
    """Its bytes may come late: nobody else's are put there until then."""
    names, others = keys(4), keys(56, "others")
    large, held = filled([[4 * MIB]] * 4, names), filled([[MIB]] * 56, others)
    with (
        opened(master, breaker="1", linger="8") as store,
        opened(master) as second,
        store.register([large.region]),
        second.register([held.region]),
    ):
        put(store, keys(1, "first"), [64])  # a connection; without one no byte is on its way
        master.owners[0].stop()
        transfer = store.submit(large.batch(Op.STORE, names))
        wait_for(transfer.done, 90, "the end of the put")
        assert not transfer.wait(0).ok.any()
        master.owners[0].go_on()
        begin = time.monotonic()
        outcome = second.submit(held.batch(Op.STORE, others)).wait(30)
        assert not outcome.ok.all(), "there is no room beside 16 MiB that are waited for"
        assert set(outcome.status[~outcome.ok]) == {Status.NO_SPACE}
        again = store.submit(large.batch(Op.STORE, names)).wait(30)
        assert "stuck" in again.causes[0] or "failed lately" in again.causes[0]
        wait_for(lambda: not store.core.claims.held, 20, "the put to be given up")
        assert time.monotonic() - begin > 5
        wait_for(lambda: put_all(second, held, others), 20, "room")
        stored(second, others, [MIB] * 56)


def test_what_failed_is_held_also_where_the_call_after_it_raises(master, monkeypatch):
    """One object of two fails on its way, and then the master does not answer."""
    names = keys(2)
    held = filled([[MIB]] * 2, names)
    with opened(master, breaker="1") as store, store.register([held.region]):
        real = store.core.client._store

        class Failing:
            def __getattr__(self, call):
                if call == "batch_put_from_multi_buffer_ranges":
                    return lambda *a: [getattr(real, call)(*a)[0], -800]
                if call == "batch_put_session_end":
                    return lambda put: [-900] * len(put)
                return getattr(real, call)

        monkeypatch.setattr(store.core.client, "_store", Failing())
        transfer = store.submit(held.batch(Op.STORE, names))
        expect(transfer.wait(10), *[Status.BACKEND_ERROR] * 2)
        assert not transfer.done(), "the library may still read it"
        assert store.core.slots.used == 2
        monkeypatch.undo()
        wait_for(transfer.done, 20, "quiet")
        wait_for(lambda: not store.core.claims.held, 5, "the put to be given up")
        assert store.core.slots.used == 0
        wait_for(lambda: put_all(store, held, names), 20, "recovery")
        stored(store, names, [MIB] * 2)


def put_all(store, held, names):
    """Store, and tell whether all of it was."""
    return store.submit(held.batch(Op.STORE, names)).wait(30).ok.all()
