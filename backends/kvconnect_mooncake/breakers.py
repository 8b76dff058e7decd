"""Circuit breakers: what failed is left alone for a while, then tried by one call.

Why: a dead peer must cost its time-out once, not once per request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

MASTER, STORES = "the master", "stores"


class Breakers:
    """One breaker per name (the master, stores, each owner of segments); thread-safe.

    Closed: all pass. Tripped: nobody passes for `seconds`; then one call does, and its outcome
    (`trip` or `heal`) decides; if it never says, the next tries `seconds` later.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`seconds`: how long a name stays tripped."""
        self.seconds, self._clock = seconds, clock
        self._until: dict[str, float] = {}
        self._trials: set[str] = set()
        self._lock = threading.Lock()
        self.trips = 0

    def trip(self, name: str) -> None:
        """Note a failure."""
        with self._lock:
            self._until[name] = self._clock() + self.seconds
            self._trials.discard(name)
            self.trips += 1

    def heal(self, name: str) -> None:
        """Note a success."""
        if self._until:
            with self._lock:
                self._until.pop(name, None)
                self._trials.discard(name)

    def passes(self, name: str) -> bool:
        """Tell whether a call may try; the first after the pause takes the trial."""
        if not self._until:
            return True
        with self._lock:
            until = self._until.get(name)
            if until is None:
                return True
            if self._clock() < until:
                return False
            self._until[name] = self._clock() + self.seconds
            self._trials.add(name)
            return True

    def hand_on(self, name: str) -> None:
        """Let the next call take a trial that said nothing; does nothing once it was decided."""
        with self._lock:
            if name in self._trials:
                self._trials.remove(name)
                self._until[name] = self._clock()

    def doubts(self, name: str) -> bool:
        """Tell whether nothing has gone well since the last failure."""
        return name in self._until

    def tripped(self, names: Iterable[str]) -> bool:
        """Tell, without taking the trial, whether all of `names` are to be left alone."""
        if not self._until:
            return False
        now = self._clock()
        with self._lock:
            return all(self._until.get(name, now) > now for name in names)

    def open(self) -> list[str]:
        """Return the names that are left alone now, sorted."""
        now = self._clock()
        with self._lock:
            return sorted(name for name, until in self._until.items() if until > now)
