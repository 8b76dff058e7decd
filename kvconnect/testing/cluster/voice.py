"""What every worker of a cluster test does alike: say events, and count what it holds."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from kvconnect.testing.cluster.events import Event, Lines, State
from kvconnect.testing.handles import handles


def own_stdout() -> TextIO:
    """Take stdout over, by lines: what libraries print from now on goes to stderr."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return out


class Voice:
    """Stdout, kept for events. Any thread may speak; a line is never torn."""

    def __init__(self) -> None:
        """Take stdout over."""
        self._out = own_stdout()
        self._lock = threading.Lock()

    def say(self, event: Event) -> None:
        """Say one event, at once."""
        with self._lock:
            self._out.write(Lines.write(event) + "\n")


def state(worker: str, quarantined: int, stats: Mapping[str, float]) -> State:
    """Return what this process holds now; `quarantined` in bytes."""
    with Path("/proc/self/statm").open() as file:
        rss = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    fds, threads = handles()
    return State(
        worker=worker,
        at=time.monotonic(),
        fds=fds,
        threads=threads,
        rss=rss,
        quarantined=quarantined,
        stats={name: float(value) for name, value in stats.items()},
    )
