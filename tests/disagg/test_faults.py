"""Faults with real processes, twenty rounds each, in the middle of transfers.

After every fault: the survivor's request ends in bounded time, its pages come back in bounded
time, they are used at once for something else and nothing late lands in them, the same pages
carry a good request afterwards, and at the end fds, threads and handles are where they were.
"""

import random
import signal
import socket
import time

import pytest

from kvconnect.disagg import keys as key_files
from tests.disagg.ranks import Rank, RankError, settles

ROUNDS = 20
SOURCE, TARGET = list(range(32)), list(range(4, 36))
BATCHES = 64
"""Of a request: 32 pages of 64 KiB in batches of 32 KiB."""
OUTCOME_SECONDS, QUIET_SECONDS = 3.0, 3.0
"""Far above what it takes: a busy machine is no fault."""
SILENCE = 0.8
"""Seconds of silence after which a stopped peer counts as lost."""
PAINT = 21930
STAGES = ("never", "always")


@pytest.fixture
def rng():
    return random.Random(5)


def prefill(name="p", stage="never", address="tcp://127.0.0.1:*", seed=1, **options):
    rank = Rank("prefill", name, stage=stage, **options)
    rank.address = rank.listen(address)
    rank.fill(len(SOURCE) * 16, seed)
    return rank


def decode(name="d", **options):
    rank = Rank("decode", name, **options)
    rank.paint(list(range(40)), PAINT)
    return rank


def meet(source, target):
    target.connect([source.address], 5.0)


def begin(source, target, name, way="push", seconds=15.0):
    target.receive(name, TARGET, seconds, way)
    source.send(name, SOURCE, seconds)


def good(source, target, name, seed=1, way="push"):
    """A whole request into the same pages, every byte checked, and none beside them."""
    for rank in (source, target):
        rank.slow(None)
    begin(source, target, name, way)
    assert target.wait(name, 15.0)[0] == "done", target.wait(name, 0)
    assert source.wait(name, 5.0)[0] == "done"
    assert target.quiet(name, 1.0)
    assert target.holds(TARGET, seed, PAINT)


def fails(rank, name, *words):
    """The request has failed, within bounded time, for one of these reasons."""
    state, reason, seconds = rank.wait(name, 10.0)
    assert state == "failed"
    assert any(word in reason for word in words), reason
    assert seconds < OUTCOME_SECONDS, (reason, seconds)


def pages_come_back(rank, name):
    """The request's pages are free within bounded time; they are painted at once."""
    started = time.monotonic()
    assert rank.quiet(name, 10.0)
    assert time.monotonic() - started < QUIET_SECONDS
    rank.paint(TARGET, PAINT)


def middle(rng, source):
    """Wait until some batches of the next request have been started, and the rest takes time."""
    count = source.batches(0, 0) + rng.randrange(2, 20)
    source.slow(count)
    return lambda: source.batches(count, 10.0)


@pytest.mark.parametrize("stage", STAGES)
def test_sigkill_of_prefill_and_restart_on_the_same_address(rng, stage):
    with decode() as target:
        with prefill(stage=stage) as first:
            address = first.address
            meet(first, target)
            good(first, target, "warm")
            first.kill()
        assert not settles(target, {"peers": 0, "links": 0})
        baseline = None
        for number in range(ROUNDS // 2):
            with prefill(stage=stage, address=address, seed=number) as source:
                meet(source, target)
                good(source, target, f"good{number}", number)
                target.paint(TARGET, PAINT)
                started = middle(rng, source)
                begin(source, target, f"r{number}")
                started()
                source.kill()
                fails(target, f"r{number}", "its process has ended", "another start")
                pages_come_back(target, f"r{number}")
                assert target.painted(list(range(40)), PAINT)
            if baseline is None:
                assert not settles(target, {"peers": 0, "links": 0})
                time.sleep(0.3)  # ZeroMQ closes the last socket in a thread of its own
                baseline = target.counts()
        assert not settles(target, baseline)
        assert target.quarantined() == []


@pytest.mark.parametrize("stage", STAGES)
def test_sigkill_of_decode(rng, stage):
    with prefill(stage=stage) as source:
        baseline = None
        for number in range(ROUNDS // 2):
            with decode(f"d{number}") as target:
                meet(source, target)
                good(source, target, f"good{number}")
                started = middle(rng, source)
                begin(source, target, f"r{number}")
                started()
                target.kill()
                fails(source, f"r{number}", "its process has ended", "the peer has closed or died")
                assert source.quiet(f"r{number}", QUIET_SECONDS)
            if baseline is None:
                assert not settles(source, {"peers": 0, "links": 0})
                time.sleep(0.3)
                baseline = source.counts()
        assert not settles(source, baseline)


@pytest.mark.parametrize("stage", STAGES)
def test_sigstop_of_prefill_keeps_its_pages_out_of_use_until_it_goes_on(rng, stage):
    with (
        prefill(stage=stage, peer_timeout=SILENCE) as source,
        decode(peer_timeout=SILENCE) as target,
    ):
        meet(source, target)
        good(source, target, "warm")
        baseline = source.counts(), target.counts()
        for number in range(ROUNDS // 2):
            target.paint(TARGET, PAINT)
            started = middle(rng, source)
            begin(source, target, f"r{number}")
            started()
            source.signal(signal.SIGSTOP)
            fails(target, f"r{number}", "silent for 0.8 s")
            assert not target.quiet(f"r{number}", 0.1)
            assert target.quarantined() == TARGET
            source.signal(signal.SIGCONT)
            pages_come_back(target, f"r{number}")
            fails(source, f"r{number}", "gave up", "lost")
            assert source.quiet(f"r{number}", QUIET_SECONDS)
            assert target.painted(list(range(40)), PAINT)
            meet(source, target)
            good(source, target, f"good{number}")
        assert not settles(source, baseline[0])
        assert not settles(target, baseline[1])


@pytest.mark.parametrize("stage", STAGES)
def test_sigstop_of_decode(rng, stage):
    with (
        prefill(stage=stage, peer_timeout=SILENCE) as source,
        decode(peer_timeout=SILENCE) as target,
    ):
        meet(source, target)
        good(source, target, "warm")
        baseline = source.counts(), target.counts()
        for number in range(ROUNDS // 2):
            target.paint(TARGET, PAINT)
            started = middle(rng, source)
            begin(source, target, f"r{number}")
            started()
            target.signal(signal.SIGSTOP)
            state, reason, seconds = source.wait(f"r{number}", 10.0)
            assert state == "failed" or stage == "never"
            assert seconds < OUTCOME_SECONDS
            assert source.quiet(f"r{number}", QUIET_SECONDS)
            target.signal(signal.SIGCONT)
            if state == "failed":
                assert "silent for 0.8 s" in reason
                fails(target, f"r{number}", "gave up", "lost")
                pages_come_back(target, f"r{number}")
                assert target.painted(list(range(40)), PAINT)
                meet(source, target)
            else:
                # Everything was written while it stood still, so it may be counted in.
                assert target.wait(f"r{number}", 10.0)[0] == "done"
                assert target.holds(TARGET, 1, PAINT)
            good(source, target, f"good{number}")
        assert not settles(source, baseline[0])
        assert not settles(target, baseline[1])


@pytest.mark.parametrize("way", ["push", "pull"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_abort_in_mid_transfer(rng, side, way):
    with prefill(stage="never") as source, decode() as target:
        meet(source, target)
        good(source, target, "warm", way=way)
        baseline = source.counts(), target.counts()
        mover = source if way == "push" else target
        for number in range(ROUNDS):
            target.paint(TARGET, PAINT)
            started = middle(rng, mover)
            begin(source, target, f"r{number}", way)
            started()
            (source if side == "prefill" else target).abort(f"r{number}")
            for rank in (target, source):
                fails(rank, f"r{number}", "the user has left")
            pages_come_back(target, f"r{number}")
            assert source.quiet(f"r{number}", QUIET_SECONDS)
            assert target.painted(list(range(40)), PAINT)
            if number % 5 == 0:
                good(source, target, f"good{number}", way=way)
        assert not settles(source, baseline[0])
        assert not settles(target, baseline[1])


def test_deadlines_about_when_it_is_over(rng):
    """A deadline that passes close to the end gives one outcome or the other, never a mixture."""
    with prefill(pace=0.0) as source, decode() as target:
        meet(source, target)
        began = time.monotonic()
        good(source, target, "warm")
        usual = time.monotonic() - began
        states = set()
        for number in range(ROUNDS * 2):
            target.paint(TARGET, PAINT)
            name = f"r{number}"
            begin(source, target, name, seconds=max(usual * rng.uniform(0.05, 1.5), 1e-3))
            state, reason, seconds = target.wait(name, 10.0)
            assert seconds < OUTCOME_SECONDS
            states.add(state)
            if state == "done":
                assert target.quiet(name, 1.0)
                assert target.holds(TARGET, 1, PAINT)
            else:
                pages_come_back(target, name)
            assert source.wait(name, 10.0)[0] in {"done", "failed"}
            assert source.quiet(name, QUIET_SECONDS)
            assert state == "done" or target.painted(list(range(40)), PAINT), reason
        assert states == {"done", "failed"}


def test_wrong_keys_reach_nothing_and_disturb_nobody():
    ours, theirs = key_files.generate(), key_files.generate()
    pair = [ours.public, ours.secret]
    with prefill(keys=pair) as source, decode(keys=pair) as target:
        meet(source, target)
        good(source, target, "warm")
        with decode("stranger", keys=[theirs.public, theirs.secret]) as stranger:
            baseline = source.counts()
            for number in range(ROUNDS):
                began = time.monotonic()
                with pytest.raises(RankError, match="no prefill rank answered"):
                    stranger.connect([source.address], 0.2)
                assert time.monotonic() - began < 2.0
                if number in {0, ROUNDS - 1}:
                    good(source, target, f"good{number}")
        assert not settles(source, baseline)


def test_noise_from_other_connections_leaves_nothing_behind(rng):
    with prefill() as source, decode() as target:
        meet(source, target)
        good(source, target, "warm")
        baseline = source.counts()
        host, _, port = source.address.removeprefix("tcp://").rpartition(":")
        for number in range(ROUNDS):
            with socket.create_connection((host, int(port)), 2) as connection:
                connection.sendall(rng.randbytes(rng.randrange(1, 4000)))
            if number % 5 == 0:
                good(source, target, f"good{number}")
        assert not settles(source, baseline)


@pytest.mark.parametrize("kind", ["grant", "staging", "pool"])
def test_memory_that_was_not_granted_is_refused(kind):
    with prefill() as source, decode() as liar, decode("honest", fleet="honest") as target:
        meet(source, target)
        meet(source, liar)
        good(source, target, "warm")
        baseline = source.counts()
        for number in range(ROUNDS):
            refused = source.counters().get("refused", 0)
            liar.lie(kind, number)
            if kind == "grant":
                wait_for(lambda r=refused: source.counters().get("refused", 0) == r + 1)
        good(source, target, "after")
        assert not settles(source, baseline)


@pytest.mark.parametrize("kind", ["back", "staged"])
def test_slots_that_were_not_lent_are_refused(kind):
    with prefill() as liar, decode() as target:
        meet(liar, target)
        good(liar, target, "warm")
        baseline = target.counts()
        for number in range(ROUNDS):
            liar.lie(kind, number)
        wait_for(lambda: target.counters().get("refused", 0) == ROUNDS)
        good(liar, target, "after")
        assert not settles(target, baseline)


def wait_for(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
