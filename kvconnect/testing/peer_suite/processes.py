"""Cases: ranks in other processes, which are killed, stopped and started again."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest

from kvconnect.disagg.transport import Peer, PeerStatus, PeerTransfer, PeerTransport, Way
from kvconnect.errors import KVConnectError, UnavailableError
from kvconnect.testing.handles import handles
from kvconnect.testing.peer_suite.base import (
    WAIT,
    Block,
    SuiteBase,
    runs_of,
    until,
    whole,
)
from kvconnect.testing.peer_suite.rank import Rank, digest, pattern

SMALL = 1 << 20
SOON = 10.0
"""Seconds within which the end of a process must have been noticed everywhere."""
DEADLINE = 1.5
"""Seconds of a batch to a rank that is stopped."""
GIVE_UP = 4.5
"""Seconds that a rank stays stopped where its help is needed; libraries give up after 2 to 3."""
UNCHANGED = 0.5
"""Seconds for which memory is watched that nothing may touch any more."""
FRESH = 0x33


class ProcessCases(SuiteBase):
    """A `Rank` each; its memory is looked at by asking it."""

    def test_another_process_is_read_and_written_and_sees_it_at_once(self) -> None:
        with self.rank(SMALL) as rank, self.open() as ours, Block(ours, SMALL) as mine:
            with ours.connect(rank.metadata, WAIT) as peer:
                assert self.move(ours, peer, Way.PULL, whole(mine, rank.address)).ok
                assert np.array_equal(mine.data, pattern(SMALL))
                rng = np.random.default_rng(3)
                for turn in range(20):
                    mine.data[:] = rng.integers(0, 256, SMALL, dtype=np.uint8)
                    piece = None if turn % 2 else 64 << 10
                    runs = whole(mine, rank.address, piece=piece)
                    assert self.move(ours, peer, Way.PUSH, runs).ok
                    # Done means that the other process sees the bytes, not that they were sent.
                    assert rank.ask("digest") == digest(mine.data)
                assert self.move(ours, peer, Way.PUSH, runs_of(mine.address, rank.address, 3)).ok
            assert rank.ask("intact")
            assert mine.intact()

    def test_a_rank_that_is_killed_in_the_middle_ends_in_time(self) -> None:
        with self.open() as ours, Block(ours, self.bulk) as mine:
            for number in range(self.rounds):
                way = (Way.PUSH, Way.PULL)[number % 2]
                with self.rank(self.bulk) as rank, ours.connect(rank.metadata, WAIT) as peer:
                    transfers = self._begin(ours, peer, way, mine, rank, WAIT)
                    rank.kill()
                    started = time.monotonic()
                    outcomes = [t.wait(SOON) for t in transfers]
                    assert outcomes[-1].status in {PeerStatus.PEER_GONE, PeerStatus.FAILED}
                    self._until_gone(peer)
                    for transfer in transfers:
                        until(transfer.done, SOON)
                    assert time.monotonic() - started < SOON
                    self._stays(mine)
                    late = ours.submit(peer, way, whole(mine, rank.address), WAIT)
                    assert late.wait(SOON).status is PeerStatus.PEER_GONE
                    with pytest.raises(UnavailableError):
                        ours.connect(rank.metadata, 2)

    def test_a_rank_that_starts_again_is_another_peer(self) -> None:
        with (
            self.open() as ours,
            Block(ours, SMALL) as mine,
            self.rank(SMALL) as first,
            ours.connect(first.metadata, WAIT) as old,
        ):
            first.kill()
            with self.rank(SMALL) as second:
                known = msgspec.msgpack.decode(second.metadata)
                assert known["generation"] != old.generation
                runs = whole(mine, first.address)
                outcome = ours.submit(old, Way.PUSH, runs, WAIT).wait(SOON)
                assert outcome.status is PeerStatus.PEER_GONE
                # The first start's name at the second one's address.
                forged = known | {"generation": old.generation}
                with pytest.raises(KVConnectError):
                    ours.connect(msgspec.msgpack.encode(forged), 2)
                with ours.connect(second.metadata, WAIT) as new:
                    assert self.move(ours, new, Way.PULL, whole(mine, second.address)).ok
                assert np.array_equal(mine.data, pattern(SMALL))
                assert second.ask("digest") == digest(pattern(SMALL))

    @pytest.mark.parametrize("way", Way)
    def test_a_rank_that_is_stopped_costs_no_more_than_the_deadline(self, way: Way) -> None:
        with self.open() as ours, Block(ours, self.bulk) as mine:
            for _ in range(self.stops):
                with self.rank(self.bulk) as rank, ours.connect(rank.metadata, WAIT) as peer:
                    rank.stop()
                    began = time.monotonic()
                    transfers = [
                        ours.submit(peer, way, whole(mine, rank.address), DEADLINE)
                        for _ in range(2)
                    ]
                    outcomes = [transfer.wait(WAIT) for transfer in transfers]
                    assert time.monotonic() - began < DEADLINE + 1
                    assert peer.alive()
                    # OK only where no help of the other process is needed.
                    assert all(t.done() for t, o in zip(transfers, outcomes, strict=True) if o.ok)
                    self._until_given_up(transfers, began)
                    rank.go_on()
                    for transfer in transfers:
                        until(transfer.done)
                    if way is Way.PULL:
                        self._stays(mine)
                    else:
                        self._remote_stays(rank)
                    runs = runs_of(mine.address, rank.address, 64)
                    assert self.move(ours, peer, way, runs).ok

    def test_a_stopped_rank_holds_up_nobody_else(self) -> None:
        with (
            self.open() as ours,
            Block(ours, SMALL) as mine,
            self.rank(SMALL) as stopped,
            self.rank(SMALL) as other,
            ours.connect(stopped.metadata, WAIT) as bad,
            ours.connect(other.metadata, WAIT) as good,
        ):
            stopped.stop()
            stuck = ours.submit(bad, Way.PULL, whole(mine, stopped.address), DEADLINE)
            began = time.monotonic()
            assert self.move(ours, good, Way.PUSH, whole(mine, other.address)).ok
            assert time.monotonic() - began < SOON
            stuck.wait(WAIT)
            stopped.go_on()
            until(stuck.done)

    def test_a_stopped_rank_is_not_connected_for_ever(self) -> None:
        with self.rank(SMALL) as rank, self.open() as ours:
            rank.stop()
            began = time.monotonic()
            with pytest.raises(UnavailableError):
                ours.connect(rank.metadata, 1)
            assert time.monotonic() - began < SOON
            rank.go_on()
            with ours.connect(rank.metadata, WAIT) as peer:
                assert peer.alive()

    def test_when_a_rank_that_writes_here_is_dead_nothing_changes_any_more(self) -> None:
        with self.open() as ours, Block(ours, self.bulk) as mine:
            mine.data[:] = 0
            for _ in range(self.rounds):
                with self.rank(self.bulk) as rank, ours.connect(rank.metadata, WAIT) as peer:
                    assert rank.ask("push", ours.describe().hex(), mine.address, 50)
                    until(lambda: bool(mine.data[self.bulk // 2]))
                    rank.kill()
                    self._until_gone(peer)
                    self._stays(mine)
                    mine.data[:] = 0

    def test_ranks_that_end_leave_nothing_behind(self) -> None:
        def meet() -> None:
            with (
                self.rank(SMALL) as rank,
                self.open() as ours,
                Block(ours, SMALL) as mine,
                ours.connect(rank.metadata, WAIT) as peer,
            ):
                assert self.move(ours, peer, Way.PUSH, whole(mine, rank.address)).ok
                rank.kill()
                ours.submit(peer, Way.PUSH, whole(mine, rank.address), WAIT).wait(SOON)

        meet()
        before = handles()
        meet()
        until(lambda: handles() <= before, SOON)

    def _begin(
        self,
        ours: PeerTransport,
        peer: Peer,
        way: Way,
        mine: Block,
        rank: Rank,
        seconds: float,
    ) -> list[PeerTransfer]:
        """Start far more than can be moved before the caller's next line."""
        runs = whole(mine, rank.address, piece=256 << 10)
        transfers = [ours.submit(peer, way, runs, seconds) for _ in range(40)]
        assert transfers[0].wait(WAIT).ok
        return transfers

    @staticmethod
    def _until_given_up(transfers: list[PeerTransfer], began: float) -> None:
        """Wait so long that a library gives up, if it does, with bytes left in its sockets."""
        while time.monotonic() < began + GIVE_UP and not all(t.done() for t in transfers):
            time.sleep(0.05)

    @staticmethod
    def _until_gone(peer: Peer) -> None:
        until(lambda: not peer.alive(), SOON)

    @staticmethod
    def _stays(mine: Block) -> None:
        """Memory of this process keeps what is written to it now."""
        mine.data[:] = FRESH
        time.sleep(UNCHANGED)
        assert (mine.data == FRESH).all()
        assert mine.intact()

    @staticmethod
    def _remote_stays(rank: Rank) -> None:
        rank.ask("fill", FRESH)
        time.sleep(UNCHANGED)
        assert rank.ask("digest") == digest(np.full(rank.nbytes, FRESH, dtype=np.uint8))
        assert rank.ask("intact")
