"""The data disk of a local host: an ext4 file system of its own size in a file.

The loop device goes around the page cache (direct I/O), so that the file holds exactly what the
host has written to its disk so far: what a power cut would leave.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path

import msgspec

from kvconnect.errors import TransferTimeoutError, UnavailableError
from kvconnect.testing.cluster.tools import call

_SHUTDOWN, _NO_FLUSH = 0x8004587D, 2
# EXT4_IOC_SHUTDOWN with EXT4_GOING_FLAGS_NOLOGFLUSH: no write is begun from here on, not even of
# the journal. Without it the copy below could mix what lay on the disk at two instants.

_QUIET_SECONDS = 30.0


class Disk:
    """A file system in the file `image`, mounted at `folder`."""

    def __init__(self, image: Path, folder: Path) -> None:
        """Describe it; `make` or `mount` makes it be."""
        self.image, self.folder = image, folder
        self._device = ""

    def make(self, nbytes: int) -> None:
        """Make the file system, empty, and mount it."""
        with self.image.open("xb") as file:
            file.truncate(nbytes)
        call(["mkfs.ext4", "-q", "-F", "-m", "0", "-E", "nodiscard", str(self.image)])
        self.folder.mkdir(exist_ok=True)
        self.mount()

    def mount(self) -> None:
        """Attach and mount it, its journal replayed where that is due."""
        find = ["losetup", "--find", "--show", "--direct-io=on", str(self.image)]
        self._device = call(find).strip()
        if not (_block(self._device) / "loop" / "dio").read_text(encoding="ascii").startswith("1"):
            raise UnavailableError(
                f"{self.image} allows no direct I/O, which disks of a cluster need: its file "
                "system must be ext4, xfs or btrfs"
            )
        call(["mount", "-t", "ext4", "-o", "noatime", self._device, str(self.folder)])

    def cut_power(self) -> None:
        """Go on with what the disk holds at this instant; nothing on it may be in use."""
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _NO_FLUSH))
        finally:
            os.close(fd)
        self._wait_quiet()
        left = self.image.with_suffix(".left")
        call(["cp", "--sparse=always", "--reflink=auto", str(self.image), str(left)])
        self.unmount()
        left.replace(self.image)
        self.mount()

    def _wait_quiet(self) -> None:
        """Wait for what was under way to the disk already."""
        inflight = _block(self._device) / "inflight"
        until = time.monotonic() + _QUIET_SECONDS
        while any(int(n) for n in inflight.read_text(encoding="ascii").split()):
            if time.monotonic() > until:
                raise TransferTimeoutError(f"{self._device} is busy after {_QUIET_SECONDS:g} s")
            time.sleep(0.001)

    def unmount(self) -> None:
        """Unmount and detach it; the second call does nothing."""
        if self._device:
            call(["umount", str(self.folder)])
            call(["losetup", "--detach", self._device])
            self._device = ""


def fill(path: Path, leave: int) -> int:
    """Make the file `path` so big that its file system has `leave` bytes left; return its size."""
    chunk, size = 1 << 40, path.stat().st_size if path.exists() else 0
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while chunk >= 4096:
            room = os.fstatvfs(fd)
            chunk = min(chunk, max(room.f_bavail * room.f_frsize - leave, 0))
            try:
                if chunk:
                    os.posix_fallocate(fd, size, chunk)
                    size += chunk
            except OSError:  # the file's own bookkeeping needs blocks too
                chunk //= 2
    finally:
        os.close(fd)
    return size


class _Loop(msgspec.Struct):
    name: str
    image: str | None = msgspec.field(name="back-file", default=None)


class _Loops(msgspec.Struct):
    loopdevices: list[_Loop]


def loops(folder: Path) -> list[str]:
    """List the loop devices whose file lies, or lay, below a folder."""
    text = call(["losetup", "--list", "--json", "--output", "NAME,BACK-FILE"])
    found = msgspec.json.decode(text, type=_Loops).loopdevices if text.strip() else []
    return [loop.name for loop in found if (loop.image or "").startswith(f"{folder}/")]


def mounts(folder: Path) -> list[str]:
    """List the mount points below a folder, the innermost first."""
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    points = [line.split()[4] for line in lines]
    return sorted((p for p in points if p.startswith(f"{folder}/")), reverse=True)


def _block(device: str) -> Path:
    return Path("/sys/class/block") / Path(device).name
