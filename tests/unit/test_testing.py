"""The test tools themselves: guards notice, the oracle is right, and the suite can fail."""

import inspect
import os

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from kvconnect.backend import Op, Outcome, Status
from kvconnect.cover import cover
from kvconnect.layout import Axis, Layout
from kvconnect.memory import MemoryBackend, ObjectStore
from kvconnect.placement import Placement
from kvconnect.reshard import plan_copy, reshard
from kvconnect.testing import strategies
from kvconnect.testing.machine import backend_machine
from kvconnect.testing.memory import GuardedBuffer, Objects, canary, payload
from kvconnect.testing.oracle import (
    byte_copies,
    byte_offsets,
    cut_indices,
    elements,
    global_elements,
    maximal_runs,
)
from kvconnect.testing.peer import Peer
from kvconnect.testing.suite import BackendSuite, keys
from kvconnect.testing.suite.base import put, stored
from kvconnect.wrappers import Wrapper

QUICK = settings(max_examples=60, deadline=None)

# Guarded memory


@pytest.mark.parametrize("offset", [0, 64, 4095])
def test_a_buffer_lies_where_it_says(offset):
    buffer = GuardedBuffer(100, offset)
    assert buffer.region.address % 4096 == offset
    assert buffer.region.nbytes == len(buffer.view) == 100
    assert buffer.view.ctypes.data == buffer.region.address


@pytest.mark.parametrize("at", [-4096, -1, 100, 4195])
def test_guards_notice_one_byte(at):
    buffer = GuardedBuffer(100)
    buffer.view[:] = 7
    buffer.check()
    buffer._all[buffer.offset + at] ^= 1
    with pytest.raises(AssertionError, match=f"1 guard bytes changed, the first at offset {at}"):
        buffer.check()


def test_gaps_inside_the_region_are_guards_too():
    held = Objects([[10, 20], [5]], gap=8)
    held.write(0, payload("a", 30))
    held.check()
    assert held.read(0) == payload("a", 30)
    assert held.untouched(1)
    assert not held.untouched(0)
    held.buffer.view[held.places[1][0] + 5] ^= 1
    with pytest.raises(AssertionError):
        held.check()


def test_shifted_canaries_are_noticed():
    pattern = canary(20000)
    for shift in (1, 2, 64, 256, 512, 4096):
        assert (pattern[shift:] != pattern[:-shift]).mean() > 0.9


# Oracle


def test_elements_of_a_padded_layout():
    layout = Layout((Axis("head", 2, 10), Axis("dim", 2, 3)), itemsize=2, offset=1)
    assert elements(layout) == {
        (("dim", 0), ("head", 0)): 1,
        (("dim", 0), ("head", 1)): 11,
        (("dim", 1), ("head", 0)): 4,
        (("dim", 1), ("head", 1)): 14,
    }
    assert byte_offsets(layout, {"head": 1}) == {11, 12, 14, 15}
    assert cut_indices(layout, {"head"}) == [{"head": 0}, {"head": 1}]
    assert maximal_runs(byte_offsets(layout)) == [(1, 2), (4, 2), (11, 2), (14, 2)]


def test_global_elements_are_shifted_by_the_placement():
    held = Placement.tensor_parallel(layers=1, heads=4, rank=1, size=2)
    layout = Layout.packed({"layer": 1, "head": 2}, 2)
    found = global_elements(layout, held)
    assert found == {(("head", 2), ("layer", 0)): 0, (("head", 3), ("layer", 0)): 2}


# The planners against the oracle


@QUICK
@given(st.data())
def test_cover_is_the_fewest_runs_of_the_very_bytes(data):
    layout = data.draw(strategies.layouts())
    cut = data.draw(strategies.cuts(layout))
    found = cover(layout, cut)
    starts = found.run_offsets().astype(np.int64)
    for at in cut_indices(layout, cut)[:4]:
        shift = sum(layout.axis(name).stride * step for name, step in at.items())
        runs = [(int(start) + shift, found.run) for start in starts]
        offsets = [start + byte for start, run in runs for byte in range(run)]
        assert len(offsets) == len(set(offsets))
        assert set(offsets) == byte_offsets(layout, at)
    # Fewest runs of equal size: one run exactly where the bytes have no gap.
    one = len(maximal_runs(byte_offsets(layout, dict.fromkeys(cut, 0)))) == 1
    assert (found.runs == 1) == one


@QUICK
@given(st.data())
def test_plan_copy_moves_every_byte_to_its_place(data):
    src = data.draw(strategies.layouts(itemsize=2))
    dst = data.draw(strategies.layouts(itemsize=2, extents=src.extents))
    plan = plan_copy(src, dst)
    assert moved(plan) == byte_copies(src, dst)


def moved(plan):
    source, target = (offsets.tolist() for offsets in plan.offsets())
    pairs = [(t + b, s + b) for s, t in zip(source, target, strict=True) for b in range(plan.run)]
    assert len(pairs) == len(dict(pairs)), "no byte is written twice"
    return dict(pairs)


@QUICK
@given(st.data())
def test_reshard_moves_what_both_ranks_hold(data):
    layers, heads = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    rest = {"page": 2, "slot": 2, "dim": 2}
    ours, theirs = (data.draw(strategies.placements(layers, heads)) for _ in range(2))
    src, dst = (data.draw(strategies.held_layouts(p, rest)) for p in (ours, theirs))
    plan = reshard(src, ours, dst, theirs)
    at = {"page": 0}
    here, there = global_elements(src, ours, at), global_elements(dst, theirs, at)
    wanted = {there[i] + b: here[i] + b for i in here.keys() & there.keys() for b in range(2)}
    assert (plan is None) == (not wanted)
    if plan is not None:
        assert moved(plan) == wanted


@QUICK
@given(strategies.batches())
def test_batches_are_whole(drawn):
    held, names = drawn
    batch = held.batch(Op.STORE, names)
    assert batch.object_nbytes().tolist() == held.sizes
    inside = batch.address - np.uint64(held.region.address) + batch.nbytes
    assert (inside <= np.uint64(held.region.nbytes)).all()


# The suite can fail: each broken store is caught by some test of it


class Broken(Wrapper):
    """A store with one bug."""

    def __init__(self):
        super().__init__(MemoryBackend(ObjectStore()))


class IgnoresSize(Broken):
    def exists(self, names, nbytes):
        return np.array([size is not None for size in self.inner.objects.sizes(names)])


class StoresNothing(Broken):
    def submit(self, batch):
        return Finished(batch, Status.BACKEND_ERROR)


class SortsRuns(Broken):
    def submit(self, batch):
        for key in range(len(batch)):
            rows = slice(int(batch.first[key]), int(batch.first[key + 1]))
            order = np.argsort(batch.address[rows]) if batch.op is Op.STORE else slice(None)
            batch.address[rows] = batch.address[rows][order]
            batch.nbytes[rows] = batch.nbytes[rows][order]
        return self.inner.submit(batch)


class KeepsTheFirstBytes(Broken):
    def submit(self, batch):
        sizes = self.inner.objects.sizes(batch.keys)
        if batch.op is Op.STORE and len(batch) and None not in sizes:
            return Finished(batch, Status.OK)
        return self.inner.submit(batch)


class Finished:
    """A transfer that did nothing and says `status`."""

    def __init__(self, batch, status):
        done = status is Status.OK
        self.outcome = Outcome(
            np.full(len(batch), status, dtype=np.uint8),
            int(batch.nbytes.sum()) if done else 0,
            dirty=np.zeros(len(batch), dtype=np.bool_) if batch.op is Op.LOAD else None,
        )

    def done(self):
        return True

    def wait(self, timeout=None):
        return self.outcome

    def cancel(self):
        pass


class ChecksNoRegion(Broken):
    def submit(self, batch):
        try:
            return self.inner.submit(batch)
        except OSError:
            return Finished(batch, Status.BACKEND_ERROR)


class ClearsTooMuch(Broken):
    def clear(self, prefix):
        return self.inner.clear(prefix[:1])


class WritesBeyond(Broken):
    def submit(self, batch):
        import ctypes

        transfer = self.inner.submit(batch)
        outcome = transfer.wait(5)
        if batch.op is Op.LOAD and len(batch) and outcome.ok.all():
            ctypes.memset(int(batch.address[0] + batch.nbytes[0]), 0, 1)
        return transfer


class WorksAfterClose(Broken):
    def close(self):
        pass


class ForgetsToUnregister(Broken):
    def register(self, regions):
        self.inner.register(regions)
        return self.inner.register(regions)


BUGS = {
    IgnoresSize: "test_another_size_is_a_miss",
    SortsRuns: "test_round_trip",
    KeepsTheFirstBytes: "test_other_bytes_under_a_key",
    ChecksNoRegion: "test_memory_that_was_never_registered_is_refused",
    ClearsTooMuch: "test_clear_of_neighbouring",
    WritesBeyond: "test_a_miss_is_a_status|test_partial_hits|test_round_trip",
    WorksAfterClose: "test_nothing_works_after_close",
    ForgetsToUnregister: "test_registrations_are_counted",
}

ARGUMENTS = {
    "asked": 2305,
    "shape": "scattered",
    "offset": 64,
    "second": 2304,
    "op": Op.STORE,
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_the_suite_catches(bug, tmp_path):
    class Suite(BackendSuite):
        def open_store(self, path):
            return bug()

    names = [n for word in BUGS[bug].split("|") for n in dir(Suite) if n.startswith(word)]
    caught = []
    for name in names:
        test = getattr(Suite(), name)
        wanted = inspect.signature(test).parameters
        given_ = {**ARGUMENTS, "tmp_path": tmp_path, "store": Suite().open_store(tmp_path)}
        try:
            test(**{n: given_[n] for n in wanted})
        except (AssertionError, pytest.fail.Exception):
            caught.append(name)
    assert caught, f"{names} passed with {bug.__name__}"


def test_abilities_decide_what_is_collected():
    class Plain(BackendSuite):
        pass

    class Durable(Plain):
        durable = True
        lists = False

    def tests(suite):
        return {n for n in dir(suite) if n.startswith("test_") and callable(getattr(suite, n))}

    assert tests(Durable) - tests(Plain) == {
        "test_objects_survive_closing",
        "test_changes_survive_closing",
    }
    assert tests(Plain) - tests(Durable) == {"test_list"}
    assert "test_round_trip" in tests(Durable)


def test_the_suite_helpers_compare_bytes():
    with MemoryBackend() as store:
        put(store, keys(1), [64], "one")
        with pytest.raises(AssertionError):
            stored(store, keys(1), [64], "two")


@pytest.mark.parametrize("bug", [KeepsTheFirstBytes, ClearsTooMuch, IgnoresSize, StoresNothing])
def test_the_machine_catches(bug):
    machine = backend_machine(lambda: bug, durable=False)
    # Found is enough; shrinking the example would take minutes.
    found = {"phases": [Phase.generate], "report_multiple_bugs": False}
    few = settings(max_examples=200, deadline=None, database=None, derandomize=True, **found)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=few)


def test_a_peer_answers_in_its_own_process():
    names, sizes = keys(3), [1, 480, 2304]
    with Peer("kvconnect.memory:open_backend", "", {"capacity": "1MiB"}) as peer:
        assert peer.pid != os.getpid()
        assert not peer.answered()
        assert peer.ask("put", keys=names[:2], sizes=sizes[:2])["status"] == [0, 0]
        got = peer.ask("get", keys=names, sizes=sizes)
        assert got == {"status": [0, 0, Status.ABSENT], "right": [True, True, False]}
        assert peer.ask("exists", keys=names, sizes=sizes)["found"] == [True, True, False]
        storm = peer.ask("storm", keys=names, sizes=sizes, versions=["a", ""], rounds=4)
        assert storm == {"failed": 0}
        assert peer.ask("get", keys=names, sizes=sizes)["right"] == [True] * 3
        peer.kill()
        with pytest.raises(ProcessLookupError):
            os.kill(peer.pid, 0)


def test_a_peer_that_dies_is_a_failure_not_a_hang(capfd):
    peer = Peer("kvconnect.memory:open_backend", "", {"capacity": "nonsense"})
    with peer, pytest.raises(AssertionError, match="ended with 1"):
        peer.receive()
    assert "nonsense" in capfd.readouterr().err
