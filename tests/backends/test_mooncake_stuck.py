"""A store that is stuck in Mooncake holds up its own keys and nobody else's."""

import time

import pytest

from kvconnect.backend import Op, Status
from kvconnect.testing.suite import keys
from kvconnect.testing.suite.base import expect, filled, stored
from kvconnect_mooncake.breakers import STORES, Breakers
from kvconnect_mooncake.claims import Claim, Claims

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
