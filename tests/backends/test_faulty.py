"""Faulty produces what real stores do wrong (cases 14, 18, 19), and wrong results are caught."""

import pytest
from hypothesis import settings

from kvconnect.backend import Op, Status
from kvconnect.errors import RegistrationError, UnavailableError
from kvconnect.memory import MemoryBackend
from kvconnect.region import chunks
from kvconnect.testing.machine import backend_machine
from kvconnect.testing.memory import GuardedBuffer, Objects
from kvconnect.testing.suite import BackendSuite, keys, move
from kvconnect.testing.suite.base import content, expect, filled, get, put, stored
from kvconnect.transfers import verified
from kvconnect.wrappers import Dirt, Faulty, Lie


@pytest.fixture
def faulty():
    with Faulty(MemoryBackend(), seed=1) as store:
        yield store


def test_one_status_of_seven_once(faulty):
    names, sizes = keys(7), [2304] * 7  # case 18
    faulty.script(Op.STORE, [0, 0, 0, 0, 0, Status.BACKEND_ERROR, 0])
    outcome = put(faulty, names, sizes)
    assert outcome.prefix == 5
    assert outcome.counts() == {"OK": 6, "BACKEND_ERROR": 1}
    assert outcome.nbytes == 6 * 2304
    assert faulty.exists(names, sizes).tolist() == [True] * 5 + [False, True]
    assert put(faulty, names[5:6], sizes[5:6]).prefix == 1, "the step was used once"
    stored(faulty, names, sizes)


@pytest.mark.parametrize(("dirt", "changed"), [(Dirt.NONE, 0), (Dirt.HALF, 1152), (Dirt.ALL, 2304)])
def test_a_failed_load_leaves_the_dirt_it_is_told_to(dirt, changed):
    with Faulty(MemoryBackend(), dirt=dirt) as store:
        names = keys(3)
        put(store, names, [2304] * 3)
        store.script(Op.LOAD, [0, Status.TIMEOUT])
        held = Objects([[2000, 304]] * 3)
        with store.register([held.region]):
            outcome = move(store, held.batch(Op.LOAD, names))
        expect(outcome, Status.OK, Status.TIMEOUT, Status.OK)
        assert outcome.dirty.tolist() == [False, changed > 0, False]
        assert held.read(0) == content(names[0], 2304)
        spoiled = held.read(1)
        if dirt is Dirt.NONE:
            assert held.untouched(1)
        else:
            assert spoiled == b"\xa5" * changed + content(names[1], 2304)[changed:]
        held.check()


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("lie", [Lie.TOO_FEW, Lie.TOO_MANY, Lie.SHORT_BYTES])
def test_wrong_results_are_recognised(faulty, op, lie):
    names = keys(3)
    held = filled([[64]] * 3, names)
    with faulty.register([held.region]):
        move(faulty, held.batch(Op.STORE, names))
        faulty.script(op, lie)
        batch = held.batch(op, names)
        told = faulty.submit(batch).wait(5)
    assert (len(told.status) - 3, told.nbytes - 192) != (0, 0)
    believed = verified(batch, told)
    expect(believed, *[Status.BACKEND_ERROR] * 3)
    assert believed.nbytes == 0
    assert " B" in believed.causes[2] or "results" in believed.causes[2]
    assert (believed.dirty is not None and believed.dirty.all()) == (op is Op.LOAD)


def test_an_honest_outcome_is_returned_as_it_is(faulty):
    names, held = keys(3), filled([[64]] * 3, keys(3))
    with faulty.register([held.region]):
        move(faulty, held.batch(Op.STORE, names[:2]))
        batch = held.batch(Op.LOAD, names)
        outcome = faulty.submit(batch).wait(5)
    assert verified(batch, outcome) is outcome
    expect(outcome, Status.OK, Status.OK, Status.ABSENT)


def test_a_forgotten_store_is_caught_by_the_suite(faulty):
    faulty.script(Op.STORE, Lie.FORGOTTEN)
    with pytest.raises(AssertionError):
        BackendSuite().test_partial_hits_keep_their_order(faulty)


def test_exists_lies_and_fails(faulty):
    names, sizes = keys(4), [480] * 4  # case 19
    put(faulty, names, sizes)
    faulty.remove(names[2:3])
    faulty.claims = {names[2]}
    assert faulty.exists(names, sizes).all()
    outcome, _ = get(faulty, names, sizes)
    assert outcome.prefix == 2
    assert outcome.counts() == {"OK": 3, "ABSENT": 1}
    faulty.script_exists(UnavailableError("store is gone"), Lie.TOO_FEW, Lie.TOO_MANY)
    with pytest.raises(UnavailableError, match="gone"):
        faulty.exists(names, sizes)
    assert len(faulty.exists(names, sizes)) == 3
    assert len(faulty.exists(names, sizes)) == 5
    assert len(faulty.exists(names, sizes)) == 4


def test_registration_fails_at_the_third_chunk(faulty):
    buffer = GuardedBuffer(4096)  # case 14
    parts = chunks(buffer.region, 512, 1024)
    assert len(parts) == 4
    faulty.refuse_region(2)
    with pytest.raises(RegistrationError, match=rf"{buffer.region.name}#2.*memlock"):
        faulty.register(parts)
    assert faulty.released == [parts[1].name, parts[0].name]
    assert faulty.refused == parts[2].name
    assert not faulty.inner._registrations.regions
    with faulty.register(parts) as registration:
        assert registration.regions == tuple(parts)
        assert len(faulty.inner._registrations.regions) == 4
    assert not faulty.inner._registrations.regions
    assert faulty.released[2:] == [part.name for part in reversed(parts)]


def test_submit_raises_what_it_is_told(faulty):
    held = filled([[8]], keys(1))
    faulty.script(Op.STORE, UnavailableError("no route"))
    with faulty.register([held.region]):
        with pytest.raises(UnavailableError, match="no route"):
            faulty.submit(held.batch(Op.STORE, keys(1)))
        expect(move(faulty, held.batch(Op.STORE, keys(1))), Status.OK)


def test_chance_is_seeded_and_store_faults_are_not_visible():
    def run(seed):
        rates = {Status.BACKEND_ERROR: 0.2, Status.TIMEOUT: 0.2}
        with Faulty(MemoryBackend(), seed=seed, rates=rates) as store:
            outcome = put(store, keys(200), [64] * 200)
            assert (store.exists(keys(200), [64] * 200) == outcome.ok).all()
            return outcome.counts(), outcome.status.tolist()

    counts, statuses = run(1)
    assert statuses == run(1)[1] != run(2)[1]
    assert 20 < counts["BACKEND_ERROR"] < 60
    assert 20 < counts["TIMEOUT"] < 60


def open_unreliable():
    rates = {Status.BACKEND_ERROR: 0.15, Status.TIMEOUT: 0.15, Status.CHECKSUM: 0.1}
    return lambda: Faulty(MemoryBackend(), rates=rates, dirt=Dirt.HALF)


TestUnreliableMachine = backend_machine(open_unreliable, durable=False, faults=True).TestCase
TestUnreliableMachine.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
