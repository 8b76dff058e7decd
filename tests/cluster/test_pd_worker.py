"""P/D rank workers: what they report, over real addresses, between ranks of different shape."""

import time

import msgspec
import pytest

from kvconnect.errors import BackendError
from tests.cluster.pd_fleet import Fleet, start

pytestmark = pytest.mark.cluster(hosts=2)

WIDE = {"layout": "page_head", "page_size": 16}
DEEP = {"layout": "page_first", "page_size": 32}
NUMBER = 16 * 4 * 4 * 96 * 2  # bytes of 16 slots, 4 layers, 4 heads of 64 + 32 elements of 2 B
IDS = tuple(range(3, 14))
KEPT = 4
TRANSPORTS = pytest.mark.parametrize("transport", ["mooncake", "nixl"])


@pytest.fixture
def slow(cluster):
    """Have the prefill side's host send 2.5 MB a second: time for faults in mid-transfer."""
    cluster.host(0).shape("20mbit")


def pair(cluster, transport, **settings):
    """One rank of each side."""
    return Fleet(cluster, transport, [(0, DEEP)], [(1, WIDE)], **settings)


def clean(call):
    return (call.wrong, call.reused, call.misses, call.error) == ((), (), {}, "")


def settled(rank, before, seconds=10.0):
    """Wait until a rank holds what it held before, but for its rss; returns what differs.

    Of files and threads it may have a few more: libraries keep connections once opened.
    """
    until = time.monotonic() + seconds
    names = ("requests", "free_pages", "peers", "free_slots")
    while True:
        now = rank.state()
        pairs = [(n, before.stats[n], now.stats[n]) for n in names]
        wrong = [one for one in pairs if one[1] != one[2]]
        pairs = [(n, getattr(before, n), getattr(now, n)) for n in ("fds", "threads")]
        wrong += [one for one in pairs if one[2] > one[1] + KEPT]
        if not wrong or time.monotonic() > until:
            return wrong
        time.sleep(0.1)


@TRANSPORTS
def test_ranks_of_other_shape_move_pages_and_say_so(cluster, transport):
    stages = {"tp_rank": 0, "tp_size": 1, "layout": "page_first_direct", "page_size": 32}
    prefill = [(0, stages | {"stage": (0, 1)}), (0, stages | {"stage": (1, 4)})]
    with Fleet(cluster, transport, prefill, [(1, WIDE), (1, WIDE)]) as fleet:
        fleet.connect()
        ends = fleet.transfer("first", IDS, send={"step": 1})
        for name, call in ends.items():
            assert clean(call)
            assert (call.hits, call.acked) == ((IDS, ()) if "decode" in name else ((), IDS))
            assert call.asked == len(IDS)
            assert 0 < call.seconds < call.deadline
        quarter = NUMBER // 4 * len(IDS)
        moved = {name: call.nbytes for name, call in ends.items()}
        assert [moved["prefill0"], moved["prefill1"]] == [quarter, 3 * quarter]
        assert [moved["decode0"], moved["decode1"]] == [2 * quarter, 2 * quarter]


def test_more_ranks_than_heads_and_latent_pages_of_64_slots(cluster):
    latent = {"heads": 1, "v_head_dim": 0, "layout": "layer_first"}
    prefill = [(0, {"page_size": 64}), (0, {"page_size": 64})]
    decode = [(1, {"page_size": 16})]
    with Fleet(cluster, "mooncake", prefill, decode, **latent) as fleet:
        fleet.connect()
        ends = fleet.transfer("latent", IDS)
        assert all(clean(call) for call in ends.values())
        assert ends["decode0"].hits == IDS


@TRANSPORTS
def test_a_byte_that_changed_on_its_way_is_a_miss_and_wrong_where_nobody_hashes(cluster, transport):
    with pair(cluster, transport) as fleet:
        fleet.connect()
        prefill = fleet.ranks["prefill0"]
        prefill.ask("flip", batches=1)
        found = fleet.transfer("hashed", IDS)["decode0"]
        assert (found.hits, found.wrong, found.misses) == ((), (), {"CHECKSUM": len(IDS)})
        prefill.ask("flip", batches=1)
        found = fleet.transfer("plain", IDS, receive={"checksum": False})["decode0"]
        assert len(found.wrong) == 1
        assert set(found.hits) == set(IDS) - set(found.wrong)
        found = fleet.transfer("after", IDS)["decode0"]
        assert clean(found)
        assert found.hits == IDS


@TRANSPORTS
def test_pages_of_a_stopped_sender_are_not_used_until_it_is_quiet(cluster, slow, transport):
    ids = tuple(range(40))
    with pair(cluster, transport, pages=48) as fleet:
        fleet.connect()
        before = fleet.ranks["decode0"].state()
        prefill, decode = fleet.ranks["prefill0"], fleet.ranks["decode0"]
        prefill.ask("send", request="cut short", ids=ids)
        decode.ask("receive", request="cut short", ids=ids)
        prefill.process.stop()
        call = decode.call("cut short")
        assert (call.hits, call.misses) == ((), {"PEER_LOST": 40})
        assert call.seconds < 5
        held = decode.state()
        assert held.quarantined == 40 * NUMBER
        assert held.stats["free_pages"] == 8
        with pytest.raises(BackendError, match=r"CapacityError.*40 pages, 8 are free"):
            decode.ask("receive", request="too much", ids=ids)
        prefill.process.go_on()
        fleet.connect()
        assert settled(decode, before, 20) in ([], [("peers", 0.0, 1.0)])
        decode.ask("verify")
        assert decode.calls[-1].reused == ()
        fleet.cluster.host(0).shape(None)
        assert fleet.transfer("again", ids)["decode0"].hits == ids


@TRANSPORTS
def test_a_rank_that_restarts_is_another_generation_on_the_same_address(cluster, transport):
    with pair(cluster, transport) as fleet:
        decode = fleet.ranks["decode0"]
        first = fleet.ranks["prefill0"]
        fleet.connect()
        fleet.transfer("warm", IDS)
        before = decode.state()
        decode.ask("receive", request="never sent", ids=IDS)
        first.process.kill()
        call = decode.call("never sent")
        assert (call.hits, call.misses) == ((), {"PEER_LOST": len(IDS)})
        assert call.seconds < 3
        fleet.start("prefill0")
        fleet.connect()
        assert fleet.transfer("after", IDS)["decode0"].hits == IDS
        # Mooncake's engine keeps a connection or two to every process that is gone.
        assert settled(decode, before) == []
        assert [call.number for call in decode.calls] == [0, 1, 2]


def test_an_abort_ends_both_sides_and_frees_the_pages(cluster, slow):
    ids = tuple(range(40))
    with pair(cluster, "mooncake", pages=40) as fleet:
        fleet.connect()
        fleet.transfer("warm", IDS)
        ranks = list(fleet.ranks.values())
        before = [rank.state() for rank in ranks]
        ranks[0].ask("send", request="unwanted", ids=ids)
        ranks[1].ask("receive", request="unwanted", ids=ids)
        ranks[1].ask("abort", request="unwanted")
        ends = [rank.call("unwanted", 10) for rank in ranks]
        assert [call.misses for call in ends] == [{"PEER_GAVE_UP": 40}, {"CANCELLED": 40}]
        assert [settled(rank, then, 20) for rank, then in zip(ranks, before, strict=True)] == [
            [],
            [],
        ]


def test_without_a_sender_a_request_ends_by_its_deadline(cluster):
    with pair(cluster, "mooncake") as fleet:
        fleet.connect()
        decode = fleet.ranks["decode0"]
        decode.ask("receive", request="alone", ids=IDS, deadline=0.5)
        call = decode.call("alone", 5)
        # Both sides have the same deadline; the other's word may be here first.
        assert call.misses in ({"TIMEOUT": len(IDS)}, {"PEER_GAVE_UP": len(IDS)})
        assert 0.5 <= call.seconds < 1.0


def test_words_that_are_unknown_or_ill_formed_are_answered_not_obeyed(cluster):
    with pair(cluster, "mooncake") as fleet:
        decode = fleet.ranks["decode0"]
        for word, arguments, words in (
            ("recv", {}, "word is 'recv'; it must be one of send, receive"),
            ("receive", {"request": "x", "ids": "y"}, "Expected `array`, got `str`"),
            ("send", {"request": "x", "ids": [1]}, "send is not for a decode rank"),
            ("connect", {"addresses": ["nowhere"]}, "write tcp://HOST:PORT"),
        ):
            with pytest.raises(BackendError, match=words):
                decode.ask(word, **arguments)
        decode.ask("quit")
        assert decode.process.wait(15) == 0


def test_a_rank_ends_with_whoever_drives_it_and_none_starts_open_to_a_network(cluster):
    with pair(cluster, "mooncake") as fleet:
        host, config = fleet.configs["prefill0"]
        with pytest.raises(BackendError, match="needs keys"):
            start(host, msgspec.structs.replace(config, keys=None, name="open"))
        config = msgspec.structs.replace(config, listen=f"tcp://{host.address}:{host.free_port()}")
        argv = [host.python, "-m", "kvconnect.testing.cluster.pd_rank"]
        done = host.run(argv, timeout=60, input=msgspec.json.encode(config).decode() + "\n")
        assert done.returncode == 0
        assert '"ready":"prefill0"' in done.stdout
