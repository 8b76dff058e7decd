"""A tier that refuses keys, a store carried over a fork, and copies that are never made."""

import os
import time

import pytest

from kvconnect.backend import Op, Status
from kvconnect.errors import ClosedError, ConfigError, TransferTimeoutError
from kvconnect.memory import MemoryBackend
from kvconnect.testing.suite import key, keys, move
from kvconnect.testing.suite.base import expect, filled, get, put, stored
from kvconnect.tiered import TieredBackend, TieredOptions
from kvconnect.wrappers import Delayed, Faulty

SIZE = 2304


class Choosy(MemoryBackend):
    """A store that takes keys of 64 characters only, as one in S3 does."""

    def submit(self, batch):
        if batch.op is Op.STORE:
            self._check(batch.keys)
        return super().submit(batch)

    def remove(self, keys):
        self._check(keys)
        return super().remove(keys)

    @staticmethod
    def _check(keys):
        if any(len(one) != 64 for one in keys):
            raise ConfigError("a key must have 64 characters")


def two_tiers(second, **options):
    first = MemoryBackend()
    defaults = {"timeout": 5.0, "promote_bytes": 1 << 20, "copy_bytes": 1 << 20}
    return TieredBackend([first, second], TieredOptions(**defaults | options)), first


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


@pytest.mark.parametrize("write", ["through", "back"])
def test_a_key_that_one_tier_refuses_stays_with_the_others(write):
    store, first = two_tiers(Choosy(), write=write)
    with store:
        expect(put(store, ["short"], [SIZE]), Status.OK)
        if write == "back":
            assert store.flush(10), "the write-back thread gave up"
        stored(store, ["short"], [SIZE])
        good = key("long enough")
        expect(put(store, [good], [SIZE]), Status.OK)
        if write == "back":
            assert store.flush(10)
        first.remove([good])
        stored(store, [good], [SIZE])


def test_a_promotion_that_cannot_heal_does_not_end_promotion():
    # The first tier's object is damaged, and the tier refuses to remove it.
    first = Faulty(Choosy())
    second = MemoryBackend()
    store = TieredBackend([first, second], TieredOptions(timeout=5.0, promote_bytes=1 << 20))
    with store:
        put(second, ["short", key("good")], [SIZE] * 2)
        first.script(Op.LOAD, [Status.CHECKSUM])
        stored(store, ["short"], [SIZE])
        until(lambda: not store.stats()["promote_waiting"])
        stored(store, [key("good")], [SIZE])
        until(lambda: store.stats()["promoted"] == 1)


def test_a_question_that_times_out_is_not_asked_again_at_once():
    class Silent(MemoryBackend):
        asked = 0

        def exists(self, keys, nbytes):
            self.asked += 1
            raise TransferTimeoutError("no answer in 60 s")

    silent = Silent()
    store, _ = two_tiers(silent, retry_after=60.0, trip_after=3)
    with store:
        for _ in range(3):
            assert not store.exists(keys(1), [SIZE]).any()
        assert silent.asked == 1


def test_a_forked_process_cannot_use_or_close_it():
    second = Delayed(MemoryBackend())
    store, _ = two_tiers(second, write="back", close_timeout=30.0)
    with store:
        with second.held():
            put(store, keys(1), [SIZE])  # its copy waits: the thread for it is not in the child
            child = os.fork()
            if not child:
                code = 1
                try:
                    begin = time.monotonic()
                    store.close()
                    try:
                        store.exists(keys(1), [SIZE])
                    except ClosedError as error:
                        code = 0 if "fork" in str(error) and time.monotonic() < begin + 2 else 2
                finally:
                    os._exit(code)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
        assert store.flush(10)
        stored(second.inner, keys(1), [SIZE])


def test_a_failed_put_does_not_bring_back_an_older_object():
    # Both tiers have the old one; the new one is in the first and still to be copied; storing
    # it once more fails everywhere and takes it out of the queue.
    first, second = Faulty(MemoryBackend()), Faulty(Delayed(MemoryBackend()))
    store = TieredBackend(
        [first, second], TieredOptions(write="back", timeout=5.0, promote_bytes=0, trip_after=100)
    )
    with store:
        put(store, keys(1), [SIZE], "old")
        assert store.flush(10)
        with second.inner.held():
            put(store, [key("blocker")], [SIZE])
            until(lambda: second.inner.waiting == 1)
            put(store, keys(1), [SIZE], "new")
            first.script(Op.STORE, [Status.NO_SPACE])
            second.script(Op.STORE, [Status.NO_SPACE])
            assert put(store, keys(1), [SIZE], "newer").prefix == 0
        assert store.flush(10)
        stored(store, keys(1), [SIZE], "new")
        first.remove(keys(1))  # evicted
        expect(get(store, keys(1), [SIZE])[0], Status.ABSENT)


def test_an_object_that_expires_in_the_queue_leaves_no_older_one():
    second = Delayed(MemoryBackend())
    store, _first = two_tiers(second, write="back", promote_bytes=0)
    with store:
        put(store, keys(1), [SIZE], "old")
        assert store.flush(10)
        with second.held():
            put(store, [key("blocker")], [SIZE])
            until(lambda: second.waiting == 1)
            held = filled([[SIZE]], keys(1), "new")
            with store.register([held.region]):
                expect(move(store, held.batch(Op.STORE, keys(1), ttl=0.05)), Status.OK)
            time.sleep(0.1)
        assert store.flush(10)
        expect(get(store, keys(1), [SIZE])[0], Status.ABSENT)
