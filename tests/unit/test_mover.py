"""The mover: nothing late, short, held or malformed is a hit, and no memory is ever forgotten."""

import numpy as np
import pytest

from kvconnect.backend import Op, Status
from kvconnect.errors import (
    BackendError,
    ClosedError,
    RegistrationError,
    TransferTimeoutError,
    UnavailableError,
)
from kvconnect.mover import WINDOW
from tests.unit.scripted_backend import (
    ABSENT,
    ERROR,
    OK,
    TIMEOUT,
    Rig,
    Scripted,
    Step,
    both,
    names,
    staged,
)


@both
@staged
def test_all_ok_is_all_ok(op, staged):
    rig = Rig(Scripted(), staged)
    outcome = rig.move(op)
    assert names(outcome) == ["OK"] * 6
    assert outcome.nbytes == 6 * 384
    assert rig.loaded() == [op is Op.LOAD] * 6
    assert (outcome.dirty is None) if op is Op.STORE else not outcome.dirty.any()
    assert rig.one.untouched_outside(range(6) if op is Op.LOAD else [], rig.before)


def test_a_staged_store_writes_nothing_back_into_the_pool():
    """What was gathered may be out of date by the time that it is stored."""
    store = Scripted()
    rig = Rig(store, staged=True)
    submit = store.submit
    later = rig.one.random(6, seed=3)
    store.submit = lambda batch: (rig.one.write(range(6), later), submit(batch))[1]
    assert rig.move(Op.STORE).ok.all()
    now = rig.one.read(range(6))
    assert all((now[name] == later[name]).all() for name in later)


WRONG = {
    "too few results": Step(status=[OK] * 5),
    "too many results": Step(status=[OK] * 7),
    "half the bytes": Step(nbytes=3 * 384),
    "no bytes": Step(nbytes=0),
    "typed error": Step(fail=BackendError("lost")),
    "foreign error": Step(fail=OSError(5, "I/O")),
    "empty error": Step(fail=RuntimeError()),
}


@both
@staged
@pytest.mark.parametrize("step", WRONG.values(), ids=WRONG.keys())
def test_a_malformed_result_is_no_success(op, staged, step):
    """Every page is a miss with a cause; only where staging shields it is the pool clean."""
    rig = Rig(Scripted(step), staged, retries=0)
    outcome = rig.move(op)
    assert names(outcome) == ["BACKEND_ERROR"] * 6
    assert outcome.nbytes == 0
    assert set(outcome.causes) == set(range(6))
    assert all(outcome.causes.values())
    if op is Op.LOAD:
        assert outcome.dirty.tolist() == [not staged] * 6
    if staged:
        assert rig.one.untouched_outside([], rig.before)
        assert rig.free_slots() == 6


@staged
def test_a_load_whose_backend_forgot_to_say_dirty_is_taken_for_dirty(staged):
    rig = Rig(Scripted(Step(status=[OK, ABSENT, OK, OK, OK, OK], no_dirty=True)), staged)
    assert rig.move().dirty.tolist() == [False, not staged, False, False, False, False]


def test_a_batch_that_was_never_taken_left_the_pool_clean():
    rig = Rig(Scripted(Step(refuse=UnavailableError("down")), Step(refuse=UnavailableError("no"))))
    outcome = rig.move()
    assert names(outcome) == ["BACKEND_ERROR"] * 6
    assert outcome.causes[5] == "no"
    assert not outcome.dirty.any()
    assert rig.one.untouched_outside([], rig.before)


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_only_keys_that_failed_in_the_backend_are_tried_again(retries):
    """Absent keys are not; a key that fails for good is tried 1 + retries times."""
    bad = Step(status=[ERROR])
    store = Scripted(Step(status=[OK, ERROR, ABSENT, OK, OK, OK]), *[bad] * 5)
    rig = Rig(store, retries=retries)
    assert names(rig.move()) == ["OK", "BACKEND_ERROR", "ABSENT", "OK", "OK", "OK"]
    assert [flown.batch.keys for flown in store.flown[1:]] == [["1.0"]] * retries


@staged
def test_a_retry_that_works_makes_the_page_whole(staged):
    store = Scripted(Step(status=[OK] * 3 + [ERROR] + [OK] * 8), Step(status=[OK]))
    rig = Rig(store, staged, per_page=2)
    outcome = rig.move()
    assert names(outcome) == ["OK"] * 6
    assert outcome.nbytes == 6 * 384
    assert not outcome.dirty.any()
    assert not outcome.causes
    assert rig.loaded() == [True] * 6
    first, again = (flown.batch for flown in store.flown)
    assert again.keys == ["1.1"]
    rows = slice(int(first.first[3]), int(first.first[4]))
    assert again.address.tolist() == first.address[rows].tolist()
    assert again.nbytes.tolist() == first.nbytes[rows].tolist()


@staged
def test_a_hanging_retry_holds_its_own_page_only(staged):
    """The pages that came in the first try are hits, with their bytes; one page is held."""
    store = Scripted(
        Step(status=[OK, ERROR, OK, OK, OK, OK]), Step(status=[TIMEOUT], hold=True, seconds=20)
    )
    rig = Rig(store, staged)
    outcome = rig.move()
    assert names(outcome) == ["OK", "TIMEOUT", "OK", "OK", "OK", "OK"]
    assert rig.loaded() == [True, False, True, True, True, True]
    assert outcome.dirty.tolist() == [False, not staged, False, False, False, False]
    assert rig.mover.quarantined() == ([] if staged else [1])
    if staged:
        assert rig.free_slots() == 5
    store.flown[1].held = False
    assert rig.mover.quarantined() == []
    if staged:
        assert rig.free_slots() == 6


@staged
@pytest.mark.parametrize("status", [[OK] * 6, [OK, OK, TIMEOUT, TIMEOUT, TIMEOUT, TIMEOUT]])
@pytest.mark.parametrize("seconds", [0, 20])
def test_a_load_that_still_holds_memory_is_no_hit(staged, status, seconds):
    """Whatever the statuses say, and however little time has gone by."""
    store = Scripted(Step(status=status, hold=True, seconds=seconds))
    rig = Rig(store, staged)
    outcome = rig.move()
    assert names(outcome) == ["TIMEOUT"] * 6
    assert outcome.nbytes == 0
    assert store.flown[0].cancelled
    if staged:
        assert rig.one.untouched_outside([], rig.before)
        assert not outcome.dirty.any()
        assert rig.free_slots() == 0
    else:
        assert outcome.dirty.all()
        assert rig.mover.quarantined() == list(range(6))
    store.flown[0].held = False
    assert rig.mover.quarantined() == []
    assert rig.move().ok.all()


def test_a_store_reports_what_is_stored_even_while_the_rest_hangs():
    rig = Rig(Scripted(Step(status=[OK, *[TIMEOUT] * 5], hold=True)))
    assert names(rig.move(Op.STORE)) == ["OK", *["TIMEOUT"] * 5]
    assert rig.mover.quarantined() == list(range(6))


@both
@staged
def test_what_finishes_after_the_deadline_is_no_success(op, staged):
    rig = Rig(Scripted(Step(seconds=10.5)), staged)
    outcome = rig.move(op)
    assert names(outcome) == ["TIMEOUT"] * 6
    assert outcome.nbytes == 0
    if staged:
        assert rig.one.untouched_outside([], rig.before)
    elif op is Op.LOAD:
        assert outcome.dirty.all()
    assert rig.mover.quarantined() == [], "it is done: nothing is held"


@pytest.mark.parametrize(("seconds", "status"), [(4.9, "OK"), (5.1, "LEASE_EXPIRED")])
@staged
def test_a_load_longer_than_the_lease_is_a_miss(staged, seconds, status):
    """Case 20: right size, within the deadline, after the lease."""
    rig = Rig(Scripted(Step(seconds=seconds), lease=5.0), staged)
    outcome = rig.move()
    assert names(outcome) == [status] * 6
    expected = status != "OK"
    assert outcome.dirty.tolist() == [expected and not staged] * 6
    if staged and expected:
        assert rig.one.untouched_outside([], rig.before)


def test_a_store_knows_no_lease():
    rig = Rig(Scripted(Step(seconds=9), lease=5.0))
    assert rig.move(Op.STORE).ok.all()


def test_pages_that_never_started_are_misses_and_clean():
    rig = Rig(Scripted(Step(seconds=11), *[Step()] * 5), batch_pages=1)
    outcome = rig.move(timeout=10)
    assert "OK" not in names(outcome)
    started = len(rig.store.flown)
    assert started == WINDOW
    assert outcome.dirty.tolist() == [n < started for n in range(6)]
    assert rig.one.untouched_outside(range(started), rig.before)


def test_no_time_at_all_starts_nothing():
    rig = Rig(Scripted())
    assert names(rig.move(timeout=0)) == ["TIMEOUT"] * 6
    assert rig.store.flown == []


@staged
@pytest.mark.parametrize("batch_pages", [1, 2, 4, 6])
def test_batches_are_bounded_and_few_are_under_way(staged, batch_pages):
    store = Scripted()
    rig = Rig(store, staged, batch_pages=batch_pages)
    most = 0
    submit = store.submit

    def counting(batch):
        nonlocal most
        flown = submit(batch)
        flown.taken = False
        wait = flown.wait

        def waited(timeout):
            flown.taken = True
            return wait(timeout)

        flown.wait = waited
        most = max(most, sum(not f.taken for f in store.flown))
        return flown

    store.submit = counting
    assert rig.move().ok.all()
    sizes = [len(flown.batch) for flown in store.flown]
    assert sum(sizes) == 6
    assert max(sizes) <= batch_pages
    assert most <= (2 if staged else WINDOW)


@staged
@pytest.mark.parametrize("error", [RegistrationError("outside"), ClosedError("closed")])
def test_an_error_of_the_whole_call_is_raised_and_forgets_no_flight(staged, error):
    """The first batch is under way and hangs when the third is refused."""
    store = Scripted(Step(hold=True, seconds=20), Step(), Step(refuse=error))
    rig = Rig(store, staged, batch_pages=1, slots=6)
    with pytest.raises(type(error)):
        # Staging collects the first of two before it starts a third: give it time for that.
        rig.move(timeout=30 if staged else 10)
    if staged:
        assert rig.free_slots() == 5
    else:
        assert rig.mover.quarantined() == [0]
    store.flown[0].held = False
    assert rig.mover.drain(0)
    if staged:
        assert rig.free_slots() == 6


@staged
def test_an_interrupt_forgets_no_flight(staged):
    store = Scripted(Step(fail=KeyboardInterrupt(), hold=True), Step(hold=True))
    rig = Rig(store, staged, batch_pages=3)
    with pytest.raises(KeyboardInterrupt):
        rig.move()
    if staged:
        assert rig.free_slots() == 0
    else:
        assert rig.mover.quarantined() == list(range(6))
    assert not rig.mover.drain(0)
    for flown in store.flown:
        flown.held = False
    assert rig.mover.drain(0)
    if staged:
        assert rig.free_slots() == 6


def test_a_refused_retry_is_a_status():
    rig = Rig(Scripted(Step(status=[OK] * 5 + [ERROR]), Step(refuse=ClosedError("gone"))))
    outcome = rig.move()
    assert names(outcome) == ["OK"] * 5 + ["BACKEND_ERROR"]
    assert outcome.causes == {5: "gone"}
    assert outcome.dirty.tolist() == [False] * 5 + [True], "the first try may have written"


def test_held_pages_are_refused_and_others_are_not():
    store = Scripted(Step(status=[TIMEOUT] * 2, hold=True))
    rig = Rig(store)
    rig.move(pages=[1, 4])
    with pytest.raises(TransferTimeoutError, match=r"\[4\] are still held"):
        rig.move(pages=[0, 4, 5])
    assert rig.move(pages=[0, 5]).ok.all()
    assert rig.mover.quarantined() == [1, 4]


def test_staging_slots_that_late_transfers_hold_are_a_timeout_not_an_error():
    store = Scripted(Step(status=[TIMEOUT] * 6, hold=True))
    rig = Rig(store, staged=True)
    rig.move()
    assert rig.free_slots() == 0
    rig.mover.clock = iter(np.arange(0, 99, 3.0)).__next__
    outcome = rig.move(timeout=10)
    assert names(outcome) == ["TIMEOUT"] * 6
    assert "no staging slots" in outcome.causes[0]
    assert not outcome.dirty.any()


def test_slots_of_a_late_transfer_are_used_again_once_it_is_quiet():
    """Also when it falls quiet while another call is waiting for them."""
    store = Scripted(Step(status=[TIMEOUT] * 6, hold=True))
    rig = Rig(store, staged=True)
    rig.move()
    late, looks = store.flown[0], []

    def done():
        looks.append(1)
        return len(looks) > 3

    late.done = done
    assert rig.move().ok.all()
    assert len(looks) > 3


@pytest.mark.parametrize(
    ("statuses", "page"),
    [
        ([OK, OK], "OK"),
        ([OK, ABSENT], "PARTIAL"),
        ([ABSENT, ABSENT], "ABSENT"),
        ([ABSENT, Status.CHECKSUM], "CHECKSUM"),
        ([OK, Status.IDENTITY], "IDENTITY"),
    ],
)
@staged
def test_a_page_is_as_good_as_its_worst_object(statuses, page, staged):
    rig = Rig(Scripted(Step(status=statuses * 6)), staged, per_page=2)
    outcome = rig.move()
    assert names(outcome) == [page] * 6
    assert outcome.nbytes == (6 * 384 if page == "OK" else 0)
    # The fake says of every object that is not OK that it is dirty.
    assert outcome.dirty.tolist() == [page != "OK" and not staged] * 6


def test_an_empty_move_is_a_no_op():
    rig = Rig(Scripted())
    outcome = rig.move(pages=[])
    assert (len(outcome.status), outcome.nbytes, rig.store.flown) == (0, 0, [])


def test_ttl_and_pin_reach_every_batch_and_the_retry():
    store = Scripted(Step(status=[OK, OK, ERROR]))
    rig = Rig(store, batch_pages=3)
    ids = np.arange(6, dtype=np.uint64)
    rig.mover.move(Op.STORE, [f"{n}" for n in range(6)], ids, 10, ttl=7.5, pin=True)
    assert [(f.batch.ttl, f.batch.pin) for f in store.flown] == [(7.5, True)] * 3
