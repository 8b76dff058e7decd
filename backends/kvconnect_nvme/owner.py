"""Who holds room: every open store has an owner id and a locked file that proves it lives.

A lock, unlike a process id, cannot be mistaken: the kernel drops it when the last thread of
the owner is gone, however it ended, and it works across containers that share the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from kvconnect.backend import Closing
from kvconnect_nvme.failures import translated

OWNER_NBYTES = 8


class Owner(Closing):
    """This process's owner id and its lock."""

    def __init__(self, folder: Path) -> None:
        """Create and lock a new owner file in `folder`."""
        self.folder = folder
        self.id = secrets.token_bytes(OWNER_NBYTES)
        self.path = folder / self.id.hex()
        with translated(f"owner file {self.path}"):
            folder.mkdir(mode=0o700, exist_ok=True)
            # Locked under a name nobody takes for an owner, then renamed: there is no moment
            # at which a live owner's file can be seen without its lock.
            draft = folder / f".{self.id.hex()}"
            self._fd: int | None = os.open(
                draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600
            )
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            draft.rename(self.path)

    def dead(self, holders: Iterable[bytes]) -> list[bytes]:
        """Return those of `holders`, and of all owner files, whose owner is gone."""
        names = {h.hex() for h in holders}
        with contextlib.suppress(OSError):
            names |= {path.name for path in self.folder.iterdir() if _is_owner(path.name)}
        gone = [name for name in names - {self.path.name} if _is_dead(self.folder / name)]
        return [bytes.fromhex(name) for name in sorted(gone)]

    def bury(self, owner: bytes) -> None:
        """Delete the file of a dead owner once its room has been returned."""
        with contextlib.suppress(OSError):
            (self.folder / owner.hex()).unlink()

    def close(self) -> None:
        """Delete the file and drop the lock; the second call does nothing."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
            os.close(fd)


def _is_owner(name: str) -> bool:
    return len(name) == 2 * OWNER_NBYTES and not name.strip("0123456789abcdef")


def _is_dead(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
