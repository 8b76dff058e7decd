"""Slabs: the preallocated files (or the one block device) that hold payloads.

Preallocation is what makes puts fast: writes that extend a file are serialised by the file
system. Slabs are made one by one as room is needed, each of `slab_bytes`; the last may be
smaller so that the capacity is met exactly.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import stat
import threading
from pathlib import Path

from kvconnect.backend import Closing
from kvconnect.errors import ConfigError, UnavailableError
from kvconnect_nvme.failures import translated

log = logging.getLogger("kvconnect.nvme")

MAGIC = b"kvconnect nvme store 1\n"
DEVICE_HEADER = 1 << 20
"""A block device keeps its first MiB for the magic; slab 0 starts after it."""
BLKGETSIZE64 = 0x80081272


class Slabs(Closing):
    """File descriptors of the slabs, opened when first used."""

    def __init__(self, location: Path, slab_bytes: int, *, direct: str) -> None:
        """Serve the folder or block device at `location`; `direct` is auto, on or off."""
        self.location, self.slab_bytes, self._mode = location, slab_bytes, direct
        self.device = location.exists() and stat.S_ISBLK(location.stat().st_mode)
        self._fds: dict[int, int] = {}
        self._lock = threading.Lock()
        self.direct = direct != "off"
        self.memory_alignment = 1

    def path(self, number: int) -> Path:
        """Return the file of slab `number`."""
        return self.location if self.device else self.location / f"slab-{number:04d}.dat"

    def create(self, number: int, nbytes: int) -> None:
        """Preallocate a slab file; on failure nothing of it stays behind."""
        if self.device:
            return
        path = self.path(number)
        with translated(f"slab {path}"):
            fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, nbytes)
                os.fsync(fd)
            except OSError:
                with contextlib.suppress(OSError):
                    path.unlink()
                raise
            finally:
                os.close(fd)
            sync_folder(self.location)

    def fd(self, number: int) -> int:
        """Return the descriptor of slab `number`, probing O_DIRECT the first time."""
        with self._lock:
            if number not in self._fds:
                with translated(f"slab {self.path(number)}"):
                    self._fds[number] = self._open(self.path(number))
            return self._fds[number]

    def place(self, address: int) -> tuple[int, int]:
        """Turn a store address into (slab number, offset in its file)."""
        number, offset = divmod(address, self.slab_bytes)
        return number, offset + (DEVICE_HEADER if self.device else 0)

    def sync(self, numbers: set[int]) -> None:
        """Put everything written to these slabs on the medium."""
        for number in sorted(numbers):
            with translated(f"sync of slab {self.path(number)}"):
                os.fdatasync(self.fd(number))

    def truncate(self, number: int) -> None:
        """Delete an empty slab file and give its room back to the file system."""
        with self._lock:
            if (fd := self._fds.pop(number, None)) is not None:
                os.close(fd)
        with translated(f"slab {self.path(number)}"):
            self.path(number).unlink(missing_ok=True)

    def _open(self, path: Path) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC
        if self.direct:
            try:
                fd = os.open(path, flags | os.O_DIRECT)
                self.memory_alignment = max(self.memory_alignment, probe(fd))
            except OSError as error:
                self._degrade(path, error)
            else:
                return fd
        return os.open(path, flags)

    def _degrade(self, path: Path, error: OSError) -> None:
        if self._mode == "on":
            raise UnavailableError(
                f"direct=on: {path} does not take O_DIRECT ({error.strerror}); use direct=auto"
            ) from error
        log.warning("nvme: %s does not take O_DIRECT (%s); using the page cache", path, error)
        self.direct = False

    def close(self) -> None:
        """Close all descriptors; the second call does nothing."""
        with self._lock:
            while self._fds:
                os.close(self._fds.popitem()[1])


def probe(fd: int) -> int:
    """Find the alignment O_DIRECT needs on this very file: 512 or 4096; OSError if neither."""
    with mmap.mmap(-1, 3 * 4096) as memory:
        for step in (512, 4096):
            with memoryview(memory)[step : 2 * step] as view:
                try:
                    os.preadv(fd, [view], step)
                except OSError:
                    if step == 4096:
                        raise
                else:
                    return step
    return 4096


def device_bytes(path: Path) -> int:
    """Return the usable bytes of a block device."""
    with translated(f"block device {path}"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            buffer = bytearray(8)
            fcntl.ioctl(fd, BLKGETSIZE64, buffer)
            return int.from_bytes(buffer, "little") - DEVICE_HEADER
        finally:
            os.close(fd)


def claim_device(path: Path, *, overwrite: bool) -> None:
    """Write our magic on an empty device; refuse one that holds something else.

    Raises `ConfigError` unless the first MiB is ours or all zeros, or `overwrite` is set.
    """
    with translated(f"block device {path}"):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            head = os.pread(fd, DEVICE_HEADER, 0)
            if head.startswith(MAGIC):
                return
            if head.strip(b"\0") and not overwrite:
                raise ConfigError(
                    f"{path} is not empty and holds no kvconnect store; format=true takes it "
                    f"over and destroys what is there"
                )
            os.pwrite(fd, MAGIC.ljust(DEVICE_HEADER, b"\0"), 0)
            os.fsync(fd)
        finally:
            os.close(fd)


def sync_folder(path: Path) -> None:
    """Put a folder's names on disk, so that a new file survives a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
