"""Cases: bytes arrive as they should, nothing else changes, and what may not move does not."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from kvconnect.disagg.carry import carry
from kvconnect.disagg.transport import Peer, PeerStatus, PeerTransport, Runs, Way
from kvconnect.errors import RegistrationError
from kvconnect.testing.peer_suite.base import WAIT, Block, SuiteBase, runs_of

LENGTHS = [1, 7, 256, 256, 4096, (32 << 10) - 1, 32 << 10, 65537, (2 << 20) + 3, 0, 2]
SMALL = 1 << 16


class MoveCases(SuiteBase):
    """Within one process, where both memories can be looked at."""

    @pytest.mark.parametrize("way", Way)
    def test_runs_of_all_lengths_arrive_and_nothing_else_changes(self, way: Way) -> None:
        rng = np.random.default_rng(1)
        order = rng.permutation(len(LENGTHS))
        starts = np.concatenate(([0], np.cumsum(LENGTHS)[:-1])) + 3 * np.arange(len(LENGTHS)) + 3
        far = np.empty(len(LENGTHS), dtype=np.int64)
        at = 5
        for index in order:
            far[index], at = at, at + LENGTHS[index] + 5
        with self.two(3 << 20) as (ours, peer, mine, other):
            want_mine, want_other = mine.data.copy(), other.data.copy()
            for here, there, n in zip(starts, far, LENGTHS, strict=True):
                if way is Way.PUSH:
                    want_other[there : there + n] = mine.data[here : here + n]
                else:
                    want_mine[here : here + n] = other.data[there : there + n]
            runs = runs_of(starts + mine.address, far + other.address, LENGTHS)
            outcome = self.move(ours, peer, way, runs)
            assert (outcome.status, outcome.nbytes) == (PeerStatus.OK, sum(LENGTHS))
            assert np.array_equal(mine.data, want_mine)
            assert np.array_equal(other.data, want_other)

    def test_an_empty_batch_is_done(self) -> None:
        with self.two(SMALL) as (ours, peer, _, other):
            before = other.data.copy()
            outcome = self.move(ours, peer, Way.PUSH, runs_of([], [], []))
            assert (outcome.status, outcome.nbytes) == (PeerStatus.OK, 0)
            assert np.array_equal(other.data, before)

    @pytest.mark.parametrize("way", Way)
    def test_more_runs_than_a_batch_takes_are_carried(self, way: Way) -> None:
        with self.two(4 << 20) as (ours, peer, mine, other):
            count = ours.capabilities.max_entries + 11
            at = np.arange(count, dtype=np.uint64) * np.uint64(3)
            back = at[::-1]
            want_mine, want_other = mine.data.copy(), other.data.copy()
            here, there = at.astype(np.int64), back.astype(np.int64)
            for step in range(2):
                if way is Way.PUSH:
                    want_other[there + step] = mine.data[here + step]
                else:
                    want_mine[here + step] = other.data[there + step]
            runs = runs_of(at + np.uint64(mine.address), back + np.uint64(other.address), 2)
            carried = carry(
                ours,
                peer,
                way,
                runs,
                batch_bytes=1 << 20,
                until=time.monotonic() + WAIT,
                stop=threading.Event(),
            )
            assert (carried.nbytes, carried.failure) == (2 * count, None)
            assert np.array_equal(mine.data, want_mine)
            assert np.array_equal(other.data, want_other)

    @pytest.mark.parametrize("way", Way)
    def test_memory_that_is_not_registered_or_granted_is_refused(self, way: Way) -> None:
        with self.two(SMALL) as (ours, peer, mine, other), Block(ours, 64, register=False) as wild:
            before = mine.data.copy(), other.data.copy()
            for local, remote, n in (
                (wild.address, other.address, 16),
                (mine.address, wild.address, 16),
                (mine.address + SMALL - 8, other.address, 16),
                (mine.address - 1, other.address, 16),
                (mine.address, other.address + SMALL - 15, 16),
                (mine.address, other.address, 1 << 63),
            ):
                # The first run is good: it must not move either.
                runs = runs_of([mine.address, local], [other.address, remote], [16, n])
                with pytest.raises(RegistrationError, match=r"descriptor 1 .* is outside every"):
                    ours.submit(peer, way, runs, WAIT)
            assert np.array_equal(mine.data, before[0])
            assert np.array_equal(other.data, before[1])

    def test_memory_is_refused_once_it_is_unregistered(self) -> None:
        with self.two(SMALL) as (ours, peer, mine, other):
            again = ours.register([mine.region])
            assert mine.handle is not None
            mine.handle.close()
            runs = runs_of(mine.address, other.address, 64)
            assert self.move(ours, peer, Way.PUSH, runs).ok
            again.close()
            again.close()
            with pytest.raises(RegistrationError):
                ours.submit(peer, Way.PUSH, runs, WAIT)

    def test_regions_that_overlap_are_refused_whole(self) -> None:
        with (
            self.open() as ours,
            Block(ours, SMALL) as mine,
            Block(ours, SMALL, register=False) as b,
        ):
            inner = type(mine.region)("inner", mine.address + 64, 64)
            with pytest.raises(RegistrationError, match="overlap"):
                ours.register([b.region, inner])
            # The one that was good is not left behind.
            ours.register([b.region]).close()

    def test_threads_share_a_transport(self) -> None:
        threads, step = 6, 1024
        with self.two(threads << 14) as (ours, peer, mine, other):
            failed: list[object] = []

            def push(number: int) -> None:
                for start in range(number << 14, (number + 1) << 14, step):
                    runs = runs_of(mine.address + start, other.address + start, step)
                    outcome = ours.submit(peer, Way.PUSH, runs, WAIT).wait(WAIT)
                    if not outcome.ok:
                        failed.append(outcome)

            workers = [threading.Thread(target=push, args=(n,)) for n in range(threads)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            assert not failed
            assert np.array_equal(mine.data, other.data)

    def test_one_peer_after_another_and_two_at_once(self) -> None:
        with self.two(SMALL) as (ours, peer, mine, other), self.open() as third:
            with Block(third, SMALL) as far, ours.connect(third.describe(), WAIT) as second:
                far.data[:] = 9
                self._swap(ours, peer, second, mine, other, far)
            assert self.move(ours, peer, Way.PULL, runs_of(mine.address, other.address, 64)).ok
            assert np.array_equal(mine.data[:64], other.data[:64])

    def _swap(
        self, ours: PeerTransport, a: Peer, b: Peer, mine: Block, at_a: Block, at_b: Block
    ) -> None:
        half = SMALL // 2
        sent = [
            ours.submit(a, Way.PULL, runs_of(mine.address, at_a.address, half), WAIT),
            ours.submit(b, Way.PULL, runs_of(mine.address + half, at_b.address, half), WAIT),
        ]
        assert all(transfer.wait(WAIT).ok for transfer in sent)
        assert np.array_equal(mine.data[:half], at_a.data[:half])
        assert (mine.data[half:] == 9).all()
        with pytest.raises(RegistrationError):
            ours.submit(b, Way.PULL, Runs(*_three(mine.address, at_a.address)), WAIT)


def _three(local: int, remote: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    runs = runs_of(local, remote, 16)
    return runs.local, runs.remote, runs.nbytes
