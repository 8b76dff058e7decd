"""A process that stands still."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from kvconnect.testing.procstat import stat_fields


def freeze(pid: int, seconds: float = 10.0) -> None:
    """Stop a process (SIGSTOP) and wait until all of its threads stand still.

    The signal by itself only asks: each thread stops when it next runs, and until then a server
    may answer. Raises `TimeoutError` after `seconds`.
    """
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + seconds
    while not all(_still(task) for task in Path(f"/proc/{pid}/task").iterdir()):
        if time.monotonic() > until:
            raise TimeoutError(f"process {pid} still runs {seconds} s after SIGSTOP")
        time.sleep(0.001)


def _still(task: Path) -> bool:
    fields = stat_fields(task)
    return fields is None or fields[0] in "TZX"  # one that has ended stands still as well
