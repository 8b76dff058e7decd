"""Mooncake when processes die or hang: bounded time, nothing wrong, recovery without restart."""

import time
from contextlib import ExitStack

import numpy as np
import pytest

from kvconnect.backend import Op, Status
from kvconnect.errors import TransferTimeoutError, UnavailableError
from kvconnect.testing.memory import Objects
from kvconnect.testing.suite import key, keys
from kvconnect.testing.suite.base import content, expect, filled, get, put, stored
from kvconnect_mooncake.quiet import HARD_LIMIT, Held, Rule

from .mooncake_master import Master, opened, wait_for

MIB = 1 << 20


@pytest.fixture
def master(tmp_path):
    with Master(tmp_path / "master") as one:
        one.owner()
        yield one


def ends(store, transfer, seconds=30):
    """Wait until a transfer is quiet."""
    wait_for(transfer.done, seconds, f"the end of {transfer!r} ({store.stats()})")


def put_ends(store, names, size):
    """Store, wait until all is quiet, and return the outcome; may fail."""
    held = filled([[size]] * len(names), names)
    with store.register([held.region]):
        transfer = store.submit(held.batch(Op.STORE, names))
        outcome = transfer.wait(30)
        ends(store, transfer)
    return outcome


def test_a_killed_owner(master):
    names, sizes = keys(8), [MIB // 4] * 8
    with opened(master, breaker="3") as store:
        put(store, names, sizes)
        master.owners[0].kill()
        held = Objects([[size] for size in sizes])
        registration = store.register([held.region])
        begin = time.monotonic()
        transfer = store.submit(held.batch(Op.LOAD, names))
        outcome = transfer.wait(20)
        assert time.monotonic() - begin < 10, "a dead owner takes bounded time"
        assert not outcome.ok.any()
        if int(outcome.status[0]) == Status.BACKEND_ERROR:
            assert "owner" not in store.stats()["breakers_open"]
            assert store.stats()["breakers_open"] != "none"
            begin = time.monotonic()
            assert not store.exists(names, sizes).any(), "what cannot be read is no hit"
            again = store.submit(held.batch(Op.LOAD, names))
            assert not again.wait(5).ok.any()
            assert time.monotonic() - begin < 0.5, "the second time it is skipped"
            ends(store, again)
        ends(store, transfer)
        registration.close()
        master.owner()
        wait_for(lambda: len(master.segments()) == 1, what="the dead segment to go")
        wait_for(lambda: put_ends(store, names, sizes[0]).prefix == 8, 30, "recovery")
        stored(store, names, sizes)


def test_a_stopped_owner_then_late_bytes(master):
    # The call hangs, the caller does not; pages stay leased until nothing can arrive any more.
    names, sizes = keys(16), [MIB] * 16
    with opened(master, breaker="3") as store:
        put(store, names, sizes)
        held = Objects([[size] for size in sizes])
        registration = store.register([held.region])
        master.owners[0].stop()
        begin = time.monotonic()
        transfer = store.submit(held.batch(Op.LOAD, names))
        outcome = transfer.wait(1.0)
        assert time.monotonic() - begin < 2
        expect(outcome, *[Status.TIMEOUT] * 16)
        assert outcome.dirty.all()
        assert not transfer.done(), "the library still holds the memory"
        with pytest.raises(TransferTimeoutError, match="still leased"):
            short_close(store, registration)
        wait_for(lambda: store.stats()["breakers_open"] != "none", 20, "the breaker")
        begin = time.monotonic()
        assert not store.exists(names, sizes).any()
        assert time.monotonic() - begin < 1
        # The owner goes on while the call is still under way: now bytes land late.
        before = held.buffer.view.copy()
        master.owners[0].go_on()
        ends(store, transfer, 60)
        assert int((held.buffer.view != before).sum()) > 0, "nothing came late: no test"
        held.buffer.view[:] = 7  # the pages are handed out again
        time.sleep(1.0)
        assert (held.buffer.view == 7).all(), "a byte landed after done()"
        registration = store.register([held.region])
        registration.close()
        wait_for(lambda: put_ends(store, names, MIB).prefix == 16, 40, "recovery")
        wait_for(lambda: get(store, names, sizes)[0].prefix == 16, 20, "recovery of loads")
        stored(store, names, sizes)


def short_close(store, registration):
    """Close a registration with little patience."""
    patience, store._table._deadline = store._table._deadline, 0.2
    try:
        registration.close()
    finally:
        store._table._deadline = patience


def test_a_killed_master(master):
    names, sizes = keys(4), [4096] * 4
    with opened(master, breaker="3", rpc_timeout="3") as store:
        put(store, names, sizes)
        master.kill()
        begin = time.monotonic()
        with pytest.raises(UnavailableError):
            store.exists(names, sizes)
        assert time.monotonic() - begin < 8
        begin = time.monotonic()
        for _ in range(20):
            with pytest.raises(UnavailableError, match="did not answer"):
                store.exists(names, sizes)
        outcome = put(store, names, sizes)
        expect(outcome, *[Status.BACKEND_ERROR] * 4)
        outcome, _ = get(store, names, sizes)
        expect(outcome, *[Status.BACKEND_ERROR] * 4)
        assert time.monotonic() - begin < 1, "later calls fail fast"
        with pytest.raises(UnavailableError, match="admin"):
            store.list_keys()
        master.start()
        wait_for(lambda: len(master.segments()) == 1, what="the owner to come back")
        wait_for(lambda: put(store, names, sizes).prefix == 4, 20, "recovery")
        stored(store, names, sizes)


def test_a_stopped_master(master):
    with opened(master, breaker="3", rpc_timeout="1") as store:
        put(store, [key("a")], [64])
        with ExitStack() as stack:
            master.stop()
            stack.callback(master.go_on)
            begin = time.monotonic()
            with pytest.raises(UnavailableError):
                store.exists([key("a")], [64])
            assert time.monotonic() - begin < 2
        wait_for(lambda: answers(store), 15, "the master's answer")


def answers(store):
    """Tell whether the store can be asked."""
    try:
        store.exists([key("a")], [64])
    except UnavailableError:
        return False
    return True


def test_the_quarantine_lasts_while_bytes_change():
    held = Objects([[64]])
    run = (held.region.address + held.places[0][0], 64)
    released = []
    one = Held([run], 10.0, 3.0, lambda: released.append(True), 64)
    assert not one.quiet(9.0)
    held.write(0, bytes(64))
    assert not one.quiet(10.0), "it changed a moment ago"
    assert not one.quiet(12.9)
    assert one.quiet(13.1)


@pytest.mark.parametrize(
    ("took", "longest", "seconds"),
    [(1.0, 2, 6.0), (30.0, 2, 6.0), (1.0, 128, 195.0), (HARD_LIMIT, 2, 140.0), (60.0, 2, 135.0)],
)
def test_how_long_memory_is_held(took, longest, seconds):
    # 4 lanes, 3 s an entry: two of the longest object after a call that ended by itself; the
    # whole queue of 256, counted from its start, after one that ran into the library's limit.
    assert Rule(256, 4, 3.0).seconds(took, longest) == seconds


def test_stores_to_a_stopped_owner(master):
    names = keys(4)
    held = filled([[MIB]] * 4, names)
    with opened(master, breaker="3") as store:
        registration = store.register([held.region])
        master.owners[0].stop()
        begin = time.monotonic()
        transfer = store.submit(held.batch(Op.STORE, names))
        assert not transfer.wait(1.0).ok.any()
        assert time.monotonic() - begin < 2
        wait_for(lambda: "stores" in store.stats()["breakers_open"], 20, "the breaker")
        begin = time.monotonic()
        quick = store.submit(held.batch(Op.STORE, keys(4, "others")))
        assert not quick.wait(5).ok.any()
        assert time.monotonic() - begin < 1, "later stores fail fast"
        master.owners[0].go_on()
        ends(store, transfer, 60)
        registration.close()
        wait_for(lambda: put_ends(store, names, MIB).prefix == 4, 40, "recovery")
        stored(store, names, [MIB] * 4)


def test_wrong_versions_are_never_seen(master):
    # A reader beside a writer that replaces objects by force: whole versions or misses.
    name, size = key("changing"), 70_000
    allowed = {content(name, size, str(version)) for version in range(30)}
    with opened(master, breaker="3") as writer, opened(master, breaker="3") as reader:
        for version in range(30):
            expect(put(writer, [name], [size], str(version)), Status.OK)
            outcome, held = get(reader, [name], [size])
            assert outcome.prefix == 1
            assert held.read(0) == content(name, size, str(version))
            assert np.asarray(outcome.ok).all()
            assert held.read(0) in allowed
