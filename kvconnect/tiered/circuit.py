"""`Circuit`: a tier that fails costs its time once, and one line in the log per outage."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger("kvconnect.tiered")


class Pass(enum.Enum):
    """How a caller may use a tier."""

    FREELY = "freely"
    PROBE = "probe"
    """Alone, to find out whether it is back."""


class Circuit:
    """Says whether a tier may be asked.

    Invariants: closed, everybody may; open, nobody may until `retry_after` has passed, and
    then one caller at a time, and none while a late transfer still holds memory: a tier that
    hangs is not given more.
    """

    def __init__(
        self,
        name: str,
        trip_after: int,
        retry_after: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`trip_after` failures in a row open it; `clock` gives seconds that never go back."""
        self.name = name
        self.outages = self.failures = self.skipped = 0
        self._trip_after, self._retry_after, self._clock = trip_after, retry_after, clock
        self._row = 0
        self._retry_at: float | None = None
        self._probing = False
        self._hung = 0
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether the tier is taken for dead."""
        return self._retry_at is not None

    @property
    def due(self) -> bool:
        """Whether an open circuit would let a caller try."""
        at = self._retry_at
        idle = not self._probing and not self._hung
        return at is not None and idle and self._clock() >= at

    def enter(self) -> Pass | None:
        """Ask to use the tier; a pass is followed by `succeed` or `fail`, then `leave`."""
        with self._lock:
            if self._retry_at is None:
                return Pass.FREELY
            if self._probing or self._hung or self._clock() < self._retry_at:
                self.skipped += 1
                return None
            self._probing = True
            return Pass.PROBE

    def leave(self, given: Pass) -> None:
        """Note that a caller has let go, of memory too: a hung tier then takes no more of it."""
        if given is Pass.PROBE:
            with self._lock:
                self._probing = False

    def hang(self, by: int) -> None:
        """Count transfers past their deadline that still hold memory, up or down."""
        with self._lock:
            self._hung += by

    def succeed(self) -> None:
        """Note that the tier answered."""
        with self._lock:
            self._row = 0
            back, self._retry_at = self._retry_at is not None, None
        if back:
            log.warning("tiered: %s answers again and is used again", self.name)

    def fail(self, cause: str, *, late: bool = False) -> None:
        """Note a failure; `late` (it took the time and gave nothing) opens at once."""
        with self._lock:
            self.failures += 1
            self._row += 1
            was = self._retry_at is not None
            if was or late or self._row >= self._trip_after:
                self._retry_at = self._clock() + self._retry_after
            opened = not was and self._retry_at is not None
            self.outages += opened
        if opened:
            log.warning(
                "tiered: %s fails (%s); going on without it, trying again every %g s",
                self.name,
                cause,
                self._retry_after,
            )
