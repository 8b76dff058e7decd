"""Transfers: part batches, outcomes that are not believed, the life of a handle."""

import numpy as np
import pytest

from kvconnect.backend import Op, Outcome, Status
from kvconnect.testing.memory import Objects
from kvconnect.testing.suite import keys
from kvconnect.transfers import BatchTransfer, TimedTransfer, select, verified


def test_select_keeps_each_keys_runs():
    held = Objects([[1], [2, 3, 4], [5, 6], [7]])
    batch = held.batch(Op.LOAD, keys(4), ttl=3.0, pin=True)
    part = select(batch, np.array([3, 1], dtype=np.int64))
    assert part.keys == [keys(4)[3], keys(4)[1]]
    assert part.nbytes.tolist() == [7, 2, 3, 4]
    assert part.first.tolist() == [0, 1, 4]
    assert (part.op, part.ttl, part.pin) == (Op.LOAD, 3.0, True)
    places = [held.places[3][0], *held.places[1]]
    assert (part.address - np.uint64(held.region.address)).tolist() == places
    assert len(select(batch, np.zeros(0, dtype=np.int64))) == 0


def test_verified_counts_an_empty_batch():
    batch = Objects([[1]]).batch(Op.STORE, [])
    honest = Outcome(np.zeros(0, dtype=np.uint8), 0)
    assert verified(batch, honest) is honest
    assert len(verified(batch, Outcome(np.zeros(0, dtype=np.uint8), 5)).status) == 0


@pytest.mark.parametrize("op", Op)
def test_what_is_not_settled_reads_as_a_time_out(op):
    transfer = BatchTransfer(Objects([[8]] * 3).batch(op, keys(3)), deadline=0.01)
    transfer.settle(0, Status.OK)
    transfer.settle(1, Status.ABSENT, "gone", dirty=True)
    outcome = transfer.wait()
    assert outcome.status.tolist() == [Status.OK, Status.ABSENT, Status.TIMEOUT]
    assert (outcome.nbytes, dict(outcome.causes)) == (8, {1: "gone"})
    if op is Op.LOAD:
        assert outcome.dirty.tolist() == [False, True, True]
    else:
        assert outcome.dirty is None
    assert not transfer.done()
    transfer.cancel()
    assert transfer.cancelled
    assert not transfer.done(), "cancel is a request"
    transfer.finish()
    assert transfer.done()
    assert transfer.settled(0)


@pytest.mark.parametrize("op", Op)
def test_many_are_settled_at_once(op):
    transfer = TimedTransfer(Objects([[8], [16], [32], [64]]).batch(op, keys(4)), seconds=0.01)
    transfer.settle_ok([3, 1])
    transfer.settle_ok([])
    outcome = transfer.wait(0)
    assert outcome.status.tolist() == [Status.TIMEOUT, Status.OK, Status.TIMEOUT, Status.OK]
    assert outcome.nbytes == 80
    transfer.settle_rest(Status.BACKEND_ERROR, "broken", dirty=True)
    outcome = transfer.wait(0)
    bad = Status.BACKEND_ERROR
    assert outcome.status.tolist() == [bad, Status.OK, bad, Status.OK]
    assert dict(outcome.causes) == {0: "broken", 2: "broken"}
    if op is Op.LOAD:
        assert outcome.dirty.tolist() == [True, False, True, False]


def test_an_outcome_is_a_copy():
    transfer = BatchTransfer(Objects([[8]]).batch(Op.LOAD, keys(1)), deadline=0.01)
    early = transfer.wait(0)
    transfer.settle(0, Status.OK)
    assert early.status.tolist() == [Status.TIMEOUT]
    assert early.dirty.tolist() == [True]
