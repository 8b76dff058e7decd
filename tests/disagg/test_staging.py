import threading
import time
from functools import partial

import numpy as np
import pytest

from kvconnect.disagg.messages import Back, Lent, Staged, Want
from kvconnect.disagg.options import EndpointOptions
from kvconnect.disagg.pair_plan import plan_pair
from kvconnect.disagg.requests import RequestState
from kvconnect.disagg.ring import Lender, Ring
from kvconnect.disagg.staged import choose
from kvconnect.disagg.transport import PeerCapabilities
from kvconnect.errors import ConfigError
from kvconnect.hostmem import allocate
from tests.disagg.endpoints import Cluster, Stuck
from tests.disagg.fleet import Fleet, fill, u64

PREFILL = Fleet("page_first", 2, 4, 40, (4,), 4, (8, 4))
DECODE = Fleet("layer_first", 4, 4, 40, (2, 2), 4, (8, 4))
PIECE = 4 * 2 * 1 * 12 * 2
"""Bytes of a piece of one pair: slots x layers x heads x dims of K and V x itemsize."""


def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def cluster_with(slots, pieces_per_slot=1, **options):
    slot = PIECE * pieces_per_slot
    return Cluster(PREFILL, DECODE, stage="always", staging=slot * slots, slot=slot, **options)


def arrives(cluster, source, target, tokens):
    """Move a request, whole and right, and leave no slot behind."""
    going = [p.send("r", source) for p in cluster.prefills]
    going += [d.receive("r", target) for d in cluster.decodes]
    assert all(r.wait().ok for r in going), going
    assert all(cluster.holds(target, tokens))
    until(lambda: slots_at_rest(cluster))


def slots_at_rest(cluster):
    ends = cluster.prefills + cluster.decodes
    return all(end.ring.free == end.ring.slots for end in ends)


@pytest.mark.parametrize(("slots", "pieces"), [(2, 1), (2, 3), (8, 4)])
def test_more_pieces_than_slots_arrive_in_order(slots, pieces):
    src, dst = u64(np.arange(30)[::-1].copy()), u64(np.arange(5, 35))
    with cluster_with(slots, pieces) as cluster:
        for side in cluster.sources:
            fill(side, src, 120)
        cluster.connect().blank()
        arrives(cluster, src, dst, 120)


def test_when_the_memory_is_full_senders_wait_and_nothing_fails():
    with cluster_with(2, timeout=20) as cluster:
        for side in cluster.sources:
            fill(side, u64(range(40)), 160)
        cluster.connect().blank()
        results = []

        def one(number):
            pages = u64(range(number * 4, number * 4 + 4))
            name = f"r{number}"
            going = [p.send(name, pages) for p in cluster.prefills]
            going += [d.receive(name, pages) for d in cluster.decodes]
            results.extend(r.wait().ok for r in going)

        threads = [threading.Thread(target=one, args=(n,)) for n in range(8)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert results == [True] * 8 * 10
        assert all(cluster.holds(u64(range(32)), 128))
        until(lambda: slots_at_rest(cluster))


def test_aborted_requests_leave_no_slot_behind():
    with cluster_with(3) as cluster:
        for side in cluster.sources:
            fill(side, u64(range(40)), 160)
        cluster.connect()
        for number in range(20):
            pages = u64(range(40))
            going = [p.send(f"r{number}", pages) for p in cluster.prefills]
            got = [d.receive(f"r{number}", pages) for d in cluster.decodes]
            (cluster.prefills[0] if number % 2 else cluster.decodes[1]).abort(f"r{number}")
            assert not all(r.wait(5).ok for r in got)
            assert all(r.quiet(5) for r in going + got)
        until(lambda: slots_at_rest(cluster))


def test_a_closed_prefill_rank_gives_its_slots_back():
    with cluster_with(2) as cluster:
        cluster.connect()
        prefill, decode = cluster.prefills[0], cluster.decodes[0]
        peer = prefill.peers[decode.generation]
        prefill.in_thread(lambda: prefill.send_to(peer, Want(77, 2)))
        # Nobody waits for claim 77, so they come straight back; a lost rank says nothing.
        until(lambda: decode.ring.free == 2)
        prefill._outbound.lend = lambda *_: True
        prefill.in_thread(lambda: prefill.send_to(peer, Want(78, 2)))
        until(lambda: decode.ring.free == 0)
        prefill.close()
        prefill.transport.close()
        until(lambda: decode.ring.free == 2)


@pytest.mark.parametrize("kind", [Lent, Back, Staged])
def test_slots_of_messages_that_get_lost_come_back(kind, monkeypatch):
    """All slots of a decode rank are lost, again and again; then a request needs them."""
    pages, lost = u64(range(40)), []
    with cluster_with(2, ping=0.05) as cluster:
        for side in cluster.sources:
            fill(side, pages, 160)
        cluster.connect()
        prefill, decode = cluster.prefills[0], cluster.decodes[0]
        end = decode if kind is Lent else prefill
        honest = end._channel.send

        def send(route, envelope):
            if isinstance(envelope.message, kind) and envelope.to in {
                decode.generation,
                prefill.generation,
            }:
                lost.append(envelope)
            else:
                honest(route, envelope)

        for number in range(3):
            lost.clear()
            with monkeypatch.context() as patch:
                patch.setattr(end._channel, "send", send)
                if kind is Staged:
                    going = [prefill.send(f"r{number}", pages), decode.receive(f"r{number}", pages)]
                else:
                    peer = prefill.peers[decode.generation]
                    prefill.in_thread(partial(prefill.send_to, peer, Want(77, 2)))
                until(lambda: len(lost) >= 2)
            if kind is Staged:
                prefill.abort(f"r{number}")
                assert all(r.quiet(5) for r in going)
            until(lambda: slots_at_rest(cluster))
        cluster.blank()
        arrives(cluster, pages, pages, 160)


def test_slots_that_are_out_stay_out_when_the_prefill_side_forgets_the_rank_and_meets_it_again():
    with cluster_with(2, ping=0.05) as cluster:
        cluster.connect()
        prefill, decode = cluster.prefills[0], cluster.decodes[0]
        peer = prefill.peers[decode.generation]
        prefill._outbound.lend = lambda *_: True  # a push into the slot is under way
        prefill.in_thread(lambda: prefill.send_to(peer, Want(78, 2)))
        until(lambda: decode.ring.free == 0)
        peer.ended = time.monotonic()  # as when the line to it breaks
        until(lambda: prefill.peers.get(decode.generation) is not peer)
        decode.connect(cluster.addresses)
        assert prefill.peers[decode.generation] is not peer
        time.sleep(0.5)  # ten pings
        assert decode.ring.free == 0
        for slot in range(2):
            prefill.in_thread(partial(prefill.send_to, peer, Back(slot)))
        until(lambda: decode.ring.free == 2)


@pytest.mark.parametrize("kind", ["push", "pull", "packed"])
def test_what_is_under_way_is_waited_for_when_the_next_batch_cannot_begin(kind, monkeypatch):
    """A transfer that was begun holds the pages, however the request came to fail."""
    pages = u64(range(40))
    stage = {"stage": "always" if kind == "packed" else "never", "batch_bytes": PIECE}
    slots = {"staging": 2 * PIECE, "slot": PIECE}
    with Cluster(PREFILL, DECODE, **stage, **slots) as cluster:
        cluster.connect()
        prefill, decode = cluster.prefills[0], cluster.decodes[0]
        end = decode if kind == "pull" else prefill
        begun = []

        def submit(*_):
            if begun:
                raise ZeroDivisionError("no second batch")
            begun.append(Stuck())
            return begun[0]

        with monkeypatch.context() as patch:
            patch.setattr(end.transport, "submit", submit)
            pull = {"way": "pull"} if kind == "pull" else {}
            going = [prefill.send("r", pages), decode.receive("r", pages, **pull)]
            until(lambda: all(one.state is RequestState.FAILED for one in going))
        assert not going[end is decode].quiet(0.5), "the first batch still moves"
        begun[0].let_go.set()
        assert all(one.quiet(5) for one in going)
        until(lambda: slots_at_rest(cluster))


def test_only_what_a_rank_should_have_had_when_it_was_asked_was_lost():
    with Ring(allocate(1 << 16, "staging"), 1 << 14) as ring:
        lender = Lender(ring)
        lender.want("a", 1, 2)
        lender.pump()
        first = lender.ask("a")
        assert lender.settle("a", first + 1, []) == 0, "the answer to no question"
        lender.want("a", 1, 1)
        lender.pump()  # slot 2 is on its way while the answer comes
        lender.take_back("a", 1)
        assert lender.ask("a") == first, "asked again, as no answer came by now"
        assert lender.settle("a", first, [0]) == 0
        assert lender.settle("a", first, []) == 0, "an answer counts once"
        assert lender.settle("a", lender.ask("a"), [2]) == 1
        assert (ring.free, lender.lent) == (2, 1), "slot 1 is still to be emptied"
        asked = lender.ask("a")
        lender.take_back("a", 2)
        ring.give(2)
        lender.want("a", 1, 3)
        assert ("a", 1, 2) in lender.pump()
        assert lender.settle("a", asked, []) == 0, "slot 2 was lent once more since"
        assert lender.settle("b", lender.ask("b"), [2]) == 0, "it never had any"


@pytest.mark.parametrize("message", [Back(0), Staged("r", (0, 2), 0, 1, 1)])
def test_slots_that_were_not_lent_are_refused(message):
    with cluster_with(2) as cluster:
        cluster.connect()
        prefill, decode = cluster.prefills[0], cluster.decodes[0]
        peer = prefill.peers[decode.generation]
        prefill.in_thread(lambda: prefill.send_to(peer, message))
        until(lambda: decode.counters().get("refused") == 1)
        assert decode.ring.free == 2


def test_lending_goes_in_turn_and_keeps_count():
    with Ring(allocate(1 << 16, "staging"), 1 << 14) as ring:
        lender = Lender(ring)
        lender.want("a", 1, 100)
        lender.want("b", 2, 1)
        assert lender.pump() == [("a", 1, 0), ("a", 1, 1), ("a", 1, 2), ("a", 1, 3)]
        assert lender.lent == 4
        with pytest.raises(ConfigError, match="slot 2 is not with this peer"):
            lender.take_back("b", 2)
        lender.forget("a")
        lender.take_back("a", 2)
        ring.give(2)
        assert lender.pump() == [("b", 2, 2)]
        lender.reclaim("a")
        assert (ring.free, lender.lent) == (3, 1)


def test_slots_are_apart_and_inside_the_memory():
    memory = allocate(10_000, "staging")
    with Ring(memory, 3000) as ring:
        assert ring.slots == 3
        for slot in range(3):
            ring.buffer(slot, 3000)[:] = slot + 1
        for slot in range(3):
            assert set(ring.buffer(slot, 3000)) == {slot + 1}
            assert ring.region.address <= ring.address(slot) <= ring.region.end - 3000
    with pytest.raises(ConfigError, match="must hold two"):
        Ring(allocate(4096, "staging"), 4096)


def test_packing_is_chosen_by_what_runs_cost():
    base = {"tp": 1, "page_size": 16, "pages": 4, "stages": (64,), "heads": 8, "dims": (64, None)}
    whole, cut = Fleet("page_first", **base).sides()[0], Fleet("page_head", **base).sides()[0]
    dear = PeerCapabilities(run_seconds=60e-6, byte_seconds=6e-10)
    free = PeerCapabilities(run_seconds=0, byte_seconds=6e-10)
    short, long = plan_pair(whole, cut, whole.placement), plan_pair(cut, cut, cut.placement)
    assert choose(short, 64, dear)[0]
    assert not choose(long, 64, dear)[0]
    assert not choose(short, 64, free)[0]
    assert "runs of 128 B" in choose(short, 64, dear)[1]


@pytest.mark.parametrize(("least", "packed"), [(8, False), (9, True)])
def test_a_least_run_decides_instead_of_costs(least, packed):
    # Runs are one head of a slot, 8 elements of K and 4 of V; the shortest has 4 x 2 B.
    src, dst = u64(np.arange(30)), u64(np.arange(5, 35))
    slot = PIECE * 4
    with Cluster(PREFILL, DECODE, min_run_bytes=least, staging=8 * slot, slot=slot) as cluster:
        for side in cluster.sources:
            fill(side, src, 120)
        cluster.connect().blank()
        arrives(cluster, src, dst, 120)
        trips = [trip for prefill in cluster.prefills for trip in prefill.trips()]
        assert {(trip.packed, trip.why) for trip in trips} == {
            (packed, f"runs of 8 B, min_run_bytes={least}")
        }


def test_a_least_run_where_nothing_is_chosen_is_refused():
    with pytest.raises(ConfigError, match="min_run_bytes=4096 with stage='always'"):
        EndpointOptions(min_run_bytes=4096, stage="always")
    with pytest.raises(ConfigError, match="min_run_bytes=-1 must not be below 0"):
        EndpointOptions(min_run_bytes=-1)
