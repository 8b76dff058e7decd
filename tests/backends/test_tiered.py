"""Two tiers as one store: what a tier that fails costs, what comes back and what must not."""

import logging
import threading
import time
from pathlib import Path

import pytest

from kvconnect.backend import Op, Status
from kvconnect.errors import RegistrationError, UnavailableError
from kvconnect.memory import MemoryBackend, ObjectStore
from kvconnect.testing.memory import Objects
from kvconnect.testing.suite import key, keys, move
from kvconnect.testing.suite.base import content, expect, filled, get, put, stored
from kvconnect.tiered import TieredBackend, TieredOptions
from kvconnect.wrappers import Delayed, Dirt, Faulty, Lie

SIZE = 2304
DEADLINE = 1.0


class Sick(MemoryBackend):
    """A store of which every call fails while `dead`, and that counts what it was asked."""

    def __init__(self):
        super().__init__(ObjectStore())
        self.dead, self.asked = False, 0

    def _check(self):
        self.asked += 1
        if self.dead:
            raise UnavailableError("injected: the store is gone")

    def exists(self, keys, nbytes):
        self._check()
        return super().exists(keys, nbytes)

    def submit(self, batch):
        self._check()
        return super().submit(batch)

    def remove(self, keys):
        self._check()
        return super().remove(keys)


def pair(first=None, second=None, **options):
    """Return the tiered store and its two backends."""
    one, two = first or MemoryBackend(), second or MemoryBackend()
    defaults = {"timeout": DEADLINE, "promote_bytes": 1 << 20, "copy_bytes": 1 << 20}
    return TieredBackend([one, two], TieredOptions(**defaults | options)), one, two


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


def lines(caplog, word):
    return [r for r in caplog.records if r.name == "kvconnect.tiered" and word in r.message]


def test_one_prefix_over_both_tiers():
    store, one, two = pair(promote_bytes=0)
    with store:
        names = keys(4)
        put(one, names[:2], [SIZE] * 2)
        put(two, names[2:3], [SIZE])
        assert store.exists(names, [SIZE] * 4).tolist() == [True, True, True, False]
        outcome, held = get(store, names, [SIZE] * 4)
        expect(outcome, Status.OK, Status.OK, Status.OK, Status.ABSENT)
        assert (outcome.prefix, outcome.nbytes) == (3, 3 * SIZE)
        assert [held.read(i) for i in range(3)] == [content(n, SIZE) for n in names[:3]]


def test_a_slower_tier_is_asked_only_for_the_rest_and_not_again_at_once():
    second = Sick()
    store, one, _ = pair(second=second, negative_ttl=60.0)
    with store:
        names = keys(3)
        put(one, names[:2], [SIZE] * 2)
        assert store.exists(names[:2], [SIZE] * 2).all()
        assert second.asked == 0
        for _ in range(3):
            assert not store.exists(names[2:], [SIZE]).any()
            expect(get(store, names[2:], [SIZE])[0], Status.ABSENT)
        assert second.asked == 1
        put(second, names[2:], [SIZE])
        assert not store.exists(names[2:], [SIZE]).any(), "taken for absent a while"
        put(store, names[2:], [SIZE])
        one.remove(names[2:])
        assert store.exists(names[2:], [SIZE]).all(), "a store through us ends it"


def test_keys_taken_for_absent_are_bounded():
    store, _, _ = pair(negative_ttl=60.0, negative_entries=100)
    with store:
        store.exists(keys(1000), [1] * 1000)
        assert store.stats()["tier2_taken_for_absent"] == 100


def test_a_load_from_the_slower_tier_is_promoted():
    store, one, two = pair()
    with store:
        names, runs = keys(5), [[SIZE // 2, 7, SIZE // 2 - 7]] * 5
        put(two, names, [SIZE] * 5)
        held = Objects(runs)
        with store.register([held.region]):
            expect(move(store, held.batch(Op.LOAD, names)), *[Status.OK] * 5)
            held.buffer.view[:] = 0  # the caller's memory is its own again
        until(lambda: store.stats()["promoted"] == 5)
        stored(one, names, [SIZE] * 5)


def test_a_full_promotion_buffer_skips_and_never_blocks():
    first = Delayed(MemoryBackend(), deadline=5.0)
    store, _, two = pair(first=first, promote_bytes=8192, timeout=5.0)
    with store:
        names = keys(6)
        put(two, names, [4096] * 6)
        store.core.tiers[0].stale.note(names)  # the first tier is not asked
        with first.held():
            expect(get(store, names, [4096] * 6)[0], *[Status.OK] * 6)
            stats = store.stats()
            assert stats["promote_skipped"] == 6 - stats["promote_waiting"]
            assert 0 < stats["promote_waiting"] <= 2
        until(lambda: not store.stats()["promote_waiting"])


def test_a_checksum_error_is_served_by_the_other_tier_and_healed():
    store, one, _ = pair()
    with store:
        names = keys(2)
        put(store, names, [SIZE] * 2)
        damaged = one.objects.objects[names[1]]
        damaged.data = b"\xff" + damaged.data[1:]
        outcome, held = get(store, names, [SIZE] * 2)
        expect(outcome, Status.OK, Status.OK)
        assert held.read(1) == content(names[1], SIZE)
        assert "tier 1" in outcome.causes[1]
        assert "CHECKSUM" in outcome.causes[1]
        until(lambda: store.stats()["promoted"] == 1)
        stored(one, names, [SIZE] * 2)


@pytest.mark.parametrize("status", [s for s in Status if 0 < s < Status.PARTIAL])
def test_what_fails_in_the_first_tier_comes_from_the_second(status):
    first = Faulty(MemoryBackend(), dirt=Dirt.ALL)
    store, _, _ = pair(first=first, promote_bytes=0)
    with store:
        names = keys(3)
        put(store, names, [SIZE] * 3)
        first.script(Op.LOAD, [0, status, 0])
        outcome, held = get(store, names, [SIZE] * 3)
        final = status in {Status.SIZE_MISMATCH, Status.CANCELLED}
        expect(outcome, Status.OK, status if final else Status.OK, Status.OK)
        if not final:
            assert held.read(1) == content(names[1], SIZE)


@pytest.mark.parametrize("lie", [Lie.TOO_FEW, Lie.TOO_MANY, Lie.SHORT_BYTES])
def test_a_lying_tier_is_not_believed(lie):
    first = Faulty(MemoryBackend())
    store, _, _ = pair(first=first, promote_bytes=0)
    with store:
        put(store, keys(3), [SIZE] * 3)
        first.script(Op.LOAD, lie)
        stored(store, keys(3), [SIZE] * 3)
        first.script_exists(Lie.TOO_FEW)
        assert store.exists(keys(3), [SIZE] * 3).all()


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("write", ["through", "back"])
def test_a_dead_tier_costs_its_keys_and_two_log_lines(caplog, number, write):
    sick = Sick()
    both = [None, None]
    both[number] = sick
    store, _, _ = pair(*both, write=write, retry_after=0.2)
    with store, caplog.at_level(logging.WARNING, "kvconnect.tiered"):
        put(store, keys(2), [SIZE] * 2)
        assert store.flush(5)
        sick.dead, sick.asked = True, 0
        begin = time.monotonic()
        for round_ in range(20):
            expect(put(store, [key(round_, "new")], [SIZE]), Status.OK)
            stored(store, [key(round_, "new")], [SIZE])
            assert store.exists(keys(2), [SIZE] * 2).all()
            stored(store, keys(2), [SIZE] * 2)
        took = time.monotonic() - begin
        until(lambda: lines(caplog, "going on without it"))
        assert len(lines(caplog, "going on without it")) == 1
        assert sick.asked <= 3 + took / 0.2 + 2, "an open circuit asks only by probes"
        assert store.stats()[f"tier{number + 1}_state"] == "failing"
        sick.dead = False

        def back():
            put(store, [key("probe")], [SIZE])
            store.exists([key(time.monotonic())], [1])
            return store.stats()[f"tier{number + 1}_state"] == "in use"

        until(back)
        assert len(lines(caplog, "answers again")) == 1
        if write == "back" and number == 1:
            assert store.flush(10)
            stored(sick, [key(round_, "new") for round_ in range(20)], [SIZE] * 20)
        stored(store, keys(2), [SIZE] * 2)


def test_all_tiers_dead_is_said():
    store, one, two = pair(Sick(), Sick())
    with store:
        one.dead = two.dead = True
        with pytest.raises(UnavailableError, match="no tier answers"):
            store.exists(keys(1), [SIZE])
        outcome, held = get(store, keys(1), [SIZE])
        expect(outcome, Status.BACKEND_ERROR)
        assert held.untouched(0)
        assert "tier 1" in outcome.causes[0]
        assert "tier 2" in outcome.causes[0]
        expect(put(store, keys(1), [SIZE]), Status.BACKEND_ERROR)
        one.dead = two.dead = False


def test_a_slow_tier_that_obeys_is_left_for_the_next():
    first = Delayed(MemoryBackend())
    store, _, _ = pair(first=first, promote_bytes=0)
    with store:
        put(store, keys(2), [SIZE] * 2)
        with first.held():
            begin = time.monotonic()
            outcome, held = get(store, keys(2), [SIZE] * 2)
            assert time.monotonic() - begin < DEADLINE + 0.5
            expect(outcome, Status.OK, Status.OK)
            assert held.read(1) == content(keys(2)[1], SIZE)
            begin = time.monotonic()
            stored(store, keys(2), [SIZE] * 2)
            assert time.monotonic() - begin < DEADLINE / 2, "a slow tier costs its time once"


def test_late_bytes_never_meet_the_next_tier_or_a_free_page():
    # The first tier ignores the cancel and writes long after the deadline.
    first = Delayed(MemoryBackend(), obeys_cancel=False)
    store, _one, _ = pair(first=first, promote_bytes=0, retry_after=0.01)
    with store:
        put(store, keys(1), [SIZE])
        held = Objects([[SIZE], [SIZE]])
        with store.register([held.region]):
            with first.held():
                transfer = store.submit(held.batch(Op.LOAD, keys(1)))
                begin = time.monotonic()
                outcome = transfer.wait(10)
                assert time.monotonic() - begin < DEADLINE + 1
                expect(outcome, Status.TIMEOUT)
                assert outcome.dirty.tolist() == [True]
                assert "still holds" in outcome.causes[0]
                assert not transfer.done(), "the page must stay leased"
                assert held.untouched(0), "the next tier must not have been given the page"
                # Another page is served at once, by the second tier.
                outcome = move(store, held.batch(Op.LOAD, keys(1), [1]))
                expect(outcome, Status.OK)
            until(transfer.done)
            held.buffer.view[:] = 0
            time.sleep(0.05)
            assert not held.buffer.view.any(), "bytes landed after done()"


def test_a_late_store_keeps_its_memory_and_its_key():
    second = Delayed(MemoryBackend(), obeys_cancel=False)
    store, one, _two = pair(second=second)
    with store:
        held = filled([[SIZE]], keys(1))
        with store.register([held.region]):
            with second.held():
                transfer = store.submit(held.batch(Op.STORE, keys(1)))
                until(lambda: transfer.wait(0).prefix == 1, DEADLINE + 5)
                assert not transfer.done()
                expect(put(store, keys(1), [SIZE], "new"), Status.TIMEOUT)
            until(transfer.done)
        expect(put(store, keys(1), [SIZE], "new"), Status.OK)
        stored(store, keys(1), [SIZE], "new")
        one.remove(keys(1))
        assert get(store, keys(1), [SIZE])[1].read(0) != content(keys(1)[0], SIZE)


def test_require_all_means_all():
    second = Faulty(MemoryBackend())
    store, _, _ = pair(second=second, require="all")
    with store:
        second.script(Op.STORE, [Status.NO_SPACE, 0])
        outcome = put(store, keys(2), [SIZE] * 2)
        expect(outcome, Status.NO_SPACE, Status.OK)
        assert "tier 2" in outcome.causes[0]


def test_an_older_object_does_not_come_back():
    second = Faulty(MemoryBackend())
    store, one, _two = pair(second=second, promote_bytes=0)
    with store:
        put(store, keys(1), [SIZE], "old")
        second.script(Op.STORE, [Status.BACKEND_ERROR])
        expect(put(store, keys(1), [SIZE], "new"), Status.OK)
        one.remove(keys(1))  # evicted
        expect(get(store, keys(1), [SIZE])[0], Status.ABSENT)


def test_remove_reaches_both_or_says_so():
    store, one, two = pair(second=Sick(), promote_bytes=0)
    with store:
        put(store, keys(3), [SIZE] * 3)
        one.remove(keys(3)[:1])
        assert store.remove([*keys(2), key("never")]).tolist() == [True, True, False]
        two.dead = True
        with pytest.raises(UnavailableError, match="tier 2"):
            store.remove(keys(3)[2:])
        two.dead = False
        assert not store.exists(keys(3), [SIZE] * 3).any()
        expect(get(store, keys(3), [SIZE] * 3)[0], *[Status.ABSENT] * 3)


@pytest.mark.parametrize("how", ["remove", "clear"])
def test_a_removed_key_is_not_promoted(how):
    first = Delayed(MemoryBackend())
    store, _one, two = pair(first=first, timeout=10.0)
    with store:
        blocker, name = key("blocker"), key("gone")
        put(two, [blocker, name], [SIZE] * 2)
        store.core.tiers[0].stale.note([blocker, name])
        with first.held():  # the promotion of the blocker holds up that of the other
            stored(store, [blocker], [SIZE])
            until(lambda: first.waiting == 1)
            stored(store, [name], [SIZE])
            assert store.stats()["promote_waiting"] == 2
            if how == "remove":
                store.remove([name])
            else:
                assert store.core.ledger.begin_clear(name, time.monotonic() + 5)
                two.clear(name)
                store.core.ledger.end_clear(name)
        until(lambda: not store.stats()["promote_waiting"])
        assert first.inner.exists([blocker, name], [SIZE] * 2).tolist() == [True, False]


def test_remove_waits_for_the_copy_under_way():
    first = Delayed(MemoryBackend())
    store, _one, two = pair(first=first, timeout=10.0)
    with store:
        put(two, keys(1), [SIZE])
        store.core.tiers[0].stale.note(keys(1))
        with first.held():
            stored(store, keys(1), [SIZE])
            until(lambda: first.waiting == 1)
            thread = threading.Thread(target=store.remove, args=(keys(1),))
            thread.start()
        thread.join(10)
        assert not thread.is_alive()
        until(lambda: not store.stats()["promote_waiting"])
        for tier in (store, first.inner, two):
            assert not tier.exists(keys(1), [SIZE]).any()


def test_registration_is_all_or_nothing():
    second = Faulty(MemoryBackend())
    store, one, _ = pair(second=second)
    with store:
        held = filled([[SIZE]], keys(1))
        before = one._registrations.regions
        second.refuse_region(0)
        with pytest.raises(RegistrationError, match="injected"):
            store.register([held.region])
        assert one._registrations.regions == before
        with pytest.raises(RegistrationError):
            store.submit(held.batch(Op.STORE, keys(1)))
        registration = store.register([held.region])
        registration.close()
        registration.close()
        assert one._registrations.regions == before


def test_threads_and_files_go_back_to_what_they_were():
    def here():
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    before = here()
    for write in ("through", "back"):
        store, _, two = pair(write=write)
        with store:
            put(store, keys(20), [SIZE] * 20)
            put(two, [key("slow")], [SIZE])
            stored(store, [*keys(20), key("slow")], [SIZE] * 21)
        store.close()
    until(lambda: here()[1] <= before[1])
    assert here()[0] == before[0]
