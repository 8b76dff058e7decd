"""Write-back: bounded, verified, never a wrong byte, and nothing removed comes back."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from kvconnect.backend import Op, Status
from kvconnect.memory import MemoryBackend
from kvconnect.testing.memory import Objects
from kvconnect.testing.suite import key, keys, move
from kvconnect.testing.suite.base import content, expect, filled, get, put, stored
from kvconnect.tiered import TieredBackend, TieredOptions
from kvconnect.wrappers import Delayed, Faulty
from kvconnect_nvme import open_backend as open_nvme

SIZE = 2304


def back(first=None, second=None, **options):
    """Return the tiered store and its two backends."""
    one, two = first or MemoryBackend(), second or MemoryBackend()
    defaults = {"timeout": 5.0, "promote_bytes": 0, "copy_bytes": 1 << 20, "close_timeout": 5.0}
    return TieredBackend([one, two], TieredOptions(write="back", **defaults | options)), one, two


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


def test_a_put_waits_for_the_first_tier_only():
    second = Delayed(MemoryBackend())
    store, one, _ = back(second=second)
    with store:
        with second.held():
            held = filled([[SIZE]] * 3, keys(3))
            with store.register([held.region]):
                expect(move(store, held.batch(Op.STORE, keys(3))), *[Status.OK] * 3)
                held.buffer.view[:] = 0  # the copies come from the first tier, not from here
            stored(one, keys(3), [SIZE] * 3)
            assert not store.flush(0.05)
            assert not second.inner.exists(keys(3), [SIZE] * 3).any()
        assert store.flush(10)
        stored(second.inner, keys(3), [SIZE] * 3)
        assert store.stats()["write_back_copied"] == 3


@pytest.mark.parametrize("bound", [{"queue_entries": 4}, {"queue_bytes": 4 * SIZE}])
def test_a_full_queue_writes_through(bound):
    second = Delayed(MemoryBackend())
    store, _, _ = back(second=second, **bound)
    with store:
        held = filled([[SIZE]] * 10, keys(10))
        with store.register([held.region]):
            with second.held():
                transfer = store.submit(held.batch(Op.STORE, keys(10)))
                until(lambda: store.stats()["write_back_refused"] == 6)
                stats = store.stats()
                assert stats["queue_entries"] <= 4
                assert stats["queue_bytes"] <= 4 * SIZE
                assert not transfer.done(), "the rest waits for the second tier"
            expect(transfer.wait(10), *[Status.OK] * 10)
        assert store.flush(10)
        stored(second.inner, keys(10), [SIZE] * 10)


def test_an_object_larger_than_the_buffer_is_written_through():
    store, _, two = back(copy_bytes=4096)
    with store:
        put(store, keys(2), [4096, 4097])
        assert two.exists(keys(2)[1:], [4097]).all()
        assert store.flush(5)
        stored(two, keys(2), [4096, 4097])


def test_memory_stays_flat_while_the_second_tier_hangs():
    second = Delayed(MemoryBackend(), deadline=20)
    store, _, _ = back(second=second, queue_entries=64, timeout=0.5)
    with store:
        with second.held():
            for number in range(300):
                expect(put(store, [key(number)], [SIZE]), Status.OK)
                stats = store.stats()
                assert stats["queue_entries"] <= 64
                assert stats["queue_bytes"] <= 64 * SIZE
        assert stats["tier2_outages"] == 1
        assert len(store.core.writeback._order) <= 64


@pytest.mark.parametrize("how", ["remove", "clear", "store"])
@pytest.mark.parametrize("when", ["queued", "copying"])
def test_a_key_that_changes_while_queued(how, when):
    second = Delayed(MemoryBackend())
    store, _, _ = back(second=second)
    name = key("changed") if when == "queued" else key("blocker")
    with store:
        threads = []
        with second.held():
            put(store, [key("blocker")], [SIZE])
            until(lambda: second.waiting == 1)
            if when == "queued":
                put(store, [name], [SIZE])
            change = {
                "remove": lambda: store.remove([name]),
                "clear": lambda: store.clear(name),
                "store": lambda: put(store, [name], [SIZE], "new"),
            }[how]
            if when == "copying" or how == "clear":
                threads.append(threading.Thread(target=change))
                threads[0].start()
            else:
                change()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert store.flush(10)
        if how == "store":
            stored(store, [name], [SIZE], "new")
            stored(second.inner, [name], [SIZE], "new")
        else:
            assert not store.exists([name], [SIZE]).any()
            assert not second.inner.exists([name], [SIZE]).any(), "it came back"
            assert store.list_keys(name) == []


def test_a_queued_key_that_the_first_tier_lost_leaves_no_older_one():
    second = Delayed(MemoryBackend())
    store, one, _ = back(second=second)
    with store:
        put(store, keys(1), [SIZE], "old")
        assert store.flush(5)
        with second.held():
            put(store, [key("blocker")], [SIZE])
            until(lambda: second.waiting == 1)
            put(store, keys(1), [SIZE], "new")
            one.remove(keys(1))  # evicted before it was copied
            assert not store.exists(keys(1), [SIZE]).any()
            expect(get(store, keys(1), [SIZE])[0], Status.ABSENT)
        assert store.flush(10)
        assert store.stats()["write_back_dropped"] == 1
        expect(get(store, keys(1), [SIZE])[0], Status.ABSENT)
        assert not second.inner.exists(keys(1), [SIZE]).any()


def test_damaged_bytes_are_not_copied():
    second = Delayed(MemoryBackend())
    store, one, _ = back(second=second)
    with store:
        with second.held():
            put(store, [key("blocker")], [SIZE])
            until(lambda: second.waiting == 1)
            put(store, keys(1), [SIZE])
            damaged = one.objects.objects[keys(1)[0]]
            damaged.data = b"\xff" + damaged.data[1:]
        assert store.flush(10)
        assert not second.inner.exists(keys(1), [SIZE]).any()


def test_a_copy_that_fails_is_tried_again_and_then_given_up():
    second = Faulty(MemoryBackend())
    store, _, _ = back(second=second, trip_after=10)
    with store:
        second.script(Op.STORE, [Status.BACKEND_ERROR], [0])
        put(store, keys(1), [SIZE])
        assert store.flush(10)
        stored(second.inner, keys(1), [SIZE])
        second.script(Op.STORE, *[[Status.NO_SPACE]] * 3)
        put(store, [key("full")], [SIZE])
        assert store.flush(10)
        assert store.stats()["write_back_failed"] == 1
        stored(store, [key("full")], [SIZE])


def test_ttl_and_pin_go_with_the_copy():
    store, _, two = back()
    with store:
        held = filled([[SIZE]] * 2, keys(2))
        with store.register([held.region]):
            move(store, held.batch(Op.STORE, keys(2)[:1], ttl=1000.0))
            move(store, held.batch(Op.STORE, keys(2)[1:], [1], pin=True))
        assert store.flush(5)
        first, second = (two.objects.objects[name] for name in keys(2))
        assert 900 < first.expires - time.monotonic() <= 1000
        assert (first.pinned, second.pinned) == (False, True)


def test_close_writes_back_within_its_deadline():
    two = MemoryBackend()
    objects = two.objects
    store, _, _ = back(second=two)
    with store:
        put(store, keys(50), [SIZE] * 50)
    assert set(keys(50)) <= set(objects.keys())
    second = Delayed(MemoryBackend())
    store, _, _ = back(second=second, close_timeout=0.2, timeout=1.0)
    second.hold()
    put(store, keys(5), [SIZE] * 5)
    begin = time.monotonic()
    store.close()
    store.close()
    assert time.monotonic() - begin < 5
    assert not any(t.name == "tiered-write-back" for t in threading.enumerate())


WRITER = """
import sys
from kvconnect.testing.suite.base import key, put
from kvconnect.tiered import TieredBackend, TieredOptions
from kvconnect.wrappers import Limited
from kvconnect_nvme import open_backend
one, two = (open_backend(p, {"capacity": "16MiB"}) for p in sys.argv[1:3])
options = TieredOptions(write="back", queue_entries=16, copy_bytes=1 << 16, promote_bytes=0)
store = TieredBackend([one, Limited(two, max_keys_per_batch=1)], options)
print("ready", flush=True)
for n in range(10000):
    if put(store, [key(n)], [2304]).prefix == 1:
        print(n, flush=True)
"""


@pytest.mark.parametrize("after", [5, 40])
def test_a_kill_loses_copies_and_nothing_else(tmp_path, after):
    folders = [str(tmp_path / name) for name in ("first", "second")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", WRITER, *folders]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as writer:
        assert writer.stdout.readline() == b"ready\n"
        for number in range(after):
            assert writer.stdout.readline() == b"%d\n" % number
        writer.send_signal(signal.SIGKILL)
        lines = writer.stdout.read().decode().split("\n")[:-1]
        assert writer.wait(10) == -signal.SIGKILL
    done = range(max([after - 1, *map(int, lines)]) + 1)
    with open_nvme(folders[0], {}) as one, open_nvme(folders[1], {}) as two:
        names = [key(n) for n in done]
        stored(one, names, [SIZE] * len(names))
        assert one.verify().bad == 0
        assert two.verify().bad == 0
        outcome, held = get(two, names, [SIZE] * len(names))
        assert {Status(int(s)) for s in outcome.status} <= {Status.OK, Status.ABSENT}
        for index in outcome.ok.nonzero()[0].tolist():
            assert held.read(index) == content(names[index], SIZE)
        assert set(two.list_keys()) <= set(one.list_keys())


def test_canaries_hold_around_copies():
    second = Delayed(MemoryBackend(), seconds=(0.0, 0.01), seed=3)
    store, _, _ = back(second=second)
    with store:
        held = Objects([[100, 7, 2000]] * 40)
        for index, name in enumerate(keys(40)):
            held.write(index, content(name, 2107))
        with store.register([held.region]):
            expect(move(store, held.batch(Op.STORE, keys(40))), *[Status.OK] * 40)
        held.check()
        assert store.flush(10)
        stored(second.inner, keys(40), [2107] * 40)
