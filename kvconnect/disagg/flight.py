"""One batch of a network transport, from submit until both sides' memory is quiet.

Two ends, not one: the outcome is known as soon as nothing can turn it into a success any more;
the memory is free only when the last byte that was posted has come to rest, here and there.
"""

from __future__ import annotations

import threading
import time

import numpy as np
from numpy.typing import NDArray

from kvconnect.disagg.transport import PeerOutcome, PeerStatus, Runs, Way

_PENDING = PeerOutcome(PeerStatus.TIMEOUT, 0, "not over yet")


class Flight:
    """A `PeerTransfer`; its lane moves it along.

    Invariants: the first outcome stays; `done` turns true once, after the outcome is there.
    """

    def __init__(self, way: Way, runs: Runs, timeout: float) -> None:
        """`timeout`: seconds until it ends as TIMEOUT."""
        self.way, self.runs = way, runs
        self.until = time.monotonic() + timeout
        self.cancelled = threading.Event()
        self._outcome: PeerOutcome | None = None
        self._changed = threading.Condition()
        self._quiet = False

    @property
    def leased(self) -> NDArray[np.uint64]:
        """Addresses of the local runs."""
        return self.runs.local

    @property
    def decided(self) -> bool:
        """Whether the outcome is known."""
        return self._outcome is not None

    def decide(self, outcome: PeerOutcome) -> None:
        """Note the outcome, unless there is one."""
        with self._changed:
            if self._outcome is None:
                self._outcome = outcome
                self._changed.notify_all()

    def rest(self, outcome: PeerOutcome) -> None:
        """Note that nothing touches the memory any more; `outcome` if there is none yet."""
        with self._changed:
            if self._outcome is None:
                self._outcome = outcome
            self._quiet = True
            self._changed.notify_all()

    def settled(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds; tell whether the memory is free."""
        with self._changed:
            return self._changed.wait_for(lambda: self._quiet, timeout)

    def done(self) -> bool:
        """Tell whether both sides' memory is free."""
        return self._quiet

    def wait(self, timeout: float) -> PeerOutcome:
        """Wait at most `timeout` seconds, and never beyond the batch's own deadline."""
        until = min(time.monotonic() + timeout, self.until)
        with self._changed:
            # A success is one only with its memory free; a failure is known earlier.
            self._changed.wait_for(lambda: self.decided, max(until - time.monotonic(), 0))
        self.look()
        return self._outcome or _PENDING

    def look(self) -> None:
        """End it where its deadline has passed or it was cancelled, whatever its lane does."""
        if time.monotonic() >= self.until:
            self.decide(PeerOutcome(PeerStatus.TIMEOUT, 0, "the time was up before the end"))
        elif self.cancelled.is_set():
            self.decide(PeerOutcome(PeerStatus.CANCELLED, 0, "cancelled"))

    def cancel(self) -> None:
        """Ask to stop before the next piece is posted."""
        self.cancelled.set()

    def __repr__(self) -> str:
        state = "done" if self._quiet else "not quiet" if self.decided else "under way"
        return f"PeerTransfer({self.way.value}, {len(self.runs)} runs, {state})"
