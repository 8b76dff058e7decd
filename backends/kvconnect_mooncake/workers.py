"""Threads that make the library's calls: each may hang for a minute, no caller does.

Daemons, unlike those of an executor: a call that hangs must not hold up the interpreter's end.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

MOST_TIMES = 4


class Workers:
    """`count` threads and a queue of work; what is queued runs in order."""

    def __init__(self, count: int, name: str, nice: int = 0) -> None:
        """Start them, at least as `nice` to other threads as said."""
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._name, self._most, self._nice = name, MOST_TIMES * count, nice
        self._threads: list[threading.Thread] = []
        self._stopping = False
        self._lock = threading.Lock()
        for _ in range(count):
            self._start()

    def grow(self) -> bool:
        """Add a thread in place of one that hangs, up to `MOST_TIMES` the first count.

        False where that is not to be: there are so many, the system gives none, or all end.
        """
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            if self._stopping or len(self._threads) >= self._most:
                return False
            with suppress(RuntimeError):
                self._start()
                return True
            return False

    def _start(self) -> None:
        name = f"{self._name}-{len(self._threads)}"
        work = self._work, self._nice
        thread = threading.Thread(target=_run, args=work, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def shrink(self) -> None:
        """End a thread, as one that hung is back."""
        self._work.put(None)

    def submit(self, work: Callable[[], None]) -> None:
        """Queue `work`, which must not raise."""
        self._work.put(work)

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Queue `work` and return what will hold its result or error."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
                future.set_exception(error)

        self._work.put(run)
        return future

    def stop(self, timeout: float) -> bool:
        """Let queued work finish and the threads end; False if one is still busy."""
        with self._lock:
            self._stopping = True
            threads = list(self._threads)
        for _ in threads:
            self._work.put(None)
        until = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in threads)


def _run(work: queue.SimpleQueue[Callable[[], None] | None], nice: int) -> None:
    me = threading.get_native_id()  # to Linux, a thread is a process with a priority of its own
    if nice > os.getpriority(os.PRIO_PROCESS, me):
        os.setpriority(os.PRIO_PROCESS, me, nice)
    while (one := work.get()) is not None:
        one()
