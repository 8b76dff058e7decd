"""The copying of the shared-memory transport: in slices, so that stopping is prompt."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Closing
from kvconnect.disagg.transport import PeerOutcome, PeerStatus, Runs, Way
from kvconnect.region import Region
from kvconnect.run_copy import copy_runs

SLICE_BYTES = 32 << 20
"""Bytes copied between two looks at the clock."""
LONG_RUN = 32 << 10
"""From here on a call per run costs less than gathering runs in a temporary."""


class Move:
    """A `PeerTransfer`: one batch on its way through the mover."""

    def __init__(
        self,
        way: Way,
        runs: Runs,
        placed: Runs,
        alive: Callable[[], bool],
        timeout: float,
        *,
        keep: object = None,
    ) -> None:
        """`placed`: the runs with remote addresses as mapped here; `keep` holds the mapping."""
        self._keep = keep
        self.way, self.runs, self.placed, self._alive = way, runs, placed, alive
        self._until = time.monotonic() + timeout
        self._cancel = threading.Event()
        self._finished = threading.Event()
        self._outcome = PeerOutcome(PeerStatus.TIMEOUT, 0, "not over yet")

    @property
    def leased(self) -> NDArray[np.uint64]:
        """Addresses of the local runs."""
        return self.runs.local

    def settled(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds; tell whether the memory is free."""
        return self._finished.wait(timeout)

    def done(self) -> bool:
        """Tell whether both sides' memory is free."""
        return self._finished.is_set()

    def wait(self, timeout: float) -> PeerOutcome:
        """Wait at most `timeout` seconds."""
        self._finished.wait(timeout)
        return self._outcome

    def cancel(self) -> None:
        """Ask to stop before the next slice."""
        self._cancel.set()

    def __repr__(self) -> str:
        state = "done" if self.done() else "under way"
        return f"PeerTransfer({self.way.value}, {len(self.runs)} runs, {state})"

    def run(self, local: Sequence[Region], mapped: Sequence[Region]) -> None:
        """Mover: copy everything, then say how it ended."""
        try:
            self._outcome = self._copy(local, mapped)
        except Exception as error:  # noqa: BLE001 - whatever it was, the batch has failed
            self._outcome = PeerOutcome(PeerStatus.FAILED, 0, f"shm: {error}")
        finally:
            self._keep = None
            self._finished.set()

    def _copy(self, local: Sequence[Region], mapped: Sequence[Region]) -> PeerOutcome:
        for start, stop in _slices(self.placed):
            if (reason := self._stop_reason()) is not None:
                return reason
            part = self.placed.part(start, stop)
            if self.way is Way.PUSH:
                _copy_slice(part.local, local, part.remote, mapped, part.nbytes)
            else:
                _copy_slice(part.remote, mapped, part.local, local, part.nbytes)
        # What landed in the memory of a process that ended before it was told is worth nothing.
        return self._stop_reason(late=True) or PeerOutcome(PeerStatus.OK, self.runs.total)

    def _stop_reason(self, *, late: bool = False) -> PeerOutcome | None:
        if not self._alive():
            return PeerOutcome(PeerStatus.PEER_GONE, 0, "shm: the peer has closed or died")
        if time.monotonic() > self._until:
            return PeerOutcome(PeerStatus.TIMEOUT, 0, "shm: the time was up before the end")
        if self._cancel.is_set() and not late:
            return PeerOutcome(PeerStatus.CANCELLED, 0, "cancelled")
        return None


def _slices(runs: Runs) -> Iterator[tuple[int, int]]:
    """Cut a batch into [start, stop) of about `SLICE_BYTES` each."""
    ends = np.cumsum(runs.nbytes)
    start = 0
    while start < len(runs):
        done = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, done + SLICE_BYTES, side="right"))
        stop = max(stop, start + 1)
        yield start, stop
        start = stop


def _copy_slice(
    source: NDArray[np.uint64],
    sources: Sequence[Region],
    target: NDArray[np.uint64],
    targets: Sequence[Region],
    nbytes: NDArray[np.uint64],
) -> None:
    long = nbytes >= LONG_RUN
    for a, b, n in zip(
        source[long].tolist(), target[long].tolist(), nbytes[long].tolist(), strict=True
    ):
        ctypes.memmove(b, a, n)
    if not long.all():
        copy_runs(source[~long], sources, target[~long], targets, nbytes[~long])


class Mover(Closing):
    """Threads that copy batches in the order they came."""

    def __init__(self, threads: int) -> None:
        """Threads start with the first batch."""
        self._queue: queue.SimpleQueue[tuple[Move, Sequence[Region], Sequence[Region]] | None] = (
            queue.SimpleQueue()
        )
        self._wanted = threads
        self._threads: list[threading.Thread] = []
        self._moves: list[Move] = []
        self._lock = threading.Lock()

    def start(self, move: Move, local: Sequence[Region], mapped: Sequence[Region]) -> None:
        """Queue a batch."""
        with self._lock:
            while len(self._threads) < self._wanted:
                thread = threading.Thread(target=self._work, name="kvconnect-copy", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._moves = [other for other in self._moves if not other.done()]
            self._moves.append(move)
        self._queue.put((move, local, mapped))

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job[0].run(job[1], job[2])

    def under_way(self) -> list[Move]:
        """Return the batches that still hold memory."""
        with self._lock:
            return [move for move in self._moves if not move.done()]

    def close(self) -> None:
        """Cancel what is queued and stop the threads; the second call does nothing."""
        for move in self.under_way():
            move.cancel()
        with self._lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._queue.put(None)
        for thread in threads:
            thread.join(5)
