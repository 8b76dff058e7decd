"""How things end that no process fault causes: hanging transports, slow threads, used-up ids."""

import threading
import time
from pathlib import Path

import pytest

from kvconnect.disagg import channel as channels
from kvconnect.disagg import endpoint as endpoints
from kvconnect.disagg.decode import DecodeEndpoint
from kvconnect.disagg.messages import Abort, Envelope, Grant, Ping, Refused, pack_pages
from kvconnect.disagg.options import EndpointOptions
from kvconnect.disagg.requests import RequestState
from kvconnect.disagg.shm import ShmTransport
from kvconnect.errors import ClosedError, TransferTimeoutError, UnavailableError
from tests.disagg.endpoints import Cluster, identity_of
from tests.disagg.fleet import Fleet, fill, u64

FLEET = Fleet("page_first", 1, 4, 8, (2,), 2, (8, None))
PAGES, TOKENS = u64([2, 5]), 8


@pytest.fixture
def cluster():
    # Never packed: a push of short runs would be copied straight and call no transport.
    with Cluster(FLEET, FLEET, stage="never") as cluster:
        fill(cluster.sources[0], PAGES, TOKENS)
        cluster.connect().blank()
        yield cluster


def both(cluster):
    return cluster.prefills[0], cluster.decodes[0]


def moves(cluster, name, pages=PAGES):
    prefill, decode = both(cluster)
    sending, receiving = prefill.send(name, PAGES), decode.receive(name, pages)
    assert receiving.wait(5).ok
    assert sending.wait(5).ok
    assert cluster.holds(pages, TOKENS) == [True]


def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_close_is_bounded_while_a_transport_call_hangs_and_works_afterwards(
    cluster, monkeypatch, side
):
    """A push and a pull hang in the transport; the side that called it is closed."""
    monkeypatch.setattr(endpoints, "_CLOSE_SECONDS", 0.3)
    prefill, decode = both(cluster)
    hanging, go_on = threading.Event(), threading.Event()
    end = prefill if side == "prefill" else decode
    honest = end.transport.submit

    def submit(*arguments):
        hanging.set()
        go_on.wait(20)
        return honest(*arguments)

    monkeypatch.setattr(end.transport, "submit", submit)
    prefill.send("r", PAGES)
    receiving = decode.receive("r", PAGES, way="push" if side == "prefill" else "pull")
    assert hanging.wait(5)
    began = time.monotonic()
    with pytest.raises(TransferTimeoutError, match="1 of its threads are in the transport"):
        end.close()
    assert time.monotonic() - began < 2
    assert receiving.wait(5).state is RequestState.FAILED
    assert not receiving.quiet(0.1)
    go_on.set()
    end.close()
    end.close()
    assert receiving.quiet(5)


def test_a_decode_endpoint_does_not_close_while_a_peer_may_still_write(cluster, monkeypatch):
    monkeypatch.setattr(endpoints, "_CLOSE_SECONDS", 0.3)
    prefill, decode = both(cluster)
    decode.receive("r", PAGES)
    until(lambda: prefill._orders)
    # A rank that is stopped says nothing.
    stopped = threading.Event()
    prefill._channel.post(lambda: stopped.wait(10))
    try:
        with pytest.raises(TransferTimeoutError, match="requests still hold pages"):
            decode.close()
    finally:
        stopped.set()
    decode.close()


def test_what_a_busy_thread_did_not_begin_in_time_is_never_begun(cluster, monkeypatch):
    decode = cluster.decodes[0]
    monkeypatch.setattr(channels.Channel.call, "__defaults__", (0.1,))
    busy, go_on = threading.Event(), threading.Event()

    def work():
        busy.set()
        go_on.wait(10)

    decode._channel.post(work)
    assert busy.wait(5)
    with pytest.raises(UnavailableError, match=r"not free within 0\.1 s"):
        decode.receive("r", PAGES)
    go_on.set()
    monkeypatch.setattr(channels.Channel.call, "__defaults__", (10.0,))
    assert decode.in_thread(lambda: decode._receivings) == {}
    moves(cluster, "r")


def test_a_prefill_rank_may_close_as_soon_as_its_request_is_done(cluster):
    for number in range(20):
        prefill, decode = both(cluster)
        if number:
            prefill = cluster.start(
                type(prefill), cluster.sources[0], FLEET, "p0", 1, ShmTransport, None, {}
            )
            decode.connect([prefill.listen()])
            cluster.blank()
        sending, receiving = prefill.send(f"r{number}", PAGES), decode.receive(f"r{number}", PAGES)
        assert sending.wait(5).ok
        prefill.close()
        prefill.transport.close()
        assert receiving.wait(5).ok, receiving
        assert cluster.holds(PAGES, TOKENS) == [True]
        until(lambda: not cluster.decodes[0].peers)


def test_ids_can_be_used_again_after_success_and_stay_failed_after_failure(cluster):
    prefill, decode = both(cluster)
    for _ in range(5):
        cluster.blank()
        moves(cluster, "again")
    sending, receiving = prefill.send("bad", PAGES), decode.receive("bad", PAGES, timeout=5)
    if not sending.wait(0).ok:
        prefill.abort("bad")
    assert receiving.wait(5).state is not RequestState.UNDER_WAY
    assert receiving.quiet(5)
    sending = prefill.send("worst", PAGES)
    prefill.abort("worst")
    assert sending.wait(1).state is RequestState.FAILED
    assert sending.quiet(1)
    late = decode.receive("worst", PAGES)
    assert late.wait(5).state is RequestState.FAILED
    assert late.quiet(5)
    assert prefill.send("worst", PAGES).wait(1).state is RequestState.FAILED


def test_a_second_grant_for_a_request_is_refused_and_changes_nothing(cluster):
    prefill, decode = both(cluster)
    receiving = decode.receive("r", PAGES)
    peer = next(iter(decode.peers.values()))
    other = Grant("r", pack_pages(u64([0, 1])), TOKENS, "push", 5.0, False)
    decode.in_thread(lambda: decode.send_to(peer, other))
    until(lambda: prefill.counters().get("refused") == 1)
    assert prefill.send("r", PAGES).wait(5).ok
    assert receiving.wait(5).ok
    assert cluster.holds(PAGES, TOKENS) == [True]


def test_another_instance_cannot_take_or_end_a_request(cluster):
    prefill, decode = both(cluster)
    side = Fleet("page_first", 1, 4, 8, (2,), 2, (8, None)).sides()[0]
    options = EndpointOptions(name="other", fleet="other", timeout=5)
    with (
        ShmTransport() as carrier,
        DecodeEndpoint(
            side.pool, side.placement, identity_of(FLEET), carrier, options=options
        ) as second,
    ):
        second.connect(cluster.addresses)
        receiving = decode.receive("r", PAGES)
        until(lambda: "r" in prefill._orders)
        rival = second.receive("r", PAGES)
        outcome = rival.wait(5)
        assert outcome.state is RequestState.FAILED
        assert "another decode instance" in outcome.reason
        assert rival.quiet(5)
        peer = next(iter(second.peers.values()))
        second.in_thread(lambda: second.send_to(peer, Abort("r", "spite")))
        assert prefill.send("r", PAGES).wait(5).ok
        assert receiving.wait(5).ok
        assert not any(side.pool.array(c).any() for c in "kv")


def test_greetings_that_come_again_and_again_leave_one_connection(cluster, monkeypatch):
    prefill = cluster.prefills[0]
    links, honest, go_on = [], prefill.transport.connect, threading.Event()

    def connect(metadata, timeout):
        go_on.wait(5)
        links.append(honest(metadata, timeout))
        return links[-1]

    monkeypatch.setattr(prefill.transport, "connect", connect)
    with ShmTransport() as carrier:
        side = FLEET.sides()[0]
        with DecodeEndpoint(side.pool, side.placement, identity_of(FLEET), carrier) as second:
            hello = Envelope(second.generation, "", second.hello())
            route = second._channel.dial(cluster.addresses[0], bytes.fromhex(second.generation))
            for _ in range(20):
                second._channel.post(lambda: second._channel.send(route, hello))
            until(lambda: prefill._meetings.waiting)
            go_on.set()
            second.connect(cluster.addresses)
            prefill.in_thread(lambda: None)
            assert len(links) == 1
    until(lambda: len(prefill.peers) == 1)
    assert not links[0].alive()


@pytest.mark.parametrize("known", [True, False])
def test_word_of_an_earlier_start_does_not_cost_the_one_that_followed_it(cluster, known):
    prefill, decode = both(cluster)
    peer = next(iter(decode.peers.values()))
    sender = prefill.generation if known else "e" * 32
    for start, lost in (("d" * 32, False), (prefill.generation, True)):
        late = Envelope(sender, decode.generation, Refused("it is not here", start))
        decode.in_thread(lambda said=late: decode._on_envelope(peer.route, said))
        assert (peer.lost is not None) is lost
    decode.connect(cluster.addresses)
    assert peer.lost is None
    moves(cluster, "r")


def test_a_greeting_is_not_refused_by_what_was_said_before_it(cluster):
    """A rank that was lost pings and greets: only what answers the greeting counts."""
    prefill, decode = both(cluster)
    for number in range(20):
        theirs = next(iter(prefill.peers.values()))
        prefill.in_thread(lambda peer=theirs: prefill.lose(peer, "a test says so"))
        ours = next(iter(decode.peers.values()))
        decode.in_thread(lambda peer=ours: decode.send_to(peer, Ping(answer=True)))
        decode.connect(cluster.addresses)
        cluster.blank()
        moves(cluster, f"r{number}")


def test_a_rank_is_met_though_the_last_of_its_earlier_start_goes_at_that_moment(cluster):
    """The connection to the address is one for both starts, and goes with the first."""
    with ShmTransport() as carrier:
        side = FLEET.sides()[0]
        with DecodeEndpoint(side.pool, side.placement, identity_of(FLEET), carrier) as decode:
            honest, dialled = decode._channel.dial, []

            def dial(*arguments):
                route = honest(*arguments)
                dialled.append(route)
                if len(dialled) == 1:
                    decode.in_thread(lambda: decode._channel.hang_up(route))
                return route

            decode._channel.dial = dial
            decode.connect(cluster.addresses, timeout=3)
            receiving = decode.receive("r", PAGES)
            assert cluster.prefills[0].send("r", PAGES).wait(5).ok
            assert receiving.wait(5).ok


def test_after_close_nothing_begins_and_no_thread_is_left():
    def threads():
        return {t.name for t in threading.enumerate() if t.name.startswith("kvconnect")}

    before, fds = threads(), len(list(Path("/proc/self/fd").iterdir()))
    with Cluster(FLEET, FLEET) as cluster:
        cluster.connect()
        prefill, decode = both(cluster)
        prefill.send("r", PAGES)
    with pytest.raises(ClosedError):
        prefill.send("r2", PAGES)
    with pytest.raises(ClosedError):
        decode.receive("r2", PAGES)
    until(lambda: threads() == before)
    del cluster, prefill, decode
    until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= fds + 4)
