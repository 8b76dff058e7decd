"""Slabs: the files, or the one block device, that objects lie in.

A slab is preallocated whole, so that a put never finds the disk full half-way, and is created
only when the space before it is used up. Files are opened once and stay open.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from kvconnect.backend import Closing
from kvconnect.errors import UnavailableError
from kvconnect_nvme.bounce import aligned
from kvconnect_nvme.foreign import mapped
from kvconnect_nvme.options import BLOCK

log = logging.getLogger("kvconnect.nvme")

DEVICE_BASE = 1 << 20
"""Bytes kept for the superblock at the start of a block device."""

Direct = Literal["auto", "on", "off"]


class Slabs(Closing):
    """Open files by slab number.

    `alignment`: bytes that memory addresses and lengths must be multiples of for I/O without
    a copy; 1 when the page cache is in between.
    """

    def __init__(self, path: Path, slab_bytes: int, direct: Direct, *, device: bool) -> None:
        """`path`: the directory, or the device. Nothing is created yet."""
        self.path, self.slab_bytes, self.device = path, slab_bytes, device
        self._base = DEVICE_BASE if device else 0
        self._fds: dict[int, int] = {}
        self._lock = threading.Lock()
        self._closed = False
        self.alignment = 1 if direct == "off" else self._probe(required=direct == "on")

    @property
    def direct(self) -> bool:
        """Whether the page cache is bypassed."""
        return self.alignment > 1

    def file(self, number: int) -> Path:
        """Return the file of a slab."""
        return self.path if self.device else self.path / f"slab-{number:04d}.dat"

    def locate(self, address: int) -> tuple[int, int]:
        """Return (fd, file offset) of a store address."""
        if self.device:
            # One file whatever the slab: a capacity raised later adds slabs behind the first,
            # and an offset within the slab would lay them over it.
            return self._fd(0), address + self._base
        number, offset = divmod(address, self.slab_bytes)
        return self._fd(number), offset

    def _fd(self, number: int) -> int:
        fd = self._fds.get(number)
        if fd is not None:
            return fd
        with self._lock:
            if number not in self._fds:
                if self._closed:
                    raise UnavailableError(f"nvme: {self.path} was closed")
                self._fds[number] = self._open(number)
            return self._fds[number]

    def _open(self, number: int) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)
        with mapped(f"open {self.file(number)}"):
            return os.open(self.file(number), flags)

    def _probe(self, *, required: bool) -> int:
        """Return the alignment that O_DIRECT takes on this very file system; 1 for none."""
        try:
            fd, made = self._open_probe()
        except OSError as error:
            if error.errno != errno.EINVAL:
                with mapped(f"open {self.path}"):
                    raise
            return self._degrade(error, required=required)
        try:
            return _probe_alignment(fd)
        except OSError as error:
            return self._degrade(error, required=required)
        finally:
            os.close(fd)
            if made is not None:
                made.unlink(missing_ok=True)

    def _open_probe(self) -> tuple[int, Path | None]:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT
        first = self.file(0)
        # An empty slab (after `compact`) has nothing to read and would look like a refusal.
        if self.device or (first.exists() and first.stat().st_size >= 2 * BLOCK):
            return os.open(first, flags), None
        made = self.path / f"probe-{os.getpid()}-{threading.get_ident()}.tmp"
        fd = os.open(made, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, bytes(2 * BLOCK))
        finally:
            os.close(fd)
        try:
            return os.open(made, flags), made
        except OSError:
            made.unlink(missing_ok=True)
            raise

    def _degrade(self, error: OSError, *, required: bool) -> int:
        if required:
            raise UnavailableError(
                f"nvme: {self.path} takes no O_DIRECT ({error}); use direct=auto or another "
                f"file system"
            ) from error
        log.warning("nvme: %s takes no O_DIRECT (%s); the page cache is used", self.path, error)
        return 1

    def grow(self, number: int, have: int, want: int, reserve: int) -> None:
        """Give a slab `want` bytes on disk, of which it has `have`; `OSError` if it cannot.

        At least `reserve` bytes of the file system stay free, for the index. What a failure
        leaves behind is removed.
        """
        if self.device:
            return
        room = os.statvfs(self.path)
        if room.f_bavail * room.f_frsize < want - self._allocated(number, have) + reserve:
            text = f"{want - have} B for {self.file(number)} and {reserve} B for the index"
            raise OSError(errno.ENOSPC, f"no space: {text}")
        # A file that is there stays there: other processes may have it open, and a new one
        # under its name would not be the one they write to.
        fresh = not self.file(number).exists()
        fd = os.open(self.file(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, have, want - have)
            os.fsync(fd)
        except OSError:
            if fresh:
                self.file(number).unlink(missing_ok=True)
            else:
                os.ftruncate(fd, have)
            raise
        finally:
            os.close(fd)
        self._sync_directory()

    def _allocated(self, number: int, have: int) -> int:
        """Return what the file has on disk: more than `have` if a kill cut `grow` short."""
        try:
            return max(have, self.file(number).stat().st_blocks * 512)
        except FileNotFoundError:
            return have

    def shrink(self, number: int, nbytes: int) -> None:
        """Cut a slab to `nbytes`. An empty file stays, for the processes that have it open."""
        if not self.device:
            with mapped(f"shrink {self.file(number)}"):
                os.truncate(self.file(number), nbytes)

    def _sync_directory(self) -> None:
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync(self, numbers: Iterable[int]) -> None:
        """Make what was written to these slabs safe on disk."""
        for number in sorted(set(numbers)):
            with mapped(f"fdatasync {self.file(number)}"):
                os.fdatasync(self._fd(number))

    def close(self) -> None:
        """Close all files; nothing may be moving any more."""
        with self._lock:
            self._closed = True
            while self._fds:
                os.close(self._fds.popitem()[1])


def _probe_alignment(fd: int) -> int:
    buffer = aligned(2 * BLOCK)
    for step in (512, BLOCK):
        try:
            if os.preadv(fd, [buffer[step : 2 * step]], step) == step:
                return step
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    raise OSError(errno.EINVAL, f"reads of {BLOCK} aligned bytes are refused")
