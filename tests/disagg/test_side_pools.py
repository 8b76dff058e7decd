"""Side pools in requests: all of them arrive, or the request has failed."""

import dataclasses
import time

import msgspec
import numpy as np
import pytest

from kvconnect.disagg.cause import Cause
from kvconnect.disagg.messages import Grant, Moved, SideGrant, pack_pages
from kvconnect.disagg.requests import RequestState
from kvconnect.disagg.sections import KV
from kvconnect.errors import ConfigError, PageIndexError
from tests.disagg.endpoints import Stuck
from tests.disagg.fleet import Fleet, u64
from tests.disagg.side_fleet import Hybrid, Kind, Where, expected, grid, nbytes_of

PREFILL = Fleet("page_first", 2, 4, 8, (1, 2), 4, (8, 4))
DECODE = Fleet("page_head", 4, 8, 9, (3,), 4, (8, 4))
SWA = Kind("swa", ("page", "slot", "layer", "head", "dim"), {"k": 8, "v": 4}, (1, 1), 4, 4, 8)
MAMBA = Kind("mamba", ("page", "layer", "head", "dim"), {"temporal": 12, "conv_0": 6}, (2, 1), 8)
INDEX = Kind("indexer", ("page", "layer", "dim"), {"index": 40}, (1, 2), 1, 4, 8)
DRAFT = Kind("draft", ("layer", "page", "slot", "head", "dim"), {"k": 6, "v": 6}, (0, 1), 2, 4)
SENT = (SWA, MAMBA, INDEX, DRAFT)
TAKEN = (
    Kind("swa", ("page", "head", "slot", "layer", "dim"), {"k": 8, "v": 4}, (2,), 4, 16, 4),
    Kind("mamba", ("layer", "page", "head", "dim"), {"temporal": 12, "conv_0": 6}, (3,), 8),
    Kind("indexer", ("layer", "page", "dim"), {"index": 40}, (3,), 1, 4, 9),
    Kind("draft", ("page", "head", "layer", "slot", "dim"), {"k": 6, "v": 6}, (1,), 2, 8),
)
WHERE = {
    KV: Where((3, 0, 5, 1, 2), (8, 2, 4), range(20)),
    # The window: the last 24 of 40 tokens, from a boundary of the larger pages on.
    "swa": Where((7, 0, 2, 5, 4, 1), (3, 0), range(16, 40)),
    "mamba": Where((4,), (1,), range(1)),
    "indexer": Where((6, 1, 3, 0, 7), (0, 8, 2, 5, 4), range(5)),
    "draft": Where((5, 3, 0, 1), (2, 4), range(16)),
}


BOTH = pytest.mark.parametrize("hybrid", ["never", "always"], indirect=True)
"""Runs sent one by one, and packed: what is promised is the same."""


@pytest.fixture
def hybrid(request):
    stage = getattr(request, "param", "always")
    options = {"stage": stage, "staging": 64 << 10, "slot": 4096}
    with Hybrid((PREFILL, SENT), (DECODE, TAKEN), WHERE, **options) as hybrid:
        yield hybrid.fill().connect()


def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@BOTH
@pytest.mark.parametrize("way", ["push", "pull"])
@pytest.mark.parametrize("first", ["send", "receive"])
def test_all_pools_of_a_request_arrive(hybrid, way, first):
    if first == "send":
        sendings, receivings = hybrid.send("r"), hybrid.receive("r", way=way)
    else:
        receivings = hybrid.receive("r", way=way)
        sendings = hybrid.send("r")
    received, sent = [r.wait() for r in receivings], [s.wait() for s in sendings]
    assert all(r.ok for r in received + sent), received + sent
    assert all(hybrid.holds().values()), hybrid.holds()
    assert sum(r.nbytes for r in received) == sum(s.nbytes for s in sent) == hybrid.nbytes()
    assert all(r.cause is None for r in received + sent)
    assert all(request.quiet() for request in sendings + receivings)
    trips = [trip for prefill in hybrid.prefills for trip in prefill.trips()]
    if way == "push":
        assert {trip.pool for trip in trips} == set(WHERE)
        assert sum(trip.nbytes for trip in trips) == hybrid.nbytes()
    else:
        assert not trips


@BOTH
def test_side_pools_may_be_sent_when_they_are_finished(hybrid):
    receivings = hybrid.receive("r")
    pages = u64(WHERE[KV].src)
    for end in hybrid.prefills:
        held = end.side.placement.layers
        for layer in range(held.start, held.stop):
            end.send("r", pages, layers=(layer, layer + 1))
    for name in ("mamba", "swa", "indexer"):
        for end, pools in zip(hybrid.prefills, hybrid.sources, strict=True):
            if name in pools:
                end.send("r", pages, layers=(), side={name: u64(WHERE[name].src)})
    assert not any(r.wait(0.2).ok for r in receivings)
    last = [
        end.send("r", pages, layers=(), side={"draft": u64(WHERE["draft"].src)})
        for end, pools in zip(hybrid.prefills, hybrid.sources, strict=True)
        if "draft" in pools
    ]
    assert all(r.wait().ok for r in receivings + last)
    assert all(hybrid.holds().values()), hybrid.holds()


@BOTH
@pytest.mark.parametrize("missing", ["swa", "mamba", "draft"])
def test_without_one_pool_the_request_has_failed(hybrid, missing):
    # Long enough for what is sent: the pool that is missing must be what the request waits for.
    sendings = hybrid.send("r", missing, timeout=2.0)
    receivings = hybrid.receive("r")
    received, sent = [r.wait(5) for r in receivings], [s.wait(5) for s in sendings]
    # A rank that has nothing of the pool may be done with its share before.
    failed = [
        o for o, pools in zip(sent, hybrid.sources, strict=True) if missing in pools or not o.ok
    ]
    assert {o.state for o in received + failed} == {RequestState.FAILED}
    assert {o.cause for o in received + failed} == {Cause.TIMEOUT}
    assert any(f"nothing of ['{missing}'] was sent" in o.reason for o in failed)
    assert all(r.quiet(5) for r in receivings + sendings)
    assert not any(d.quarantined(n) for d in hybrid.decodes for n in d.pools.sides)


@BOTH
def test_a_byte_of_a_side_pool_that_changed_fails_the_request(hybrid, monkeypatch):
    """Also where the KV is right to the last byte."""
    decode, side = hybrid.decodes[0], hybrid.targets[0]["mamba"]
    honest, wrong = decode.packer, ~expected("mamba", side, "conv_0", range(1))[0, 0]

    def packer(plan, pool):
        if pool == "mamba":
            grid(side, "conv_0")[1, 0, 0] = wrong.view(np.uint16)
        return honest(plan, pool)

    monkeypatch.setattr(decode, "packer", packer)
    hybrid.send("r")
    outcomes = [r.wait(5) for r in hybrid.receive("r")]
    assert outcomes[0].cause is Cause.CHECKSUM
    assert "of pool 'mamba'" in outcomes[0].reason


@BOTH
def test_fewer_bytes_of_a_side_pool_than_planned_fail_the_request(hybrid, monkeypatch):
    for prefill in hybrid.prefills:
        honest = prefill.send_to

        def send_to(peer, message, honest=honest):
            if isinstance(message, Moved) and message.pool == "swa":
                message = msgspec.structs.replace(message, nbytes=message.nbytes - 2)
            honest(peer, message)

        monkeypatch.setattr(prefill, "send_to", send_to)
    hybrid.send("r")
    outcomes = [r.wait(5) for r in hybrid.receive("r")]
    assert not any(o.ok for o in outcomes)
    assert Cause.SIZE_MISMATCH in {o.cause for o in outcomes}
    assert any("of pool 'swa'" in o.reason for o in outcomes)


def test_a_pull_is_not_done_by_the_word_that_something_was_pushed(hybrid, monkeypatch):
    prefill = hybrid.prefills[0]
    honest = prefill.send_to

    def send_to(peer, message):
        if type(message).__name__ == "Ready":
            message = Moved(
                message.request, message.layers, 0, message.checksum, False, message.pool
            )
        honest(peer, message)

    monkeypatch.setattr(prefill, "send_to", send_to)
    hybrid.send("r")
    outcomes = [r.wait(5) for r in hybrid.receive("r", way="pull", checksum=False)]
    assert not any(o.ok for o in outcomes)
    assert any("said Moved of a pull" in o.reason for o in outcomes)


def test_pages_of_all_pools_stay_out_of_use_while_one_is_not_quiet(hybrid, monkeypatch):
    """Only batches of Mamba states hang; of ranks they were not begun for, pages are free."""
    for prefill in hybrid.prefills:
        monkeypatch.setattr(prefill._outbound, "packs", lambda *_: (False, "a test says so"))
    stuck = []
    for prefill, pools in zip(hybrid.prefills, hybrid.sources, strict=True):
        regions = pools["mamba"].pool.regions

        def submit(peer, way, runs, timeout, regions=regions, honest=prefill.transport.submit):
            at = int(runs.local[0])
            if not any(region.address <= at < region.end for region in regions):
                return honest(peer, way, runs, timeout)
            stuck.append(Stuck())
            return stuck[-1]

        monkeypatch.setattr(prefill.transport, "submit", submit)
    sendings, receivings = hybrid.send("r"), hybrid.receive("r")
    outcomes = [r.wait(5) for r in receivings]
    assert {o.cause for o in outcomes} == {Cause.TRANSPORT}
    held = [number for number, r in enumerate(receivings) if not r.quiet(0.3)]
    assert held
    for number, (decode, pools) in enumerate(zip(hybrid.decodes, hybrid.targets, strict=True)):
        for name in pools:
            assert decode.quarantined(name) == (sorted(WHERE[name].dst) if number in held else [])
    decode = hybrid.decodes[held[0]]
    free = {"swa": u64([1, 2]), "mamba": u64([1]), "indexer": u64([1]), "draft": u64([0])}
    with pytest.raises(ConfigError, match="page 1 of pool 'mamba' still belongs to another"):
        decode.receive("other", u64([1]), side=free)
    with pytest.raises(ConfigError, match="pool is 'ssm'; this rank holds"):
        decode.quarantined("ssm")
    for transfer in stuck:
        transfer.let_go.set()
    assert all(r.quiet(5) for r in receivings + sendings)
    assert not any(d.quarantined(n) for d in hybrid.decodes for n in d.pools.sides)


def test_page_counts_that_differ_in_a_side_pool_fail_with_both_numbers(hybrid):
    side = {name: u64(where.src) for name, where in WHERE.items() if name != KV}
    side["swa"] = side["swa"][:5]
    sendings = [
        end.send("r", u64(WHERE[KV].src), side={n: p for n, p in side.items() if n in pools})
        for end, pools in zip(hybrid.prefills, hybrid.sources, strict=True)
    ]
    outcomes = [r.wait(5) for r in hybrid.receive("r") + sendings]
    assert {o.cause for o in outcomes} == {Cause.REFUSED}
    words = "wants 24 slots of pool 'swa', which are 6 pages of 4; 5 pages were sent"
    assert any(words in o.reason for o in outcomes)


def test_what_cannot_be_is_refused_where_it_is_given(hybrid):
    decode, kv = hybrid.decodes[0], u64(WHERE[KV].dst)
    side = {name: u64(where.dst) for name, where in WHERE.items() if name != KV}

    def receive(error, words, side, **more):
        with pytest.raises(error, match=words):
            decode.receive("bad", kv, side=side, **more)

    receive(ConfigError, r"no pages of \['swa', 'mamba', 'indexer', 'draft'\]", {})
    receive(ConfigError, "no pages of .'mamba'", {n: p for n, p in side.items() if n != "mamba"})
    receive(ConfigError, r"names pool 'ssm'; this rank holds \['draft'", side | {"ssm": kv})
    receive(ConfigError, "names pool 'kv'", side | {KV: kv})
    receive(ConfigError, "'mamba': no pages", side | {"mamba": []})
    receive(PageIndexError, "'mamba': page 6 is outside the pool of 6", side | {"mamba": [6]})
    receive(PageIndexError, "'swa': page 1 appears twice", side | {"swa": [1, 1]})
    receive(ConfigError, "'swa': slots=33 do not fill 2 pages", side, side_slots={"swa": 33})
    receive(ConfigError, r"side_slots names \['kv'\]", side, side_slots={KV: 4})
    prefill, first = hybrid.prefills[2], u64(WHERE[KV].src)
    with pytest.raises(ConfigError, match="names pool 'ssm'"):
        prefill.send("bad", first, side={"ssm": [0]})
    with pytest.raises(ConfigError, match=r"names pool 'draft'; this rank holds \['indexer'"):
        hybrid.prefills[0].send("bad", first, side={"draft": [0]})
    prefill.send("r", first, layers=(), side={"mamba": [4]})
    with pytest.raises(ConfigError, match=r"layers \(2, 3\) of pool 'mamba' were sent before"):
        prefill.send("r", first, layers=(), side={"mamba": [4]})


def test_slots_that_are_no_whole_pieces_of_a_side_pool_fail_the_request(hybrid):
    side = {name: u64(where.dst) for name, where in WHERE.items() if name != KV}
    outcome = (
        hybrid.decodes[0]
        .receive("r", u64(WHERE[KV].dst), side=side, slots=20, side_slots={"swa": 22, "draft": 16})
        .wait(5)
    )
    assert outcome.cause is Cause.REFUSED
    assert "pool 'swa': slots=22 is no multiple of 4" in outcome.reason


@pytest.mark.parametrize(
    "wrong",
    [
        lambda side: side[1:],
        lambda side: (*side, SideGrant("ssm", pack_pages(u64([0])), 1)),
        lambda side: (*side, side[0]),
        lambda side: (msgspec.structs.replace(side[0], pages=pack_pages(u64([99]))), *side[1:]),
    ],
)
def test_a_grant_of_other_pools_or_pages_than_the_peer_has_is_refused(hybrid, wrong):
    decode, prefill = hybrid.decodes[0], hybrid.prefills[0]
    peer = next(p for p in decode.peers.values() if p.hello.name == "p0")
    side = tuple(
        SideGrant(name, pack_pages(u64(where.dst)), 4)
        for name, where in WHERE.items()
        if name != KV
    )
    grant = Grant("g", pack_pages(u64([0])), 8, "push", 1.0, False, wrong(side))
    decode.in_thread(lambda: decode.send_to(peer, grant))
    until(lambda: prefill.counters().get("refused") == 1)
    assert not prefill.in_thread(lambda: dict(prefill._orders))


@pytest.mark.parametrize("pool", ["ssm", "swa"])
def test_a_section_of_a_pool_that_is_not_this_ranks_fails_the_request(hybrid, monkeypatch, pool):
    prefill = hybrid.prefills[0]
    honest = prefill.send_to

    def send_to(peer, message):
        if isinstance(message, Moved) and message.pool == "mamba":
            message = msgspec.structs.replace(message, pool=pool, layers=(1, 3))
        honest(peer, message)

    monkeypatch.setattr(prefill, "send_to", send_to)
    hybrid.send("r")
    outcomes = [r.wait(5) for r in hybrid.receive("r")]
    assert any(f"layers (1, 3) of pool '{pool}' are not what" in o.reason for o in outcomes)
    assert Cause.REFUSED in {o.cause for o in outcomes}


def changed(kinds, which, **changes):
    return tuple(dataclasses.replace(k, **changes) if k.name == which else k for k in kinds)


@pytest.mark.parametrize(
    ("taken", "words"),
    [
        (
            TAKEN[:3],
            r"pools are \['draft', 'indexer', .* here and \['indexer', 'kv', .* at the peer",
        ),
        (changed(TAKEN, "draft", name="eagle"), r"\['draft', 'ind.* here and \['eagle', 'indexer'"),
        (changed(TAKEN, "mamba", heads=4), "'mamba': .*heads is 8 here and 4 at the peer"),
        (changed(TAKEN, "swa", stages=(3,)), "'swa': .*layers is 2 here and 3 at the peer"),
        (changed(TAKEN, "draft", dims={"k": 8, "v": 6}), "'draft': .*head_dim is 6 here and 8"),
        (changed(TAKEN, "draft", dims={"k": 6, "w": 6}), "'draft': .*components differ"),
        (changed(TAKEN, "indexer", page_size=8), "'indexer': .*parts of 4 of 8 slots"),
    ],
)
def test_sides_that_do_not_name_the_same_pools_are_refused_at_connect(taken, words):
    with Hybrid((PREFILL, SENT), (DECODE, taken), WHERE) as hybrid:
        prefill, decode = hybrid.prefills[2], hybrid.decodes[0]
        with pytest.raises(ConfigError, match=words):
            decode.connect(hybrid.addresses[2:3], timeout=5)
        assert not decode.peers
        assert not prefill.peers


def test_bytes_per_rank_are_those_of_its_shares(hybrid):
    hybrid.send("r")
    receivings = hybrid.receive("r")
    for pools, receiving in zip(hybrid.targets, receivings, strict=True):
        want = sum(nbytes_of(n, side, WHERE[n].tokens) for n, side in pools.items())
        assert receiving.wait(5).nbytes == want
    assert np.all([r.wait().ok for r in receivings])
