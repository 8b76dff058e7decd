"""Cases: deadlines, cancel, leases, closing, and metadata that cannot be."""

from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import pytest

from kvconnect.disagg.transport import PeerStatus, Way
from kvconnect.errors import (
    ClosedError,
    ConfigError,
    KVConnectError,
    RegistrationError,
    TransferTimeoutError,
    UnavailableError,
)
from kvconnect.testing.handles import handles
from kvconnect.testing.peer_suite.base import WAIT, Block, SuiteBase, runs_of, until, whole

SMALL = 1 << 16
PIECE = 64 << 10


class LifecycleCases(SuiteBase):
    """Within one process."""

    def test_a_batch_for_which_there_is_no_time_ends_as_timeout(self) -> None:
        with self.two(SMALL) as (ours, peer, mine, other):
            transfer = ours.submit(peer, Way.PUSH, whole(mine, other.address), 0)
            assert transfer.wait(WAIT).status is PeerStatus.TIMEOUT
            until(transfer.done)

    def test_waiting_for_a_moment_says_timeout_and_the_batch_goes_on(self) -> None:
        with self.two(self.bulk) as (ours, peer, mine, other):
            transfer = ours.submit(peer, Way.PUSH, whole(mine, other.address), WAIT)
            early = transfer.wait(0)
            assert early.status in {PeerStatus.TIMEOUT, PeerStatus.OK}
            assert transfer.wait(WAIT).ok
            assert transfer.done()
            assert np.array_equal(mine.data, other.data)

    def test_cancel_stops_what_has_not_begun_and_nothing_else(self) -> None:
        with self.two(self.bulk) as (ours, peer, mine, other):
            runs = whole(mine, other.address, piece=PIECE)
            transfers = [ours.submit(peer, Way.PUSH, runs, WAIT) for _ in range(4)]
            transfers[3].cancel()
            assert [t.wait(WAIT).status for t in transfers[:3]] == [PeerStatus.OK] * 3
            last = transfers[3].wait(WAIT)
            assert last.status in {PeerStatus.CANCELLED, PeerStatus.OK}
            assert last.ok or not last.nbytes
            until(transfers[3].done)
            assert np.array_equal(mine.data, other.data)

    def test_a_cancelled_batch_writes_nothing_once_it_is_done(self) -> None:
        with self.two(self.bulk) as (ours, peer, mine, other):
            transfers = [
                ours.submit(peer, Way.PULL, whole(mine, other.address, piece=PIECE), WAIT)
                for _ in range(3)
            ]
            for transfer in transfers:
                transfer.cancel()
            for transfer in transfers:
                until(transfer.done)
            mine.data[:] = 3
            assert self.move(ours, peer, Way.PULL, runs_of(mine.address, other.address, 1)).ok
            assert (mine.data[1:] == 3).all()

    def test_unregistering_waits_for_what_is_under_way(self) -> None:
        with self.two(self.bulk) as (ours, peer, mine, other):
            transfer = ours.submit(peer, Way.PUSH, whole(mine, other.address), WAIT)
            assert mine.handle is not None
            mine.handle.close()
            assert transfer.done()
            with pytest.raises(RegistrationError):
                ours.submit(peer, Way.PUSH, whole(mine, other.address), WAIT)

    def test_a_closed_transport_refuses_and_its_peers_see_it(self) -> None:
        ours, theirs = self.open(), self.open()
        with ours, theirs, Block(ours, SMALL) as mine, Block(theirs, SMALL) as other:
            peer = ours.connect(theirs.describe(), WAIT)
            assert (peer.alive(), peer.generation) == (True, theirs.generation)
            metadata = theirs.describe()
            assert other.handle is not None
            other.handle.close()
            other.data[:] = 1
            theirs.close()
            theirs.close()
            until(lambda: not peer.alive())
            outcome = ours.submit(peer, Way.PUSH, whole(mine, other.address), WAIT).wait(WAIT)
            assert outcome.status is PeerStatus.PEER_GONE
            assert (other.data == 1).all()
            for call in (theirs.describe, lambda: theirs.register([other.region])):
                with pytest.raises(ClosedError):
                    call()
            with pytest.raises(UnavailableError, match="no peer of generation"):
                ours.connect(metadata, 2)
            peer.close()
            peer.close()

    def test_closing_in_the_middle_waits_or_says_so_and_can_be_repeated(self) -> None:
        ours, theirs = self.open(), self.open()
        mine, other = Block(ours, self.bulk), Block(theirs, self.bulk)
        peer = ours.connect(theirs.describe(), WAIT)
        transfer = ours.submit(peer, Way.PUSH, whole(mine, other.address), WAIT)
        with contextlib.suppress(TransferTimeoutError):
            ours.close()
        ours.close()
        assert transfer.done()
        with pytest.raises(ClosedError):
            ours.submit(peer, Way.PUSH, whole(mine, other.address), WAIT)
        for one in (peer, mine, other, theirs):
            one.close()

    def test_a_peer_that_is_closed_takes_nothing_more(self) -> None:
        with self.two(SMALL) as (ours, peer, mine, other):
            before = other.data.copy()
            peer.close()
            assert not peer.alive()
            outcome = ours.submit(peer, Way.PUSH, whole(mine, other.address), WAIT).wait(WAIT)
            assert outcome.status is PeerStatus.PEER_GONE
            assert np.array_equal(other.data, before)

    def test_a_peer_of_another_transport_is_refused(self) -> None:
        with self.two(SMALL) as (ours, peer, mine, other), self.open() as third:
            with pytest.raises((ConfigError, RegistrationError)):
                third.submit(peer, Way.PUSH, whole(mine, other.address), WAIT)
            assert ours.generation != third.generation

    @pytest.mark.parametrize("metadata", [b"", b"\x80", b"x" * 5000, b"\x81\xa4type\xa3foo"])
    def test_metadata_that_cannot_be_is_one_error(self, metadata: bytes) -> None:
        with self.open() as ours, pytest.raises(ConfigError, match="cannot be read"):
            ours.connect(metadata, 1)

    def test_metadata_of_another_start_or_token_or_with_wild_fields_is_refused(self) -> None:
        with self.open() as ours, self.open() as theirs, Block(theirs, SMALL):
            known = msgspec.msgpack.decode(theirs.describe())
            for field, value in (
                ("generation", "0" * 32),
                ("token", bytes(32)),
                ("generation", 7),
                ("token", b"short"),
                ("surplus", 1),
                ("grants", [["r", 0, 16]]),
                ("grants", [["r", 1 << 40, 1 << 63]]),
                ("grants", [["r", 1, 1]] * 100_000),
            ):
                with pytest.raises(KVConnectError):
                    ours.connect(msgspec.msgpack.encode(known | {field: value}), 2)
            with ours.connect(theirs.describe(), WAIT) as peer:
                assert peer.alive()

    def test_everything_is_given_back(self) -> None:
        def round_trip() -> None:
            with self.two(SMALL) as (ours, peer, mine, other):
                assert self.move(ours, peer, Way.PUSH, whole(mine, other.address)).ok

        # What a library keeps for the process is there after the first round.
        round_trip()
        before = handles()
        for _ in range(3):
            round_trip()
        until(lambda: handles() <= before and max(handles()[1] - before[1], 0) == 0, 5)
