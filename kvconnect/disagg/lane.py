"""The way to one peer of a network transport: posts pieces of batches, and sees each to its end.

One thread a peer, because calls into transport libraries may hang for a minute: callers keep
their deadlines, other peers their speed. What makes memory free again:

- Every piece that was posted is polled until the library calls it ended; nothing else counts.
- A piece that failed on its way *to* the peer may still lie in the sockets of a process that is
  stopped, and be written when that goes on. So the peer must have ended, or must have run for
  `settle` seconds without a gap after the failure, which is ample for what a socket holds.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from kvconnect.backend import Closing
from kvconnect.disagg.flight import Flight
from kvconnect.disagg.lifeline import Lifeline
from kvconnect.disagg.transport import PeerOutcome, PeerStatus, Runs, Way
from kvconnect.errors import ClosedError

LOOK_SECONDS = 0.05
"""Between two looks at what has failed and is not quiet."""
_FIRST_POLL, _LAST_POLL = 5e-5, 2e-4


class Driver(Protocol):
    """What a lane needs of a transport library; called in the lane's thread only."""

    name: str
    depth: int
    """Pieces under way at the same time."""

    def verify(self) -> None:
        """Make sure that the library reaches this very peer; raises `KVConnectError` if not.

        Called before the first batch and before the next one after a failure.
        """

    def pieces(self, way: Way, runs: Runs) -> Iterator[Any]:
        """Cut a batch into what is posted in one call."""

    def post(self, piece: Any) -> Any:
        """Start a piece and return a ticket; where it raises, nothing moves."""

    def poll(self, ticket: Any) -> str | None:
        """Return None while the piece is under way, "" when it is done, or why it failed."""

    def close(self, *, gone: bool) -> None:
        """Forget the peer; nothing is under way any more. `gone`: its process has ended."""


@dataclass(slots=True, eq=False)
class _Load:
    """A batch on the lane: what is not posted yet, and what is under way."""

    flight: Flight
    pieces: Iterator[Any]
    posted: bool = False
    """Whether there is nothing left to post."""
    tickets: list[Any] = field(default_factory=list)
    failed: float | None = None
    """When a piece was last found to have failed."""


class Lane(Closing):
    """The thread and the batches of one peer; `close` returns at once, the rest follows."""

    def __init__(self, driver: Driver, lifeline: Lifeline, settle: float) -> None:
        """Start; `ready` holds the result of the first `Driver.verify`."""
        self.ready: Future[None] = Future()
        self._driver, self._lifeline, self._settle = driver, lifeline, settle
        self._fresh: deque[Flight] = deque()
        self._loads: deque[_Load] = deque()
        self._unsettled: list[_Load] = []
        self._trusted = False
        self._closing = False
        self._flights: set[Flight] = set()
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._run, name=f"kvconnect-{driver.name}", daemon=True
        )
        self._thread.start()

    def alive(self) -> bool:
        """Tell whether the peer may still touch memory."""
        return not self._closing and self._lifeline.alive()

    def submit(self, flight: Flight) -> None:
        """Take a batch on; `ClosedError` after `close`."""
        with self._changed:
            if self._closing:
                raise ClosedError(f"{self._driver.name}: the peer is closed")
            self._flights.add(flight)
            self._fresh.append(flight)
            self._changed.notify()

    def under_way(self) -> list[Flight]:
        """Return the batches that still hold memory."""
        with self._changed:
            return list(self._flights)

    def close(self) -> None:
        """Stop as soon as nothing is under way; the second call does nothing."""
        with self._changed:
            self._closing = True
            for flight in self._flights:
                flight.cancel()
            self._changed.notify()

    def join(self, timeout: float) -> bool:
        """Wait for the end of the thread; False where it takes longer."""
        self._thread.join(max(timeout, 0))
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._driver.verify()
            self._trusted = True
            self.ready.set_result(None)
        except Exception as error:  # noqa: BLE001 - raised where the connection is made
            self.ready.set_exception(error)
        nap = _FIRST_POLL
        while self._take():
            moved = self._turn()
            nap = _FIRST_POLL if moved else min(nap * 2, _LAST_POLL)
            if not moved:
                time.sleep(LOOK_SECONDS if not self._loads and self._unsettled else nap)
        self._driver.close(gone=not self._lifeline.alive())
        self._lifeline.close()

    def _take(self) -> bool:
        """Wait for work; False when all is done and the lane is closed."""
        with self._changed:
            while not self._flights:
                if self._closing:
                    return False
                self._changed.wait()
            while self._fresh:
                flight = self._fresh.popleft()
                self._loads.append(_Load(flight, self._driver.pieces(flight.way, flight.runs)))
        return True

    def _turn(self) -> bool:
        """Do all that can be done now; tell whether anything was."""
        moved = False
        room = self._driver.depth - sum(len(load.tickets) for load in self._loads)
        for load in list(self._loads):
            moved |= self._poll(load)
            self._look(load)
            # One at a time: a post may copy for 9 ms, and what has ended meanwhile makes its
            # owner bring the next batch.
            if room > 0 and not load.posted:
                moved = True
                room -= self._post(load)
            if load.posted and not load.tickets:
                self._loads.remove(load)
                self._unsettled.append(load)
        for load in list(self._unsettled):
            if self._quiet(load):
                self._unsettled.remove(load)
                self._finish(load)
                moved = True
        return moved

    def _look(self, load: _Load) -> None:
        """Post no more of a batch that has ended."""
        flight = load.flight
        if not flight.decided:
            if not self._lifeline.alive():
                flight.decide(self._gone())
            flight.look()
        load.posted |= flight.decided

    def _gone(self) -> PeerOutcome:
        words = f"{self._driver.name}: the peer has closed or died"
        return PeerOutcome(PeerStatus.PEER_GONE, 0, words)

    def _post(self, load: _Load) -> int:
        """Post the next piece; how many were."""
        try:
            if not self._trusted:
                self._driver.verify()
                self._trusted = True
            piece = next(load.pieces, None)
            if piece is None:
                load.posted = True
                return 0
            load.tickets.append(self._driver.post(piece))
        except Exception as error:  # noqa: BLE001 - whatever it was, this batch has failed
            self._fail(load, str(error))
            load.posted = True
            return 0
        return 1

    def _poll(self, load: _Load) -> bool:
        left = []
        for ticket in load.tickets:
            ended = self._driver.poll(ticket)
            if ended is None:
                left.append(ticket)
            elif ended:
                load.failed = time.monotonic()
                self._fail(load, ended)
        moved = len(left) < len(load.tickets)
        load.tickets = left
        return moved

    def _fail(self, load: _Load, cause: str) -> None:
        self._trusted = False
        if not self._lifeline.alive():
            load.flight.decide(self._gone())
        load.flight.decide(PeerOutcome(PeerStatus.FAILED, 0, f"{self._driver.name}: {cause}"))

    def _quiet(self, load: _Load) -> bool:
        """Tell whether the peer's memory is free of a batch whose pieces have all ended."""
        if load.failed is None or load.flight.way is Way.PULL or not self._lifeline.alive():
            return True
        return self._lifeline.steady(load.failed) >= self._settle

    def _finish(self, load: _Load) -> None:
        flight = load.flight
        if not self._lifeline.alive():
            # What landed in the memory of a process that ended before it was told is lost.
            flight.decide(self._gone())
        if time.monotonic() >= flight.until:
            flight.look()
        with self._changed:
            self._flights.discard(flight)
        flight.rest(PeerOutcome(PeerStatus.OK, flight.runs.total))


def cut(runs: Runs, most: int) -> Runs:
    """Return the runs without empty ones and in pieces of at most `most` bytes."""
    runs = runs.filled()
    size = np.uint64(most)
    if not len(runs) or runs.nbytes.max() <= size:
        return runs
    counts = ((runs.nbytes + (size - np.uint64(1))) // size).astype(np.int64)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    moved = number.astype(np.uint64) * size
    left = np.repeat(runs.nbytes, counts) - moved
    return Runs(
        np.repeat(runs.local, counts) + moved,
        np.repeat(runs.remote, counts) + moved,
        np.minimum(left, size),
    )
