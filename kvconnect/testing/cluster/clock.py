"""A host's wall clock against the runner's, by round trips, as NTP does it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvconnect.testing.cluster.process import Process

ANSWERS = "import sys, time\nfor line in sys.stdin: print(time.time(), flush=True)"
"""The program that answers every line with its wall clock."""

_ROUNDS = 8
_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ClockReading:
    """How far a clock is ahead of the runner's, and how far that may be wrong, in seconds."""

    offset_seconds: float
    error_seconds: float


def read(process: Process) -> ClockReading:
    """Ask a process that runs `ANSWERS` several times; the quickest answer counts."""
    return min((_ask(process) for _ in range(_ROUNDS)), key=lambda r: r.error_seconds)


def _ask(process: Process) -> ClockReading:
    # The wall clock is read once: a step of it between two readings would count as a round trip.
    wall, before = time.time(), time.monotonic()
    process.send("")
    theirs = float(process.receive(_SECONDS))
    half = (time.monotonic() - before) / 2
    return ClockReading(theirs - (wall + half), half)
