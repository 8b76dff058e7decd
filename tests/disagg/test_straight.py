"""Short runs on shared memory: copied straight from page to page, within and between processes."""

import dataclasses
import threading
import time

import numpy as np
import pytest

from kvconnect.disagg.blocks import Block, Half
from kvconnect.disagg.shm import ShmTransport
from kvconnect.disagg.straight import Straight, carry_straight
from kvconnect.disagg.transport import PeerStatus
from kvconnect.errors import RegistrationError
from kvconnect.region import Region
from tests.disagg.endpoints import Cluster
from tests.disagg.fault_base import FaultBase
from tests.disagg.fleet import Fleet, fill, u64

SRC, DST, TOKENS = u64([3, 0, 5, 1, 2]), u64([7, 2, 5, 0, 8, 1, 9, 3, 6, 4]), 20
BASE = Fleet("page_first", 4, 4, 6, (3,), 8, (8, None))


@pytest.mark.parametrize(
    "decode", [(8, 4, "page_first"), (2, 2, "page_head"), (8, 8, "layer_first")]
)
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_every_byte_arrives_where_it_should(layout, decode):
    tp, size, other = decode
    prefill = dataclasses.replace(BASE, layout=layout, dims=(6, 4))
    target = dataclasses.replace(prefill, tp=tp, page_size=size, layout=other, pages=11)
    pages = DST[: -(-TOKENS // size)]
    with Cluster(prefill, target) as cluster:
        for side in cluster.sources:
            fill(side, SRC, TOKENS)
        cluster.connect().blank()
        going = [p.send("r", SRC) for p in cluster.prefills]
        going += [d.receive("r", pages, slots=TOKENS) for d in cluster.decodes]
        assert all(request.wait(10).ok for request in going)
        assert all(cluster.holds(pages, TOKENS))
        whys = [trip.why for p in cluster.prefills for trip in p.trips()]
        assert whys
        assert all("copied straight" in why for why in whys), whys


class TestBetweenProcesses(FaultBase):
    transport = "shm"

    def test_every_byte_arrives_and_a_killed_rank_leaves_nothing(self):
        with self.prefill(stage="auto") as source:
            baseline = None
            for number in range(6):
                with self.decode(f"d{number}") as target:
                    self.meet(source, target)
                    for turn in range(3):
                        target.paint(self.target, 7)
                        self.good(source, target, f"r{number}.{turn}")
                    self.begin(source, target, f"killed{number}")
                    target.kill()
                    assert source.wait(f"killed{number}", 10.0)[0] in {"done", "failed"}
                    assert source.quiet(f"killed{number}", 5.0)
                baseline = baseline or self.alone(source)
            assert "copied straight" in source.why()
            self.back_to(source, baseline)


@pytest.fixture
def pair():
    """Two pages of 64 B at two ranks, and a block of 16 B a page."""
    mine, theirs = np.arange(128, dtype=np.uint8), np.zeros(128, dtype=np.uint8)
    a, b = (Region(name, m.ctypes.data, 128) for name, m in (("a", mine), ("b", theirs)))
    halves = (Half(r.address, 64, 0, 1, (8,)) for r in (a, b))
    block = Block(4, (4,), *halves)
    with (
        ShmTransport() as ours,
        ShmTransport() as other,
        ours.register([a]),
        other.register([b]),
        ours.connect(other.describe(), 5) as peer,
    ):
        yield ours, other, peer, theirs, lambda: Straight(ours, peer, [block], ([a], [b]))


def carry(copier, seconds=5.0, *, stop=False):
    ended = threading.Event()
    if stop:
        ended.set()
    until = time.monotonic() + seconds
    return carry_straight(copier, (u64([0, 1]), u64([1, 0])), 2, until=until, stop=ended)


def test_what_ends_it_early_leaves_the_pages_alone(pair):
    _, other, _, theirs, copier = pair
    assert carry(copier, -1.0).failure.status is PeerStatus.TIMEOUT
    assert carry(copier, stop=True).failure.status is PeerStatus.CANCELLED
    assert not theirs.any()
    assert carry(copier).nbytes == 32
    runs = [
        page * 64 + step * 8 + byte for page in (1, 0) for step in range(4) for byte in range(4)
    ]
    swapped = [at - 64 if at >= 64 else at + 64 for at in runs]
    expected = np.zeros(128, dtype=np.uint8)
    expected[swapped] = runs
    assert np.array_equal(theirs, expected)
    straight = copier()
    other.close()
    for closed in (copier, lambda: straight):
        assert carry(closed).failure.status is PeerStatus.PEER_GONE


def test_memory_that_was_not_granted_is_refused(pair):
    ours, _, peer, theirs, _ = pair
    far = Region("far", theirs.ctypes.data + 64, 128)
    with pytest.raises(RegistrationError, match="outside every registered"):
        Straight(ours, peer, [], ([], [far]))
