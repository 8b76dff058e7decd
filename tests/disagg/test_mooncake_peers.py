import ctypes
import socket

import msgspec
import numpy as np
import pytest

from kvconnect.disagg.transport import Runs, Way
from kvconnect.disagg.transports import open_transport
from kvconnect.errors import ConfigError, RegistrationError, UnavailableError
from kvconnect.region import Region
from kvconnect.testing.peer_suite import PeerTransportSuite
from kvconnect.testing.peer_suite.base import Block, runs_of, until, whole
from kvconnect_mooncake import peers, peers_driver
from tests.disagg.matrix import Fleetful, cases, check


class TestMooncake(PeerTransportSuite):
    transport = "mooncake"


@pytest.fixture(scope="module")
def transports():
    fleetful = Fleetful("mooncake")
    yield fleetful
    fleetful.close()


@pytest.mark.parametrize("case", cases(0), ids=str)
def test_a_third_of_the_matrix(transports, case):
    check(transports, case)


@pytest.fixture
def pair(transports):
    with transports.lend() as ours, transports.lend() as theirs:
        yield ours, theirs


def test_another_generation_behind_the_same_address_is_refused_at_connect(pair):
    ours, theirs = pair
    known = msgspec.msgpack.decode(theirs.describe())
    # The life server is the right one; the engine behind the port is ours, as after a restart.
    own = msgspec.msgpack.decode(ours.describe())
    forged = known | {"port": own["port"], "header": own["header"]}
    with pytest.raises(UnavailableError, match=f"another rank's: generation {ours.generation}"):
        ours.connect(msgspec.msgpack.encode(forged), 10)


def test_after_a_failure_the_generation_is_read_again_before_anything_moves(pair):
    ours, theirs = pair
    with (
        Block(ours, 1 << 16) as mine,
        Block(theirs, 1 << 16) as other,
        Block(theirs, 4096) as gone,
        ours.connect(theirs.describe(), 10) as peer,
    ):
        other.data[:] = 5
        gone.handle.close()
        # The engine there refuses what it has unregistered, though it was granted.
        runs = runs_of(mine.address, gone.address, 64)
        failed = ours.submit(peer, Way.PUSH, runs, 10)
        assert "failed" in failed.wait(10).cause
        # As if another process had come to that address in the meantime.
        ctypes.memset(theirs._header.address, 0xAB, 16)
        try:
            late = ours.submit(peer, Way.PUSH, whole(mine, other.address), 10)
            assert "another rank's: generation abab" in late.wait(10).cause
            assert (other.data == 5).all()
        finally:
            ctypes.memmove(theirs._header.address, bytes.fromhex(theirs.generation), 16)
        again = ours.submit(peer, Way.PULL, whole(mine, other.address), 10)
        assert again.wait(10).ok
        assert (mine.data == 5).all()
        until(failed.done)


def test_memory_is_leased_for_the_settling_time_after_a_failed_push(pair):
    ours, theirs = pair
    with (
        Block(ours, 4096) as mine,
        Block(theirs, 4096) as gone,
        ours.connect(theirs.describe(), 10) as peer,
    ):
        gone.handle.close()
        failed = ours.submit(peer, Way.PUSH, whole(mine, gone.address), 10)
        assert not failed.wait(10).ok
        assert not failed.done()
        # The default is 3 s: a second more than the engine waits for progress.
        assert until(failed.done, 8) > 2
        pulled = ours.submit(peer, Way.PULL, whole(mine, gone.address), 10)
        assert not pulled.wait(10).ok
        assert until(pulled.done, 8) < 1


def test_long_runs_are_cut_and_no_byte_is_lost():
    runs = Runs(*(np.array(c, dtype=np.uint64) for c in ([64, 1 << 30], [128, 1 << 31], [3, 5])))
    driver = peers_driver.TransferDriver(None, None, ("s", 1, b""), 8)
    assert list(driver.pieces(Way.PULL, runs)) == [
        (Way.PULL, 64, 128, 3),
        (Way.PULL, 1 << 30, 1 << 31, 5),
    ]
    size = 2 * peers_driver.PIECE_BYTES + 1
    runs = Runs(*(np.array([c], dtype=np.uint64) for c in (10, 20, size)))
    step = peers_driver.PIECE_BYTES
    assert [piece[1:] for piece in driver.pieces(Way.PUSH, runs)] == [
        (10, 20, step),
        (10 + step, 20 + step, step),
        (10 + 2 * step, 20 + 2 * step, 1),
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"protokol": "tcp"}, "unknown option 'protokol'; did you mean protocol"),
        ({"protocol": "ib"}, "protocol='ib' is not one of: tcp, rdma"),
        ({"entries": 1024}, "entries=1024; it must be 1 to 512"),
        ({"settle": 0}, "settle=0"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(ConfigError, match=words):
        open_transport("mooncake", options)


def test_an_address_that_is_not_ours_is_refused():
    with pytest.raises(UnavailableError, match="give an address of this host with host="):
        open_transport("mooncake", {"host": "192.0.2.1"})


def test_rdma_without_a_card_is_refused_and_not_replaced(monkeypatch):
    asked = []
    monkeypatch.setattr(peers, "check_cards", lambda *a, **k: asked.append((a, k)))
    monkeypatch.setattr(peers, "in_use", lambda: "tcp")
    with pytest.raises(UnavailableError, match="protocol=rdma was asked for, tcp is in use"):
        open_transport("mooncake", {"protocol": "rdma"})
    with open_transport("mooncake", {"protocol": "rdma", "allow_fallback": "yes"}) as transport:
        assert transport.options.allow_fallback
    assert [k["allow_fallback"] for _, k in asked] == [False, True]


def test_regions_that_cannot_be_registered_are_refused(pair):
    ours, _ = pair
    with Block(ours, 8192, register=False) as mine:
        with pytest.raises(RegistrationError, match="on device 'cuda:0'"):
            ours.register([Region("r", mine.address, 64, "cuda:0")])
        with open_transport("mooncake", {"max_region_bytes": "4KiB"}) as small:
            assert small.capabilities.max_region_bytes == 4096
            with pytest.raises(RegistrationError, match="larger than max_region_bytes=4096 B"):
                small.register([mine.region])


def test_who_listens_at_the_port_without_the_token_is_no_peer(pair):
    ours, theirs = pair
    known = msgspec.msgpack.decode(theirs.describe())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        forged = known | {"life": silent.getsockname()[1]}
        with pytest.raises(UnavailableError, match="no peer of generation"):
            ours.connect(msgspec.msgpack.encode(forged), 0.5)
