"""What Linux says of a process or a thread in its `stat` file."""

from __future__ import annotations

from pathlib import Path


def stat_fields(folder: Path) -> list[str] | None:
    """Return the fields of `folder/stat` from the third, the state, on; None where it is gone.

    `folder`: ``/proc/PID``, or ``/proc/PID/task/TID``. Source: proc_pid_stat(5).
    """
    try:
        stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second is the name in parentheses, which may hold anything, parentheses too.
    return stat.rpartition(")")[2].split()
