"""Who holds reserved space: a locked file per open store, so that the dead can be told.

The kernel drops a process's file locks however it ends. An owner whose lock can be taken is
dead, and what it held goes back to free space: recovery after kill -9 scans nothing.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvconnect.backend import Closing
from kvconnect.boot import boot_id
from kvconnect.errors import ConfigError, TransferTimeoutError
from kvconnect_nvme.env import IndexEnv
from kvconnect_nvme.extents import Extents
from kvconnect_nvme.foreign import mapped
from kvconnect_nvme.tables import Session

_POLL_SECONDS = 0.005


@contextmanager
def exclusive(path: Path, timeout: float) -> Iterator[None]:
    """Hold the lock file at `path`; `TransferTimeoutError` if others hold it too long."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + timeout
        while not _lock(fd):
            if time.monotonic() > until:
                raise TransferTimeoutError(
                    f"nvme: {path} was locked by another process for {timeout} s"
                )
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Owner(Closing):
    """This store's identity as a holder of space: an id and a lock that ends with it.

    The file names the boot of the machine, so that another machine sees whose it is.
    """

    def __init__(self, folder: Path) -> None:
        """Create and lock the file; the caller holds the store's open lock."""
        self.folder = folder
        self.id = secrets.randbits(63) | 1
        self.path = folder / f"{self.id:016x}"
        with mapped(f"create {self.path}"):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(self.path, flags, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(OSError):  # a full disk: other machines are then not told
                os.write(self._fd, _machine().encode())

    def close(self) -> None:
        """Remove the file and drop the lock."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self.path.unlink(missing_ok=True)
            os.close(fd)

    def __del__(self) -> None:
        # Dropped without close: let go of the lock, so that a sweep finds the space.
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)


def _machine() -> str:
    try:
        return boot_id()
    except OSError:  # a sandbox that does not say
        return ""


def refuse_other_machines(folder: Path) -> None:
    """Raise `ConfigError` if a store here is open on another machine, as on a shared volume.

    LMDB's locks and the maps are memory of one kernel: a second one would write over the
    first. The caller holds the open lock.
    """
    mine = _machine()
    for path in folder.iterdir():
        theirs = path.read_text(encoding="ascii", errors="replace")
        if mine and theirs not in {"", mine} and not _is_dead(path):
            raise ConfigError(
                f"nvme: {folder.parent} is open on another machine (boot {theirs}, this one is "
                f"{mine}); give each machine a store of its own, or close it there first"
            )


def others_alive(folder: Path) -> bool:
    """Tell whether any owner is alive; the caller holds the open lock."""
    return any(not _is_dead(path) for path in folder.iterdir())


def _is_dead(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        # No descriptor left, say. Freeing what a living writer holds would let two write there.
        return False
    try:
        return _lock(fd)
    finally:
        os.close(fd)


def sweep(folder: Path, env: IndexEnv, slab_bytes: int) -> int:
    """Return the space of dead owners, in bytes; the caller holds the open lock.

    The lock keeps an owner that is just starting from being seen between its file and its
    file's lock.
    """
    dead = [path for path in folder.iterdir() if _is_dead(path)]
    with env.read() as session:
        holders = {holder for holder, _ in Extents(session, slab_bytes).held()}
    ids = {holder for holder in holders if _is_dead(folder / f"{holder:016x}")}

    def give_back(session: Session) -> int:
        extents = Extents(session, slab_bytes)
        return sum(extents.release(owner) for owner in ids)

    returned = env.write(give_back) if ids else 0
    for path in dead:
        with suppress(OSError):
            path.unlink()
    return returned
