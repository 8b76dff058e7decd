import contextlib
import socket
import threading
import time

import numpy as np
import pytest

from kvconnect.disagg import lifeline
from kvconnect.disagg.flight import Flight
from kvconnect.disagg.lane import Lane, cut
from kvconnect.disagg.lifeline import LifeServer, dial
from kvconnect.disagg.transport import PeerStatus, Runs, Way
from kvconnect.errors import BackendError, ClosedError, UnavailableError
from kvconnect.testing.peer_suite.base import until

GENERATION, TOKEN = "ab" * 16, b"t" * 32


class Library:
    """A `Driver` whose pieces end as and when the test says."""

    name = "fake"
    depth = 4

    def __init__(self):
        self.posted, self.ended, self.verified, self.closed = [], {}, 0, False
        self.wrong, self.refuse, self.gate = None, None, threading.Event()
        self.gate.set()

    def verify(self):
        self.verified += 1
        if self.wrong:
            raise self.wrong

    def pieces(self, way, runs):
        yield from runs.local.tolist()

    def post(self, piece):
        self.gate.wait(20)
        if self.refuse:
            raise self.refuse
        self.posted.append(piece)
        return piece

    def poll(self, ticket):
        return self.ended.get(ticket)

    def close(self, *, gone):
        self.closed, self.gone = True, gone


class Line:
    """A lifeline: `ran` is for how long the peer has run."""

    def __init__(self):
        self.up, self.ran, self.closed = True, 0.0, False

    def alive(self):
        return self.up

    def steady(self, since):
        return self.ran

    def close(self):
        self.closed = True


def runs_of(*numbers):
    column = np.array(numbers, dtype=np.uint64)
    return Runs(column, column, np.full_like(column, 10))


@pytest.fixture
def lane():
    library, line = Library(), Line()
    lane = Lane(library, line, 3.0)
    yield lane, library, line
    library.gate.set()
    line.up = False
    library.ended = dict.fromkeys(range(1000), "the end of the test")
    lane.close()
    assert lane.join(10)
    assert (library.closed, line.closed) == (True, True)


def start(lane, *numbers, way=Way.PUSH, timeout=20.0):
    flight = Flight(way, runs_of(*numbers), timeout)
    lane.submit(flight)
    return flight


def test_a_success_needs_every_piece_and_no_more_are_under_way_than_allowed(lane):
    lane, library, _ = lane
    flight = start(lane, *range(1, 7))
    until(lambda: library.posted == [1, 2, 3, 4])
    library.ended = {1: "", 2: "", 3: ""}
    until(lambda: library.posted == [1, 2, 3, 4, 5, 6])
    library.ended |= {5: "", 6: ""}
    assert flight.wait(0.05).status is PeerStatus.TIMEOUT
    assert not flight.done()
    library.ended[4] = ""
    outcome = flight.wait(10)
    assert (outcome.status, outcome.nbytes, flight.done()) == (PeerStatus.OK, 60, True)


def test_a_failed_push_is_known_at_once_and_quiet_when_the_peer_has_run_for_long(lane):
    lane, library, line = lane
    flight = start(lane, 1, 2, 3, 4, 5, 6)
    until(lambda: len(library.posted) == 4)
    library.ended = {1: "cut"}
    outcome = flight.wait(10)
    assert (outcome.status, outcome.cause) == (PeerStatus.FAILED, "fake: cut")
    # What was posted goes on, what was not never starts; a long run of the peer says nothing yet.
    line.ran = 99.0
    assert not flight.settled(0.2)
    assert len(library.posted) == 4
    line.ran = 0.0
    library.ended |= {2: "", 3: "", 4: ""}
    assert not flight.settled(0.2)
    line.ran = 2.9
    assert not flight.settled(0.2)
    line.ran = 3.0
    assert flight.settled(10)
    assert not flight.wait(0).ok


def test_a_failed_pull_is_quiet_when_its_pieces_have_ended(lane):
    lane, library, _ = lane
    flight = start(lane, 1, 2, way=Way.PULL)
    until(lambda: len(library.posted) == 2)
    library.ended = {1: "cut"}
    assert flight.wait(10).status is PeerStatus.FAILED
    assert not flight.settled(0.2)
    library.ended[2] = ""
    assert flight.settled(10)


def test_a_dead_peer_ends_batches_whose_pieces_still_count(lane):
    lane, library, line = lane
    flight = start(lane, 1, 2)
    until(lambda: len(library.posted) == 2)
    line.up = False
    assert flight.wait(10).status is PeerStatus.PEER_GONE
    assert not flight.settled(0.2)
    library.ended = {1: "", 2: ""}
    assert flight.settled(10)
    assert flight.wait(0).status is PeerStatus.PEER_GONE


def test_the_deadline_and_cancel_leave_the_memory_leased(lane):
    lane, library, _ = lane
    late, dropped = start(lane, 1, timeout=0.1), start(lane, 2)
    until(lambda: len(library.posted) == 2)
    assert late.wait(10).status is PeerStatus.TIMEOUT
    dropped.cancel()
    assert dropped.wait(10).status is PeerStatus.CANCELLED
    assert not late.done()
    assert not dropped.done()
    library.ended = {1: "", 2: ""}
    assert late.settled(10)
    assert dropped.settled(10)
    assert (late.wait(0).status, late.wait(0).nbytes) == (PeerStatus.TIMEOUT, 0)


def test_a_call_that_hangs_costs_its_callers_only_their_deadline(lane):
    lane, library, _ = lane
    library.gate.clear()
    flight = start(lane, 1, timeout=0.2)
    began = time.monotonic()
    assert flight.wait(10).status is PeerStatus.TIMEOUT
    assert time.monotonic() - began < 2
    assert not flight.done()
    lane.close()
    assert not lane.join(0.1)


def test_after_a_failure_the_peer_is_verified_before_the_next_post(lane):
    lane, library, line = lane
    line.ran = 99.0
    library.ended = {1: "cut", 2: "", 3: ""}
    assert not start(lane, 1).wait(10).ok
    assert library.verified == 1
    assert start(lane, 2).wait(10).ok
    assert library.verified == 2
    assert start(lane, 3).wait(10).ok
    assert library.verified == 2
    library.refuse = BackendError("no room")
    failed = start(lane, 4)
    assert "no room" in failed.wait(10).cause
    # Nothing was posted: nothing to wait for.
    line.ran = 0.0
    assert failed.settled(10)
    library.refuse, library.wrong = None, UnavailableError("somebody else")
    assert "somebody else" in start(lane, 5).wait(10).cause
    assert library.posted == [1, 2, 3]


def test_a_closed_lane_takes_nothing(lane):
    lane, library, _ = lane
    flight = start(lane, 1)
    until(lambda: library.posted == [1])
    lane.close()
    with pytest.raises(ClosedError, match="fake: the peer is closed"):
        start(lane, 2)
    assert not flight.done()
    library.ended = {1: ""}
    assert flight.settled(10)
    assert lane.join(10)
    assert not library.gone


def test_the_driver_hears_that_the_peer_has_ended(lane):
    lane, library, line = lane
    line.up = False
    lane.close()
    assert lane.join(10)
    assert library.gone


def test_runs_are_cut_without_loss():
    rng = np.random.default_rng(2)
    nbytes = rng.integers(0, 50, 200).astype(np.uint64)
    local = np.cumsum(nbytes) * np.uint64(3)
    remote = local[::-1].copy() * np.uint64(5)
    short = cut(Runs(local, remote, nbytes), 7)
    assert short.nbytes.max() <= 7
    assert short.nbytes.min() >= 1
    want = [
        (a + k, b + k)
        for a, b, n in zip(local.tolist(), remote.tolist(), nbytes.tolist(), strict=True)
        for k in range(n)
    ]
    found = [
        (a + k, b + k)
        for a, b, n in zip(
            short.local.tolist(), short.remote.tolist(), short.nbytes.tolist(), strict=True
        )
        for k in range(n)
    ]
    assert found == want


def test_a_lifeline_tells_life_from_death():
    with LifeServer("127.0.0.1", GENERATION, TOKEN) as server:
        with dial("127.0.0.1", server.port, GENERATION, TOKEN, 5) as line:
            assert line.alive()
            until(lambda: server.attached() == 1)
            since = time.monotonic()
            took = until(lambda: line.steady(since) >= 0.5, 10)
            assert took >= 0.5
            server.close()
            until(lambda: not line.alive(), 5)
            assert line.steady(since) == 0
        server.close()
        with pytest.raises(UnavailableError, match=f"no peer of generation {GENERATION}"):
            dial("127.0.0.1", server.port, GENERATION, TOKEN, 1)


def test_time_in_which_the_peer_did_not_answer_does_not_count():
    """A peer that echoes only when it is told to, as one that is stopped and goes on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        made = []
        thread = threading.Thread(
            target=lambda: made.append(dial("127.0.0.1", port, GENERATION, TOKEN, 5))
        )
        thread.start()
        end, _ = listener.accept()
        with end:
            assert end.recv(32) == TOKEN
            end.sendall(bytes.fromhex(GENERATION))
            thread.join(5)
            with made[0] as line:
                since = time.monotonic()
                until(lambda: line.steady(since) or time.monotonic() > since + 1.3)
                # One answer, 1.3 s late: it has been away.
                end.sendall(end.recv(1))
                assert line.steady(since) == 0
                assert line.alive()


def test_strangers_get_no_lifeline():
    with LifeServer("127.0.0.1", GENERATION, TOKEN) as server:
        with pytest.raises(UnavailableError, match="refused"):
            dial("127.0.0.1", server.port, GENERATION, b"x" * 32, 5)
        with pytest.raises(UnavailableError, match=f"generation {GENERATION} is there now"):
            dial("127.0.0.1", server.port, "cd" * 16, TOKEN, 5)
        with socket.create_connection(("127.0.0.1", server.port), 5) as silent:
            silent.sendall(b"half a token")
            silent.settimeout(10)
            # Who does not show the token in time is hung up on.
            assert silent.recv(1) == b""
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                line = dial("127.0.0.1", server.port, GENERATION, TOKEN, 5)
                stack.enter_context(line)
            until(lambda: server.attached() == 20)
        until(lambda: server.attached() == 0)


def test_a_server_that_is_kept_from_running_closes_in_its_own_time(monkeypatch):
    # An error in its thread would fail this test: nothing may be closed under it.
    gate, entered = threading.Event(), threading.Event()

    class Held(LifeServer):
        def _hear(self, sock):
            entered.set()
            assert gate.wait(30)
            super()._hear(sock)

    monkeypatch.setattr(lifeline, "_HELLO_SECONDS", 0.2)
    with (
        Held("127.0.0.1", GENERATION, TOKEN) as server,
        socket.create_connection(("127.0.0.1", server.port), 5) as caller,
    ):
        caller.sendall(TOKEN)
        assert entered.wait(10)
        server.close()
        gate.set()
        server._thread.join(10)
        assert not server._thread.is_alive()
        caller.settimeout(10)
        assert caller.recv(100) in {b"", bytes.fromhex(GENERATION)}
