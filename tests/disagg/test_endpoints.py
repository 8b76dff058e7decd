import dataclasses
import threading
import time

import numpy as np
import pytest

from kvconnect.disagg.messages import Envelope, Grant, Moved, Quiet, pack_pages
from kvconnect.disagg.prefill import PrefillEndpoint
from kvconnect.disagg.requests import RequestState
from kvconnect.disagg.shm import ShmTransport
from kvconnect.errors import ConfigError, LayoutError, PageIndexError, UnavailableError
from tests.disagg.endpoints import Cluster, Stuck, identity_of
from tests.disagg.fleet import Fleet, fill, u64

PREFILL = Fleet("page_first", 2, 4, 8, (1, 2), 4, (8, 4))
DECODE = Fleet("page_head", 4, 8, 9, (3,), 4, (8, 4))
SRC, DST, TOKENS = u64([3, 0, 5, 1, 2]), u64([8, 2, 4]), 20


@pytest.fixture(params=["never", "always"])
def cluster(request):
    """Runs sent one by one, and packed: what is promised is the same."""
    options = {"stage": request.param, "staging": 64 << 10, "slot": 2048}
    with Cluster(PREFILL, DECODE, **options) as cluster:
        for side in cluster.sources:
            fill(side, SRC, TOKENS)
        cluster.connect().blank()
        yield cluster


def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("way", ["push", "pull"])
@pytest.mark.parametrize("first", ["send", "receive"])
@pytest.mark.parametrize("checksum", [True, False])
def test_a_request_moves_whole_whichever_side_is_first(cluster, way, first, checksum):
    def send():
        return [p.send("r", SRC) for p in cluster.prefills]

    def receive():
        return [
            d.receive("r", DST, slots=TOKENS, way=way, checksum=checksum) for d in cluster.decodes
        ]

    if first == "send":
        sendings, receivings = send(), receive()
    else:
        receivings = receive()
        sendings = send()
    received = [r.wait() for r in receivings]
    sent = [s.wait() for s in sendings]
    assert all(r.ok for r in received + sent), received + sent
    assert cluster.holds(DST, TOKENS) == [True] * 4
    # K and V: tokens x layers x heads x (8 + 4) x 2 B, at both ends.
    assert sum(r.nbytes for r in received) == sum(s.nbytes for s in sent) == TOKENS * 3 * 4 * 12 * 2
    assert all(request.quiet() for request in sendings + receivings)


def test_layers_may_be_sent_as_they_finish(cluster):
    receivings = [d.receive("r", DST, slots=TOKENS) for d in cluster.decodes]
    first, last = cluster.prefills[:2], cluster.prefills[2:]
    sendings = [p.send("r", SRC) for p in first]
    for layer in (2, 1):
        assert not any(r.wait(0.05).ok for r in receivings)
        sendings += [p.send("r", SRC, layers=(layer, layer + 1)) for p in last]
    assert all(r.wait().ok for r in receivings + sendings)
    assert cluster.holds(DST, TOKENS) == [True] * 4


def test_many_requests_at_once(cluster):
    def one(number):
        name = f"r{number}"
        pages = u64([number % 4])
        sent = [p.send(name, pages) for p in cluster.prefills]
        got = [d.receive(name, u64([number]), slots=4) for d in cluster.decodes]
        results.extend(r.wait().ok for r in sent + got)

    results = []
    threads = [threading.Thread(target=one, args=(n,)) for n in range(9)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert results == [True] * 9 * 8


def test_nothing_sent_is_a_failure_in_time_and_the_pages_come_back(cluster):
    started = time.monotonic()
    receivings = [d.receive("r", DST, slots=TOKENS, timeout=0.3) for d in cluster.decodes]
    outcomes = [r.wait() for r in receivings]
    assert time.monotonic() - started < 3
    assert {o.state for o in outcomes} == {RequestState.FAILED}
    # Whichever clock was first: this side's own, or the prefill side's for the same grant.
    assert all("deadline" in o.reason or "in time" in o.reason for o in outcomes)
    assert all(r.quiet(5) for r in receivings)
    assert not any(d.quarantined() for d in cluster.decodes)


def test_nobody_asking_is_a_failure_in_time(cluster):
    sending = cluster.prefills[0].send("r", SRC, timeout=0.2)
    assert sending.wait().reason == "the request's deadline has passed"
    assert sending.quiet(5)
    late = cluster.decodes[0].receive("r", DST, slots=TOKENS)
    assert "deadline has passed" in late.wait().reason
    assert late.quiet(5)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_ends_it_everywhere(cluster, side):
    # The second stage sends nothing, so that nobody can be done before.
    sendings = [p.send("r", SRC) for p in cluster.prefills[:2]]
    receivings = [d.receive("r", DST, slots=TOKENS) for d in cluster.decodes[:3]]
    by = cluster.prefills[1] if side == "prefill" else cluster.decodes[0]
    by.abort("r", "the user has left")
    for request in [sendings[1], *receivings]:
        outcome = request.wait(5)
        assert outcome.state is RequestState.FAILED
        assert "the user has left" in outcome.reason
    assert all(r.quiet(5) for r in [sendings[1], *receivings])
    # The last decode rank comes late and hears the same.
    late = cluster.decodes[3].receive("r", DST, slots=TOKENS)
    assert late.wait(5).state is RequestState.FAILED


def test_a_retry_under_a_new_id_works(cluster):
    sendings = [p.send("r1", SRC) for p in cluster.prefills]
    receivings = [d.receive("r1", DST, slots=TOKENS) for d in cluster.decodes[:2]]
    cluster.decodes[0].abort("r1")
    assert all(r.quiet(5) for r in receivings)
    assert not any(s.wait(5).ok for s in sendings)
    again = [p.send("r2", SRC) for p in cluster.prefills]
    again += [d.receive("r2", DST, slots=TOKENS) for d in cluster.decodes]
    assert all(r.wait().ok for r in again)
    assert cluster.holds(DST, TOKENS) == [True] * 4


def test_pages_stay_out_of_use_until_a_failed_transfer_is_quiet(cluster, monkeypatch):
    stuck = []

    def submit(_peer, _way, runs, _timeout):
        stuck.append(Stuck(runs))
        return stuck[-1]

    for prefill in cluster.prefills:
        monkeypatch.setattr(prefill.transport, "submit", submit)
    sendings = [p.send("r", SRC, timeout=0.3) for p in cluster.prefills]
    receivings = [d.receive("r", DST, slots=TOKENS) for d in cluster.decodes]
    assert {r.wait(5).state for r in receivings + sendings} == {RequestState.FAILED}
    assert not any(r.quiet(0.3) for r in receivings + sendings)
    assert all(d.quarantined() == sorted(DST.tolist()) for d in cluster.decodes)
    with pytest.raises(ConfigError, match=r"page 2 still belongs to another request"):
        cluster.decodes[0].receive("other", u64([1, 2]))
    for transfer in stuck:
        transfer.let_go.set()
    assert all(r.quiet(5) for r in receivings + sendings)
    assert not any(d.quarantined() for d in cluster.decodes)


def test_bytes_that_changed_on_the_way_fail_by_their_checksum(cluster, monkeypatch):
    prefill = cluster.prefills[0]
    honest = prefill.transport.submit

    def submit(peer, way, runs, timeout):
        transfer = honest(peer, way, runs, timeout)
        transfer.wait(5)
        place = peer.place(runs)
        import ctypes

        ctypes.memset(int(place.remote[0]), 0x55, 1)
        return transfer

    monkeypatch.setattr(prefill.transport, "submit", submit)
    sendings = [p.send("r", SRC) for p in cluster.prefills]
    receivings = [d.receive("r", DST, slots=TOKENS) for d in cluster.decodes]
    outcomes = [r.wait(5) for r in receivings]
    bad = [o for o in outcomes if not o.ok]
    assert bad
    assert any("checksum" in o.reason for o in bad)
    assert all(r.quiet(5) for r in receivings)
    del sendings


def test_fewer_bytes_than_planned_are_never_a_success(cluster, monkeypatch):
    prefill = cluster.prefills[0]
    honest = prefill.send_to

    def send_to(peer, message):
        if isinstance(message, Moved):
            message = Moved(message.request, message.layers, message.nbytes - 2, message.checksum)
        honest(peer, message)

    monkeypatch.setattr(prefill, "send_to", send_to)
    [p.send("r", SRC) for p in cluster.prefills]
    receivings = [d.receive("r", DST, slots=TOKENS) for d in cluster.decodes]
    assert any("were confirmed, the plan has" in r.wait(5).reason for r in receivings)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda m: dataclasses_replace(m, layers=(0, 3)),
        lambda m: dataclasses_replace(m, layers=(2, 2)),
        lambda m: dataclasses_replace(m, layers=(7, 9)),
    ],
)
def test_layers_that_were_not_this_ranks_fail_the_request(cluster, monkeypatch, wrong):
    prefill = cluster.prefills[0]
    honest = prefill.send_to
    monkeypatch.setattr(
        prefill, "send_to", lambda p, m: honest(p, wrong(m) if isinstance(m, Moved) else m)
    )
    [p.send("r", SRC) for p in cluster.prefills]
    receivings = [d.receive("r", DST, slots=TOKENS) for d in cluster.decodes]
    assert any("are not what" in r.wait(5).reason for r in receivings)


def dataclasses_replace(message, **changes):
    import msgspec

    return msgspec.structs.replace(message, **changes)


def test_a_prefill_rank_that_closes_fails_its_requests_at_once(cluster):
    receivings = [d.receive("r", DST, slots=TOKENS, timeout=8) for d in cluster.decodes]
    started = time.monotonic()
    cluster.prefills[0].close()
    cluster.prefills[0].transport.close()
    outcomes = [r.wait(5) for r in receivings]
    assert time.monotonic() - started < 4
    assert {o.state for o in outcomes} == {RequestState.FAILED}
    assert all(r.quiet(5) for r in receivings)


def test_a_restarted_rank_is_another_peer_and_old_messages_are_dropped(cluster):
    old = cluster.prefills[0]
    address = cluster.addresses[0]
    old.close()
    old.transport.close()
    until(lambda: any(p.lost for p in cluster.decodes[0].peers.values()))
    with ShmTransport() as carrier:
        side = cluster.sources[0]
        with PrefillEndpoint(side.pool, side.placement, identity_of(PREFILL), carrier) as new:
            new.listen(address)
            for decode in cluster.decodes:
                decode.connect(cluster.addresses)
            prefills = [new, *cluster.prefills[1:]]
            # What a delayed message of the first start would say is of no account.
            decode = cluster.decodes[0]
            peer = next(p for p in decode.peers.values() if p.generation == carrier.generation)
            before = decode.counters().get("stale", 0)
            ghost = Envelope(old.generation, decode.generation, Quiet("r"))
            decode.in_thread(lambda: decode._on_envelope(peer.route, ghost))
            assert decode.counters()["stale"] == before + 1
            requests = [p.send("r", SRC) for p in prefills]
            requests += [d.receive("r", DST, slots=TOKENS) for d in cluster.decodes]
            assert all(r.wait().ok for r in requests)
            assert cluster.holds(DST, TOKENS) == [True] * 4


def test_page_counts_that_do_not_fit_fail_with_both_numbers(cluster):
    sendings = [p.send("r", SRC[:4]) for p in cluster.prefills]
    receivings = [d.receive("r", DST, slots=TOKENS) for d in cluster.decodes]
    words = "wants 20 slots, which are 5 pages of 4; 4 pages were sent"
    assert any(words in r.wait(5).reason for r in receivings + sendings)
    assert all(r.quiet(5) for r in receivings)
    with pytest.raises(ConfigError, match="slots=30 do not fill 3 pages of 8"):
        cluster.decodes[0].receive("r2", DST, slots=30)
    assert "no multiple of 4" in cluster.decodes[0].receive("r3", DST, slots=19).wait(5).reason


def test_bad_pages_and_layers_raise_where_they_are_given(cluster):
    prefill, decode = cluster.prefills[2], cluster.decodes[0]
    with pytest.raises(PageIndexError, match="outside the pool of 8"):
        prefill.send("r", [8])
    with pytest.raises(PageIndexError, match="twice"):
        decode.receive("r", [1, 1])
    with pytest.raises(ConfigError, match=r"layers \[0, 2\) are not inside"):
        prefill.send("r", SRC, layers=(0, 2))
    prefill.send("r", SRC, layers=(1, 2))
    with pytest.raises(ConfigError, match="were sent before"):
        prefill.send("r", SRC)
    with pytest.raises(ConfigError, match="begun with other pages"):
        prefill.send("r", SRC[::-1].copy(), layers=(2, 3))


def test_a_grant_of_pages_that_the_peer_does_not_have_is_refused(cluster):
    decode, prefill = cluster.decodes[0], cluster.prefills[0]
    peer = next(p for p in decode.peers.values() if p.hello.name == "p0")
    for pages in (u64([9]), np.array([-1], dtype=np.int64), u64([1, 1])):
        before = prefill.counters().get("refused", 0)
        grant = Grant("g", pack_pages(pages), 8, "push", 1.0, False)
        decode.in_thread(lambda g=grant: decode.send_to(peer, g))
        until(lambda b=before: prefill.counters().get("refused", 0) == b + 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": "other"}, "weights is 'w' here and 'other' at the peer"),
        ({"salt": "tenant"}, "salt is None here and 'tenant' at the peer"),
    ],
)
def test_who_holds_other_bytes_is_refused_at_connect(changes, words):
    from kvconnect.disagg.decode import DecodeEndpoint

    with Cluster(PREFILL, DECODE) as cluster, ShmTransport() as carrier:
        side = cluster.targets[0]
        other = dataclasses.replace(identity_of(DECODE), **changes)
        with (
            DecodeEndpoint(side.pool, side.placement, other, carrier) as decode,
            pytest.raises(ConfigError, match=words),
        ):
            decode.connect(cluster.addresses, timeout=3)


def test_a_missing_rank_is_named_at_connect():
    with Cluster(PREFILL, DECODE) as cluster:
        with pytest.raises(UnavailableError, match="no prefill rank answered at tcp://127"):
            cluster.decodes[0].connect(["tcp://127.0.0.1:9"], timeout=0.7)
        with pytest.raises(LayoutError, match=r"layer 0, head 0 .* held by 0 of the sources"):
            cluster.decodes[0].connect(cluster.addresses[2:], timeout=3)


def test_a_rank_named_by_two_addresses_is_found_out_and_stays_connected(cluster):
    alias = cluster.addresses[0].replace("127.0.0.1", "localhost")
    decode = cluster.decodes[0]
    with pytest.raises(LayoutError, match="held by 2 of the sources"):
        decode.connect([*cluster.addresses, alias], timeout=5)
    requests = [p.send("r", SRC) for p in cluster.prefills]
    requests += [d.receive("r", DST, slots=TOKENS) for d in cluster.decodes]
    assert all(r.wait().ok for r in requests)


def test_closing_twice_is_safe_and_ends_everything(cluster):
    sendings = [p.send("r", SRC) for p in cluster.prefills]
    for endpoint in cluster.prefills + cluster.decodes:
        endpoint.close()
        endpoint.close()
    assert {s.wait(1).state for s in sendings} == {RequestState.FAILED}
