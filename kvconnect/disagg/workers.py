"""A few threads that do what would block the channel's thread.

Not a `ThreadPoolExecutor`: its threads are waited for without end, by `shutdown` and again when
the interpreter exits, and a call into a transport may hang. These can be left behind.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable


class Workers:
    """`count` daemon threads that do jobs in the order they came."""

    def __init__(self, count: int, name: str) -> None:
        """Start them."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        self._told = False
        self._busy, self._lock = 0, threading.Lock()
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job, which must not raise."""
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._count(1)
            try:
                job()
            finally:
                self._count(-1)

    def _count(self, step: int) -> None:
        with self._lock:
            self._busy += step

    @property
    def busy(self) -> int:
        """Threads that are in a job."""
        with self._lock:
            return self._busy

    def close(self, until: float) -> int:
        """Let queued jobs run, then end; returns how many threads are stuck at `until`.

        May be called again.
        """
        if not self._told:
            self._told = True
            for _ in self._threads:
                self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))
        return sum(thread.is_alive() for thread in self._threads)
