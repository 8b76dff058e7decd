"""Why requests fail, as a type, on the rank where it happened and on those that hear of it."""

import ctypes
import threading
import time

import pytest

from kvconnect.disagg.cause import Cause, RequestError, cause_of, cause_of_outcome
from kvconnect.disagg.messages import Moved
from kvconnect.disagg.shm import ShmTransport
from kvconnect.disagg.transport import PeerOutcome, PeerStatus
from kvconnect.errors import (
    ClosedError,
    ConfigError,
    PageIndexError,
    RegistrationError,
    TransferTimeoutError,
    UnavailableError,
)
from tests.disagg.endpoints import Cluster
from tests.disagg.fleet import Fleet, fill, u64

FLEET = Fleet("page_first", 1, 4, 8, (2,), 2, (8, None))
PAGES, TOKENS = u64([2, 5]), 8


@pytest.fixture
def cluster():
    with Cluster(FLEET, FLEET, stage="never") as cluster:
        fill(cluster.sources[0], PAGES, TOKENS)
        yield cluster.connect()


def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def causes(cluster, **more):
    """Send and receive; the causes of both sides, and that each has words, too."""
    sending = cluster.prefills[0].send("r", PAGES)
    receiving = cluster.decodes[0].receive("r", PAGES, **more)
    outcomes = [receiving.wait(5), sending.wait(5)]
    assert all(bool(o.reason) == (o.cause is not None) == (not o.ok) for o in outcomes)
    return [o.cause for o in outcomes]


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_is_a_wish_here_and_a_peer_that_gave_up_there(cluster, side):
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    receiving = decode.receive("r", PAGES)
    sending = prefill.send("r", PAGES, layers=(0, 1))
    (prefill if side == "prefill" else decode).abort("r")
    found = [r.wait(5).cause for r in (sending, receiving)]
    wanted = [Cause.CANCELLED, Cause.PEER_GAVE_UP]
    assert found == (wanted if side == "prefill" else wanted[::-1])
    late = prefill.send("r", PAGES, layers=(1, 2))
    assert late.wait(1).cause is found[0]


def test_a_byte_that_changed_on_its_way_is_a_checksum(cluster, monkeypatch):
    prefill = cluster.prefills[0]
    honest = prefill.transport.submit

    def submit(peer, way, runs, timeout):
        transfer = honest(peer, way, runs, timeout)
        transfer.wait(5)
        ctypes.memset(int(peer.place(runs).remote[0]), 0x55, 1)
        return transfer

    monkeypatch.setattr(prefill.transport, "submit", submit)
    # The prefill side is done with its word that all has landed; it is not asked again.
    assert causes(cluster) == [Cause.CHECKSUM, None]


def test_a_checksum_that_fails_in_a_pull_is_known_on_both_sides(cluster, monkeypatch):
    prefill = cluster.prefills[0]
    honest = prefill.send_to

    def send_to(peer, message):
        if type(message).__name__ == "Ready":
            message = type(message)(message.request, message.layers, message.pages, bytes(16))
        honest(peer, message)

    monkeypatch.setattr(prefill, "send_to", send_to)
    assert causes(cluster, way="pull") == [Cause.CHECKSUM, Cause.CHECKSUM]


def test_bytes_that_are_missing_are_a_size(cluster, monkeypatch):
    prefill = cluster.prefills[0]
    honest = prefill.send_to

    def send_to(peer, message):
        if isinstance(message, Moved):
            message = Moved(message.request, message.layers, message.nbytes - 2, None)
        honest(peer, message)

    monkeypatch.setattr(prefill, "send_to", send_to)
    assert causes(cluster, checksum=False)[0] is Cause.SIZE_MISMATCH


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (PeerStatus.FAILED, Cause.TRANSPORT),
        (PeerStatus.TIMEOUT, Cause.TIMEOUT),
        (PeerStatus.PEER_GONE, Cause.PEER_LOST),
    ],
)
def test_a_batch_that_failed_says_how(cluster, monkeypatch, status, cause):
    class Ended:
        def done(self):
            return True

        def wait(self, _timeout):
            return PeerOutcome(status, 0, "a test says so")

        def cancel(self):
            pass

    monkeypatch.setattr(cluster.prefills[0].transport, "submit", lambda *_: Ended())
    assert causes(cluster) == [cause, cause]


def test_pages_that_do_not_fit_are_refused_on_both_sides(cluster):
    sending = cluster.prefills[0].send("r", PAGES[:1])
    outcome = cluster.decodes[0].receive("r", PAGES).wait(5)
    assert (outcome.cause, sending.wait(5).cause) == (Cause.REFUSED, Cause.REFUSED)


def test_a_deadline_is_a_timeout_on_either_side(cluster):
    assert cluster.decodes[0].receive("r", PAGES, timeout=0.2).wait(5).cause is Cause.TIMEOUT
    assert cluster.prefills[0].send("s", PAGES, timeout=0.2).wait(5).cause is Cause.TIMEOUT


def test_who_comes_late_hears_the_first_cause_and_not_what_it_stopped(cluster, monkeypatch):
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    honest, go_on = prefill.transport.submit, threading.Event()

    def submit(*arguments):
        go_on.wait(5)
        return honest(*arguments)

    monkeypatch.setattr(prefill.transport, "submit", submit)
    receiving = decode.receive("r", PAGES)
    sending = prefill.send("r", PAGES, timeout=0.2)
    assert (sending.wait(5).cause, receiving.wait(5).cause) == (Cause.TIMEOUT, Cause.TIMEOUT)
    go_on.set()
    assert receiving.quiet(5)
    late = decode.receive("r", PAGES).wait(5)
    assert late.cause is Cause.TIMEOUT
    assert "deadline has passed" in late.reason


def test_closing_is_the_loss_of_a_peer_to_the_other_side(cluster):
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    receiving = decode.receive("r", PAGES)
    sending = prefill.send("r", PAGES, layers=(0, 1))
    until(lambda: prefill._orders)
    prefill.close()
    assert sending.wait(5).cause is Cause.CLOSED
    assert receiving.wait(5).cause is Cause.PEER_LOST


def test_a_lost_peer_is_the_cause_of_what_it_owed(cluster):
    decode = cluster.decodes[0]
    receiving = decode.receive("r", PAGES)
    peer = next(iter(decode.peers.values()))
    decode.in_thread(lambda: decode.lose(peer, "it was silent"))
    assert receiving.wait(5).cause is Cause.PEER_LOST


def test_another_start_at_the_address_is_a_cause_of_its_own(cluster, monkeypatch):
    """As after a crash: the first start says nothing any more."""
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    receiving = decode.receive("r", PAGES)
    decode.in_thread(lambda: None)
    monkeypatch.setattr(prefill, "send_to", lambda *_: None)
    prefill.close()
    with cluster.start(
        type(prefill), cluster.sources[0], FLEET, "p0", 1, ShmTransport, None, {}
    ) as second:
        second.listen(cluster.addresses[0])
        decode.connect(cluster.addresses)
        assert receiving.wait(5).cause is Cause.GENERATION
        prefill.transport.close()
        assert receiving.quiet(5)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RequestError(Cause.CHECKSUM, "w"), Cause.CHECKSUM),
        (TransferTimeoutError("w"), Cause.TIMEOUT),
        (ClosedError("w"), Cause.CLOSED),
        (UnavailableError("w"), Cause.PEER_LOST),
        (RegistrationError("w"), Cause.TRANSPORT),
        (ConfigError("w"), Cause.REFUSED),
        (PageIndexError("w"), Cause.REFUSED),
        (ZeroDivisionError("w"), Cause.ERROR),
        (None, Cause.ERROR),
    ],
)
def test_every_error_is_a_cause(error, cause):
    assert cause_of(error) is cause


def test_every_failed_batch_is_a_cause():
    for status in PeerStatus:
        if status is not PeerStatus.OK:
            assert isinstance(cause_of_outcome(PeerOutcome(status)), Cause)
