"""What workers hold, asked for while the load runs and until it is flat after it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from kvconnect.errors import KVConnectError
from kvconnect.testing.cluster.worker import Worker

_EVERY_SECONDS = 2.0
_ANSWER_SECONDS = 2.0
_AGAIN_SECONDS = 0.3


def sample(workers: Iterable[Worker], timeout: float = _ANSWER_SECONDS) -> None:
    """Have every worker that answers say what it holds; the journal keeps it."""
    for worker in workers:
        if worker.answers:
            with suppress(KVConnectError):  # it may have been killed or stopped by now
                worker.ask("counts", timeout)


def keep_sampling(workers: Iterable[Worker], stop: threading.Event) -> None:
    """Have them say so every two seconds, until told to stop."""
    workers = list(workers)
    while not stop.wait(_EVERY_SECONDS):
        sample(workers)


def settle(workers: Iterable[Worker], flat: Callable[[], bool], seconds: float) -> None:
    """Have them say so until `flat`, for at most `seconds`; memory is given back a little late."""
    workers, until = list(workers), time.monotonic() + seconds
    while True:
        sample(workers)
        if flat() or time.monotonic() > until:
            return
        time.sleep(_AGAIN_SECONDS)
