"""Counters by reason. A failed transfer adds no bytes and no time: its rate is not a rate."""

from __future__ import annotations

import threading
from collections import Counter

from kvconnect.backend import Outcome


class Metrics:
    """Thread-safe counters: ``op.reason`` pages, ``op.bytes``, ``op.seconds``, ``op.calls``."""

    __slots__ = ("_counts", "_lock")

    def __init__(self) -> None:
        """Start at zero."""
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, amount: float = 1) -> None:
        """Add to one counter."""
        with self._lock:
            self._counts[name] += amount  # type: ignore[assignment]

    def observe(self, op: str, outcome: Outcome, seconds: float) -> None:
        """Count a finished call: pages by status; bytes and seconds only if bytes moved."""
        with self._lock:
            self._counts[f"{op}.calls"] += 1
            for name, number in outcome.counts().items():
                self._counts[f"{op}.{name.lower()}"] += number
            if outcome.nbytes:
                self._counts[f"{op}.bytes"] += outcome.nbytes
                self._counts[f"{op}.seconds"] += seconds  # type: ignore[assignment]

    def snapshot(self) -> dict[str, float]:
        """Return all counters, and ``op.rate`` in bytes per second where bytes moved."""
        with self._lock:
            values: dict[str, float] = dict(self._counts)
        for name in [n for n in values if n.endswith(".seconds")]:
            op = name.removesuffix(".seconds")
            if values[name] > 0:
                values[f"{op}.rate"] = values[f"{op}.bytes"] / values[name]
        return values
