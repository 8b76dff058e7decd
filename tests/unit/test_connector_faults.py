"""The connector on stores that fail: every fault is a miss with a reason, and it stays usable."""

import resource
import threading
from pathlib import Path

import numpy as np
import pytest

from kvconnect.backend import Capabilities, Op, Outcome, Status
from kvconnect.errors import ClosedError, UnavailableError
from kvconnect.memory import MemoryBackend, ObjectStore
from kvconnect.wrappers import Delayed, Dirt, Faulty, Lie, Limited, Metered, Wrapper
from tests.unit.attached import attach, filled, hashes, same
from tests.unit.held_pools import held

OK, ERROR = Status.OK, Status.BACKEND_ERROR
NO_SCATTER = Capabilities(scatter_gather=False)


@pytest.fixture
def faulty():
    with Faulty(MemoryBackend()) as faulty:
        yield faulty


def test_seven_keys_one_of_which_fails(one, faulty):
    """Case 18: prefix 5, only key 5 tried again, key 5 not visible."""
    with attach(one, faulty) as connector:
        seen = []
        submit = faulty.submit
        faulty.submit = lambda batch: (seen.append(list(batch.keys)), submit(batch))[1]
        faulty.script(Op.STORE, [0, 0, 0, 0, 0, ERROR, 0], [ERROR])
        outcome = connector.put(hashes(*range(7)), range(7))
        assert outcome.status.tolist() == [0, 0, 0, 0, 0, ERROR, 0]
        assert outcome.prefix == 5
        assert outcome.causes == {5: "injected"}
        assert outcome.nbytes == 6 * one.pool.page_nbytes
        assert [len(keys) for keys in seen] == [7, 1]
        assert seen[1] == [seen[0][5]]
        assert connector.exists(hashes(*range(7))).pages.tolist() == [True] * 5 + [False, True]
        assert seen[0][5] not in faulty.inner.list_keys()
        again = connector.put(hashes(5), [5])
        assert again.ok.all()
        assert connector.exists(hashes(*range(7))).prefix == 7


@pytest.mark.parametrize("status", [s for s in Status if 0 < s < Status.PARTIAL])
@pytest.mark.parametrize("dirt", list(Dirt))
def test_every_fault_of_a_load_is_a_miss_and_says_if_bytes_changed(one, faulty, status, dirt):
    with attach(one, faulty, retries=0) as connector:
        content = filled(one, connector)
        faulty.dirt = dirt
        faulty.script(Op.LOAD, [0, 0, status, 0])
        before = one.snapshot()
        old = one.read([2])
        got = connector.get(hashes(0, 1, 2, 3), [0, 1, 2, 3])
        assert got.status.tolist() == [0, 0, status, 0]
        assert got.prefix == 2
        assert got.dirty.tolist() == [False, False, dirt is not Dirt.NONE, False]
        if not got.dirty[2]:
            assert same(one.read([2]), old)
        assert same(one.read([0, 1, 3]), {n: v[[0, 1, 3]] for n, v in content.items()})
        assert one.untouched_outside(range(4), before)
        assert connector.stats()[f"get.{status.name.lower()}"] == 1


@pytest.mark.parametrize("status", [s for s in Status if 0 < s < Status.PARTIAL])
def test_every_fault_of_a_store_leaves_no_visible_key(one, faulty, status):
    with attach(one, faulty, retries=0) as connector:
        faulty.script(Op.STORE, [0, status])
        put = connector.put(hashes(0, 1), [0, 1])
        assert put.status.tolist() == [0, status]
        assert put.nbytes == one.pool.page_nbytes
        assert connector.exists(hashes(0, 1)).pages.tolist() == [True, False]
        assert connector.put(hashes(1), [1]).ok.all()


@pytest.mark.parametrize("lie", [Lie.TOO_FEW, Lie.TOO_MANY, Lie.SHORT_BYTES])
@pytest.mark.parametrize("op", list(Op))
def test_a_result_that_does_not_add_up_is_not_believed(one, faulty, lie, op):
    """Case 6: too few results, and a transfer that was short without saying which."""
    with attach(one, faulty, retries=0) as connector:
        filled(one, connector)
        faulty.script(op, lie)
        call = connector.put if op is Op.STORE else connector.get
        outcome = call(hashes(*range(7)), range(7))
        assert outcome.counts() == {"BACKEND_ERROR": 7}
        assert outcome.nbytes == 0
        if op is Op.LOAD:
            assert outcome.dirty.all()
        stats = connector.stats()
        assert f"{call.__name__}.rate" not in stats or op is Op.STORE
        assert stats[f"{call.__name__}.backend_error"] == 7


def test_a_lie_that_a_retry_disproves_is_healed(one, faulty):
    with attach(one, faulty) as connector:
        content = filled(one, connector)
        faulty.script(Op.LOAD, Lie.SHORT_BYTES)
        assert connector.get(hashes(*range(7)), range(7)).ok.all()
        assert same(one.read(range(7)), content)


def test_a_failed_call_has_no_bytes_and_no_rate(one, faulty):
    """Case 27."""
    with attach(one, faulty, retries=0) as connector:
        faulty.script(Op.STORE, UnavailableError("down"))
        put = connector.put(hashes(0, 1), [0, 1])
        assert put.causes[0] == "down"
        stats = connector.stats()
        assert stats["put.backend_error"] == 2
        assert not {"put.bytes", "put.seconds", "put.rate", "put.ok"} & stats.keys()


@pytest.mark.parametrize("step", [UnavailableError("down"), Lie.TOO_FEW, Lie.TOO_MANY])
def test_a_store_that_cannot_say_has_no_hits_and_is_logged_once(one, faulty, caplog, step):
    with attach(one, faulty) as connector:
        filled(one, connector)
        faulty.script_exists(step, step)
        for _ in range(2):
            hits = connector.exists(hashes(0, 1))
            assert hits.pages.tolist() == [False, False]
        assert connector.stats()["exists.backend_error"] == 2
        warnings = [r for r in caplog.records if r.levelname == "WARNING"]
        assert len(warnings) == 1
        assert "exists on faulty(memory) fails" in warnings[0].getMessage()
        assert connector.exists(hashes(0, 1)).prefix == 2


# Case 19: exists is true, and then the page is gone.


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_page_that_vanished_after_exists_is_remembered_for_a_while(one, faulty):
    clock = Clock()
    with attach(one, faulty, clock=clock, negative_ttl=5.0) as connector:
        content = filled(one, connector, 4)
        names = hashes(0, 1, 2, 3)
        gone = connector.keys.keys([b"page2"])
        assert connector.exists(names).prefix == 4
        faulty.inner.remove(gone)
        faulty.claims |= set(gone)  # the store goes on saying that it is there
        got = connector.get(names, [4, 5, 6, 7])
        assert got.status.tolist() == [0, 0, Status.ABSENT, 0]
        assert got.prefix == 2
        assert connector.stats()["get.absent_after_exists"] == 1
        assert connector.exists(names).pages.tolist() == [True, True, False, True]
        clock.now = 5.1
        assert connector.exists(names).prefix == 4, "then the store is believed again"
        connector.get(names, [4, 5, 6, 7])
        assert connector.exists(names).prefix == 2
        one.write([2], {name: value[[2]] for name, value in content.items()})
        assert connector.put(hashes(2), [2]).ok.all()
        assert connector.exists(names).prefix == 4, "put heals at once"
        assert connector.get(names, [4, 5, 6, 7]).ok.all()
        assert same(one.read([4, 5, 6, 7]), content)


def test_a_page_that_was_never_seen_is_found_as_soon_as_somebody_stores_it(one, faulty):
    with attach(one, faulty) as connector, attach(one, faulty.inner) as other:
        assert connector.get(hashes(0), [0]).counts() == {"ABSENT": 1}
        assert other.put(hashes(0), [1]).ok.all()
        assert connector.exists(hashes(0)).prefix == 1
        assert "get.absent_after_exists" in connector.stats()
        assert connector.stats()["get.absent_after_exists"] == 0


def test_half_a_page_that_vanished_is_partial_and_remembered(one, faulty):
    with attach(one, faulty, head_group=2) as connector:
        filled(one, connector)
        assert connector.exists(hashes(0, 1)).prefix == 2
        gone = connector.keys.keys([b"page1"])[1:]
        faulty.inner.remove(gone)
        got = connector.get(hashes(0, 1), [0, 1])
        assert got.status.tolist() == [0, Status.PARTIAL]
        assert got.causes[1] == "1 of 2 objects are absent"
        assert got.dirty.tolist() == [False, True]
        faulty.claims |= set(gone)
        assert connector.exists(hashes(0, 1)).prefix == 1


# Case 20: the lease.


@pytest.mark.parametrize("want", ["auto", "staged"])
def test_a_load_that_outlives_the_lease_is_a_miss(one, want):
    """The clock passes the lease while the load is under way, and the size is right."""
    clock = Clock()

    class Leasing(Wrapper):
        capabilities = Capabilities(lease_seconds=5.0)

        def submit(self, batch):
            transfer = super().submit(batch)
            clock.now += 5.1
            return transfer

    with Leasing(MemoryBackend()) as store, attach(one, store, clock=clock, want=want) as connector:
        filled(one, connector, 2)
        before = one.snapshot()
        got = connector.get(hashes(0, 1), [0, 1])
        assert got.counts() == {"LEASE_EXPIRED": 2}
        assert got.nbytes == 0
        assert got.dirty.all() == (want == "auto")
        if want == "staged":
            assert one.untouched_outside([], before)
        assert connector.stats()["get.lease_expired"] == 2


# Late, and never.


def test_a_flipped_byte_and_two_swapped_objects_are_misses(one):
    """Case 29."""
    with MemoryBackend() as store, attach(one, store) as connector:
        content = filled(one, connector, 4)
        flip, a, b = connector.keys.keys([b"page0", b"page1", b"page2"])
        found = store.objects.objects
        damaged = bytearray(found[flip].data)
        damaged[17] ^= 1
        found[flip].data = bytes(damaged)
        found[a], found[b] = found[b], found[a]
        got = connector.get(hashes(0, 1, 2, 3), [4, 5, 6, 7])
        assert got.status.tolist() == [Status.CHECKSUM] * 3 + [OK]
        assert got.prefix == 0
        assert same(one.read([7]), {n: v[[3]] for n, v in content.items()})


def test_an_object_of_another_size_is_no_hit(one):
    """Cases 4 and 6: half the bytes, and one byte, under the right key."""
    with MemoryBackend() as store, attach(one, store) as connector:
        filled(one, connector, 3)
        half, tiny = connector.keys.keys([b"page0", b"page1"])
        store.objects.put(half, b"x" * 192)
        store.objects.put(tiny, b"x")
        assert connector.exists(hashes(0, 1, 2)).pages.tolist() == [False, False, True]
        before = one.snapshot()
        got = connector.get(hashes(0, 1), [0, 1])
        assert got.counts() == {"SIZE_MISMATCH": 2}
        assert one.untouched_outside([], before)
        one.write([0], one.random(1))
        assert connector.put(hashes(0), [0]).ok.all(), "put replaces the wrong size"
        assert connector.exists(hashes(0)).prefix == 1


def test_a_full_store_says_no_space_and_stays_healthy(one):
    with MemoryBackend(ObjectStore(3 * 384)) as store, attach(one, store) as connector:
        content = one.random(8)
        one.write(range(8), content)
        assert connector.put(hashes(0, 1, 2), range(3), pin=True).ok.all()
        put = connector.put(hashes(3, 4), [3, 4])
        assert put.counts() == {"NO_SPACE": 2}
        assert connector.exists(hashes(*range(5))).prefix == 3
        connector.remove(hashes(0))
        assert connector.put(hashes(3), [3]).ok.all()


def test_a_store_closed_underneath_is_one_typed_error(one):
    store = MemoryBackend()
    connector = attach(one, store)
    store.close()
    for call in (connector.put, connector.get):
        with pytest.raises(ClosedError, match="memory"):
            call(hashes(0), [0])
    assert connector.exists(hashes(0)).prefix == 0
    assert connector.quarantined() == []
    connector.close()


# Wear: handles and threads after thousands of failures, and everything at once.


def handles():
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def test_two_thousand_pages_with_every_third_failing_leak_nothing(one):
    """Case 17, in chunks: fds, threads, quarantine and slots are back where they were."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Faulty(MemoryBackend(), dirt=Dirt.HALF) as faulty:
        baseline = handles()
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 128), hard))
        try:
            with attach(one, faulty, want="staged", retries=0) as connector:
                for start in range(0, 2000, 8):
                    names = hashes(*range(start, start + 8))
                    fails = [ERROR if (start + n) % 3 == 0 else 0 for n in range(8)]
                    for op in Op:  # staging moves half of its eight slots at a time
                        faulty.script(op, fails[:4], fails[4:])
                    put = connector.put(names, range(8))
                    got = connector.get(names, range(8))
                    assert put.status.tolist() == got.status.tolist() == fails
                assert connector.quarantined() == []
                assert len(connector._staging._free) == connector._staging.slots
                stats = connector.stats()
                assert stats["put.ok"] + stats["put.backend_error"] == 2000
                assert stats["put.backend_error"] == len(range(0, 2000, 3))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert handles() == baseline


@pytest.mark.parametrize("want", ["auto", "staged"])
@pytest.mark.parametrize("seed", range(4))
def test_random_faults_never_make_wrong_hits(want, seed):
    """Whatever fails, a page that is a hit has its bytes, and a clean miss has its old ones."""
    rng = np.random.default_rng(seed)
    rates = {ERROR: 0.1, Status.ABSENT: 0.05, Status.CHECKSUM: 0.05, Status.TIMEOUT: 0.02}
    one = held("cplshd", pages=8)
    inner = Limited(Delayed(MemoryBackend(), (0.0, 0.001), seed=seed), max_keys_per_batch=5)
    faulty = Faulty(inner, seed=seed, rates=rates, dirt=Dirt.HALF)
    with Metered(faulty) as store:
        options = {"head_group": 2, "want": want, "batch_bytes": 3 * 384}
        with attach(one, store, **options) as connector:
            content, stored = one.random(8), set()
            for _ in range(25):
                pages = rng.permutation(8)[: rng.integers(1, 9)].tolist()
                one.write(pages, {n: v[pages] for n, v in content.items()})
                put = connector.put(hashes(*pages), pages)
                stored |= {page for page, ok in zip(pages, put.ok, strict=True) if ok}
                targets = rng.permutation(8)[: len(pages)].tolist()
                before, old = one.snapshot(), one.read(targets)
                got = connector.get(hashes(*pages), targets)
                assert one.untouched_outside(targets, before)
                now = one.read(targets)
                for at, page in enumerate(pages):
                    if got.ok[at]:
                        assert all((now[n][at] == content[n][page]).all() for n in now)
                    elif not got.dirty[at]:
                        assert all((now[n][at] == old[n][at]).all() for n in now)
            faulty.rates.clear()
            assert connector.get(hashes(*sorted(stored)), sorted(stored)).ok.all()


def test_an_outcome_without_dirty_flags_is_taken_for_dirty(one):
    class Terse(Wrapper):
        def submit(self, batch):
            transfer = super().submit(batch)
            wait = transfer.wait

            def terse(timeout=None):
                outcome = wait(timeout)
                return Outcome(outcome.status, outcome.nbytes, outcome.causes)

            transfer.wait = terse
            return transfer

    with Terse(MemoryBackend()) as store, attach(one, store) as connector:
        assert connector.get(hashes(0), [0]).dirty.tolist() == [True]
