"""Who uses a host that is reached over ssh, and what has to be undone there. Runs on that host.

A host serves one cluster at a time: a lock tells whether its user is alive, a record beside it
what that one did. Whoever takes the lock after a death removes first what the dead one left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec

from kvconnect.errors import UnavailableError
from kvconnect.testing.cluster import ssh_faults

FOLDER = "kvconnect-cluster"
"""Below the directory of the inventory: everything that a cluster leaves on a host."""

MARK = "KVCONNECT_CLUSTER"
"""The environment variable that tells processes of ours; its value is their folder."""

_SECONDS = 10.0


class Record(msgspec.Struct, frozen=True):
    """Who has a host, in words, and the interface whose packets are dropped and slowed."""

    owner: str
    interface: str  # empty without faults


class Lease:
    """A host that is ours until `undo`. `data` is the folder for what programs write."""

    def __init__(self, folder: Path, lock: int, record: Record) -> None:
        """Describe what `take` took."""
        self.folder, self.record, self.data = folder, record, folder / "data"
        self._lock = lock

    @classmethod
    def take(cls, directory: Path, record: Record) -> Self:
        """Take the host, undo what a dead owner left, and write down what is begun now.

        Raises `UnavailableError` where it is in use, the directory cannot be written to, or
        there are faults and no tools for them.
        """
        if record.interface:
            ssh_faults.need()
        folder = directory / FOLDER
        lock = _lock(folder)
        dead = _record(folder)
        if dead is not None:
            cls(folder, lock, dead).lift()
        _empty(folder)
        (folder / "record").write_bytes(msgspec.json.encode(record))
        lease = cls(folder, lock, record)
        try:
            for path in (lease.data, folder / "tmp"):
                path.mkdir(mode=0o700)
            if record.interface:
                ssh_faults.begin(record.interface)
        except BaseException:
            lease.undo()
            raise
        return lease

    def undo(self) -> None:
        """Lift the faults, end the processes, remove the files and let go of the host."""
        self.lift()
        shutil.rmtree(self.folder)
        os.close(self._lock)

    def lift(self) -> None:
        """Lift the faults and end the processes."""
        if self.record.interface:
            ssh_faults.end(self.record.interface)
        end(lambda: marked(self.folder))


def marked(folder: Path) -> list[int]:
    """List the processes that were started for a folder, with what these started."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return found


def end(which: Callable[[], list[int]]) -> None:
    """Kill processes until there is none; `UnavailableError` after ten seconds."""
    until = time.monotonic() + _SECONDS
    while pids := which():
        if time.monotonic() > until:
            raise UnavailableError(f"processes {pids} do not end in {_SECONDS:g} s")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _lock(folder: Path) -> int:
    until = time.monotonic() + _SECONDS
    while time.monotonic() < until:
        fd = _open(folder)
        if fd is not None and _locked(fd, folder):
            return fd
        if fd is not None:
            os.close(fd)
        time.sleep(0.01)  # its owner is just removing it
    raise UnavailableError(f"{folder} comes and goes for {_SECONDS:g} s")


def _open(folder: Path) -> int | None:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        return os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError as error:
        if folder.parent.is_dir():
            return None
        raise UnavailableError(f"{folder.parent} is no folder there") from error
    except OSError as error:
        raise UnavailableError(f"{folder} cannot be used: {error}") from error


def _locked(fd: int, folder: Path) -> bool:
    """Lock the file; false where it is that of a folder that is gone."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise UnavailableError(f"in use by {_owner(folder)}") from None
    if os.fstat(fd).st_uid != os.geteuid():
        os.close(fd)
        raise UnavailableError(f"{folder} is another user's")
    try:
        return os.path.samestat(os.fstat(fd), (folder / "lock").stat())
    except FileNotFoundError:
        return False


def _record(folder: Path) -> Record | None:
    try:
        return msgspec.json.decode((folder / "record").read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError):
        return None


def _owner(folder: Path) -> str:
    record = _record(folder)
    return record.owner if record else "somebody who is just beginning"


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()
