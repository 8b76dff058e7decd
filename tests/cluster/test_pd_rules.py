"""What P/D ranks must hold to when a host goes silent: whose pages are whose, and who is who."""

import pytest

from kvconnect.testing.peer_suite.base import until
from tests.cluster.pd_fleet import ENDPOINT, Fleet
from tests.cluster.test_pd_worker import DEEP, IDS, TRANSPORTS, WIDE, clean, settled

MANY = tuple(range(40))
MIB = 1 << 20


def sent(host):
    """Bytes that a host has put on its cable."""
    return int(host.read("/sys/class/net/eth0/statistics/tx_bytes"))


@TRANSPORTS
@pytest.mark.cluster(hosts=2, local=True)
def test_late_bytes_reach_no_page_that_was_given_out_again(cluster, transport):
    cluster.host(0).shape("20mbit")  # some three seconds for the whole request
    straight = ENDPOINT | {"stage": "never"}  # into the pages, not by way of a slot
    sides = [(0, WIDE)], [(1, WIDE)]
    with Fleet(cluster, transport, *sides, pages=48, endpoint=straight) as fleet:
        fleet.connect()
        prefill, decode = fleet.ranks["prefill0"], fleet.ranks["decode0"]
        before, quiet = decode.state(), sent(cluster.host(0))
        prefill.ask("send", request="cut short", ids=MANY)
        decode.ask("receive", request="cut short", ids=MANY)
        until(lambda: sent(cluster.host(0)) > quiet + MIB, 10)
        prefill.process.stop()
        assert decode.call("cut short").misses == {"PEER_LOST": len(MANY)}
        prefill.process.go_on()
        fleet.connect()
        assert settled(decode, before, 20) in ([], [("peers", 0.0, 1.0)])
        decode.ask("verify")
        assert decode.calls[-1].reused == ()


@pytest.mark.cluster(hosts=2, local=True)
@pytest.mark.parametrize(
    ("transport", "lost", "way"),
    [
        ("mooncake", "decode0", "push"),
        ("nixl", "decode0", "push"),
        ("mooncake", "prefill0", "pull"),
    ],
)
def test_a_rank_that_comes_back_is_not_taken_for_the_one_that_went(cluster, transport, lost, way):
    with Fleet(cluster, transport, [(0, DEEP)], [(1, WIDE)]) as fleet:
        fleet.connect()
        assert fleet.transfer("before", IDS, receive={"way": way})["decode0"].hits == IDS
        host = fleet.configs[lost][0]
        host.cut()  # the other side's pings would be refused by the host that is up again
        host.power_cut()
        fleet.ranks[lost].close()
        fleet.start(lost)
        host.heal()
        fleet.connect()
        ends = fleet.transfer("after", IDS, receive={"way": way})
        assert ends["decode0"].hits == IDS
        assert all(clean(end) for end in ends.values())
