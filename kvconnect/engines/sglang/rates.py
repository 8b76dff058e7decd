"""What SGLang's storage metrics are told: pages and bandwidth of calls that moved every page.

The rate of a failed transfer is no rate, and bytes are those that moved: a page that another
replica stores counts neither as a page nor as bytes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

GB = 1 << 30
"""SGLang's own stores report bandwidth in these."""

MOST = 4096
"""Calls kept between two readings; a scheduler that reads nothing must not fill memory."""


@dataclass(slots=True)
class Readings:
    """Pages and GB/s, one entry for each call."""

    pages: list[int] = field(default_factory=list)
    bandwidth: list[float] = field(default_factory=list)


class Rates:
    """Readings by operation since they were taken last; thread-safe."""

    __slots__ = ("_lock", "_readings")

    def __init__(self) -> None:
        """Start empty."""
        self._readings: dict[str, Readings] = {}
        self._lock = threading.Lock()

    def note(self, operation: str, pages: int, nbytes: int, seconds: float) -> None:
        """Note a call that moved all it was asked for; nothing moved is nothing to note."""
        if not nbytes or seconds <= 0:
            return
        with self._lock:
            readings = self._readings.setdefault(operation, Readings())
            if len(readings.pages) < MOST:
                readings.pages.append(pages)
                readings.bandwidth.append(nbytes / seconds / GB)

    def take(self) -> dict[str, Readings]:
        """Return the readings since the last call, and start anew."""
        with self._lock:
            taken, self._readings = self._readings, {}
        return taken
