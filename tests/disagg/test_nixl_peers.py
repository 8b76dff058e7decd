import time

import msgspec
import numpy as np
import pytest

from kvconnect.disagg.transport import Way
from kvconnect.disagg.transports import open_transport
from kvconnect.errors import ConfigError, RegistrationError, UnavailableError
from kvconnect.testing.peer_suite import PeerTransportSuite
from kvconnect.testing.peer_suite.base import Block, runs_of, whole
from kvconnect.testing.peer_suite.processes import ProcessCases
from kvconnect_nixl.peers import POST_BYTES, POST_RUNS, UcxDriver
from tests.disagg.matrix import Fleetful, cases, check


class TestNixl(PeerTransportSuite):
    transport = "nixl"


class TestNixlOverTcp(ProcessCases):
    """As between hosts: UCX copies nothing itself, the other process must take part."""

    transport = "nixl"
    rounds = 1

    @pytest.fixture(autouse=True)
    def tcp(self, monkeypatch):
        monkeypatch.setenv("UCX_TLS", "tcp")


def test_ranks_that_do_nothing_take_no_processor():
    with open_transport("nixl") as one, open_transport("nixl") as other:
        one.connect(other.describe(), 10)
        before = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before < 0.5, "a thread that never sleeps takes 1 s"


@pytest.fixture(scope="module")
def transports():
    fleetful = Fleetful("nixl")
    yield fleetful
    fleetful.close()


@pytest.mark.parametrize("case", cases(1), ids=str)
def test_a_third_of_the_matrix(transports, case):
    check(transports, case)


@pytest.fixture
def pair(transports):
    with transports.lend() as ours, transports.lend() as theirs:
        yield ours, theirs


def test_the_agent_of_another_rank_is_refused(transports, pair):
    ours, theirs = pair
    with transports.lend() as third, Block(theirs, 4096), Block(third, 4096):
        known = msgspec.msgpack.decode(theirs.describe())
        other = msgspec.msgpack.decode(third.describe())
        for agent in (other["agent"], b"no metadata"):
            with pytest.raises(UnavailableError, match="metadata"):
                ours.connect(msgspec.msgpack.encode(known | {"agent": agent}), 10)
        with ours.connect(theirs.describe(), 10) as peer:
            assert peer.alive()


def test_two_connections_to_a_rank_end_one_by_one(pair):
    ours, theirs = pair
    with Block(ours, 4096) as mine, Block(theirs, 4096) as other:
        first, second = (ours.connect(theirs.describe(), 10) for _ in range(2))
        first.close()
        assert first.lane.join(10)
        other.data[:] = 9
        assert ours.submit(second, Way.PULL, whole(mine, other.address), 10).wait(10).ok
        assert (mine.data == 9).all()
        second.close()


def test_memory_that_a_rank_has_unregistered_is_no_longer_granted(pair):
    ours, theirs = pair
    with Block(ours, 4096) as mine, Block(theirs, 4096) as other:
        other.handle.close()
        with (
            ours.connect(theirs.describe(), 10) as peer,
            pytest.raises(RegistrationError, match="no region is registered"),
        ):
            ours.submit(peer, Way.PUSH, whole(mine, other.address), 10)


def test_batches_are_cut_to_what_one_call_may_take():
    driver = UcxDriver(None, "peer", b"")
    at = np.arange(10_000, dtype=np.uint64) * np.uint64(1 << 12)
    sizes = np.full(10_000, 1 << 12, dtype=np.uint64)
    sizes[7] = 3 * POST_BYTES
    pieces = list(driver.pieces(Way.PUSH, runs_of(at + 64, at + 128, sizes)))
    assert all(len(p[1]) <= POST_RUNS and p[1][:, 1].sum() <= POST_BYTES for p in pieces)
    for column, base in ((1, 64), (2, 128)):
        rows = np.concatenate([p[column] for p in pieces])
        assert rows[:, 1].sum() == sizes.sum()
        # The long run lies in three rows, one after the other.
        starts = np.concatenate((at[:8], at[7] + POST_BYTES * np.arange(1, 3), at[8:])) + base
        assert np.array_equal(rows[:, 0], starts.astype(np.uint64))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "lo"}, "unknown option 'device'; did you mean devices"),
        ({"settle": "-1"}, "settle=-1"),
        ({"workers": "0"}, "workers=0"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(ConfigError, match=words):
        open_transport("nixl", options)
