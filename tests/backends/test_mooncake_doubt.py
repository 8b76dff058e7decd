"""After a store has failed: what the next ones do, and when the doubt ends."""

import threading
import time

import pytest

from kvconnect.backend import Op, Status
from kvconnect.testing.suite import keys
from kvconnect.testing.suite.base import expect, filled, put
from kvconnect_mooncake import quiet
from kvconnect_mooncake.breakers import STORES, Breakers
from kvconnect_mooncake.workers import MOST_TIMES, Workers

from .mooncake_master import Master, opened, wait_for

NAMES = keys(4)


@pytest.fixture
def master(tmp_path):
    with Master(tmp_path / "master") as one:
        one.owner()
        yield one


@pytest.fixture
def held():
    return filled([[1024]] * 4, NAMES)


def doubted(store):
    """Have a store be about to make its trial."""
    breakers = store.core.breakers
    breakers.trip(STORES)
    wait_for(lambda: not breakers.open(), 5, "the pause")


def test_a_trial_that_said_nothing_is_the_next_ones():
    now = [0.0]
    one = Breakers(10.0, lambda: now[0])
    one.hand_on(STORES)
    assert not one.doubts(STORES)
    one.trip(STORES)
    one.hand_on(STORES)
    assert not one.passes(STORES), "it was a failure, not a trial"
    now[0] = 10.0
    assert [one.passes(STORES), one.passes(STORES)] == [True, False]
    one.hand_on(STORES)
    assert [one.passes(STORES), one.passes(STORES)] == [True, False]
    one.trip(STORES)
    one.hand_on(STORES)
    assert not one.passes(STORES), "the trial had failed"


def test_keys_that_are_there_say_nothing_of_stores(master, held):
    with opened(master, breaker="0.5") as store, store.register([held.region]):
        put(store, NAMES[:3], [1024] * 3)
        doubted(store)
        for _ in range(3):  # none of them in another pause
            outcome = store.submit(held.batch(Op.STORE, NAMES[:3], range(3))).wait(10)
            expect(outcome, *[Status.OK] * 3)
            assert store.core.breakers.doubts(STORES)
        expect(store.submit(held.batch(Op.STORE, NAMES)).wait(10), *[Status.OK] * 4)
        assert not store.core.breakers.doubts(STORES), "the last one was stored"


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_a_busy_key_does_not_hold_up_the_trial(master, held, order):
    """Another put of this process has key 0; the deadline ends the wait for it, and only that."""
    names = [NAMES[at] for at in order]
    with opened(master, breaker="0.5", timeout="2") as store, store.register([held.region]):
        taken = store.core.names.names([NAMES[0]])
        store.core.claims.take(taken)
        doubted(store)
        outcome = store.submit(held.batch(Op.STORE, names, order)).wait(10)
        assert [outcome.ok[order.index(at)] for at in (1, 2)] == [True, True]
        assert outcome.status[order.index(0)] == Status.TIMEOUT
        doubted(store)
        outcome = store.submit(held.batch(Op.STORE, [NAMES[0]], [0])).wait(10)
        expect(outcome, Status.TIMEOUT)
        store.core.claims.give(taken)
        expect(store.submit(held.batch(Op.STORE, NAMES)).wait(10), *[Status.OK] * 4)


def test_who_waits_for_a_thread_has_not_stalled_and_is_not_begun_late(master, held, monkeypatch):
    monkeypatch.setattr(quiet, "STALL_SECONDS", 0.2)
    with opened(master, timeout="1", threads="1") as store, store.register([held.region]):
        hang = threading.Event()
        store.core.callers.submit(hang.wait)
        transfer = store.submit(held.batch(Op.STORE, NAMES))
        expect(transfer.wait(10), *[Status.TIMEOUT] * 4)
        time.sleep(0.5)
        assert not transfer.done()
        hang.set()
        wait_for(transfer.done, 5, "the end of the wait")
        assert store.core.counts["calls.stalled"] == 0
        assert store.core.counts["put.written"] == 0
        expect(store.submit(held.batch(Op.STORE, NAMES)).wait(10), *[Status.OK] * 4)


def test_no_thread_comes_where_there_is_none_or_all_end(monkeypatch):
    workers, hang = Workers(1, "test"), threading.Event()
    with monkeypatch.context() as patch:

        def start(_):
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", start)
        assert not workers.grow()
    workers.submit(hang.wait)
    assert not workers.stop(0.05)
    assert [workers.grow() for _ in range(MOST_TIMES)] == [False] * MOST_TIMES
    hang.set()
    assert workers.stop(5)
