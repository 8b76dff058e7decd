"""A server that does not answer costs its time-out once, not once per call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvconnect.errors import UnavailableError


class Circuit:
    """Remembers for `cooldown` seconds that the server failed; `clock` in seconds.

    After the cooldown calls go through again; the first that fails opens it anew.
    """

    def __init__(self, cooldown: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Let calls through until the first failure."""
        self.trips = 0
        self._cooldown, self._clock = cooldown, clock
        self._until, self._why = 0.0, ""
        self._lock = threading.Lock()

    def trip(self, why: str) -> None:
        """Note that the server failed."""
        with self._lock:
            if self._clock() >= self._until:
                self.trips += 1
            self._until, self._why = self._clock() + self._cooldown, why

    def error(self) -> UnavailableError | None:
        """Return why the server is not asked now, or None."""
        with self._lock:
            left = self._until - self._clock()
            if left <= 0:
                return None
            return UnavailableError(f"{self._why}; not asked again for {left:.1f} s")

    def check(self) -> None:
        """Raise `UnavailableError` while the server is not asked."""
        if (error := self.error()) is not None:
            raise error
