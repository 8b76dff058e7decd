"""A raw block device as the one slab: its superblock, its size, and when to refuse it."""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

import xxhash

from kvconnect.errors import ConfigError, UnavailableError
from kvconnect_nvme.foreign import mapped
from kvconnect_nvme.options import BLOCK, down
from kvconnect_nvme.slabs import DEVICE_BASE

_MAGIC = b"kvconnect-nvme\x00\x01"
_SUPER = struct.Struct("<16s16sQ")


def is_device(path: Path) -> bool:
    """Tell whether `path` is a block device."""
    try:
        return stat.S_ISBLK(path.stat().st_mode)
    except OSError:
        return False


def usable_bytes(path: Path) -> int:
    """Bytes for objects: the device less its superblock."""
    with mapped(f"open {path}"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return down(os.lseek(fd, 0, os.SEEK_END) - DEVICE_BASE)
        finally:
            os.close(fd)


def claim(path: Path, wanted: bytes | None, *, force: bool) -> bytes:
    """Check whose device this is, or make it ours; return its 16-byte id.

    `wanted`: the id that the index belongs to, None for a new index. `force` takes over a
    device with other content, a store of ours under another index included.
    Raises `ConfigError` rather than overwrite what may be needed.
    """
    with mapped(f"claim {path}"):
        try:
            # O_EXCL on a device: refused while it is mounted or part of an array.
            os.close(os.open(path, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC))
        except OSError as error:
            raise UnavailableError(f"nvme: {path} is in use ({error}); unmount it") from error
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return _claim(fd, path, wanted, force=force)
        finally:
            os.close(fd)


def _claim(fd: int, path: Path, wanted: bytes | None, *, force: bool) -> bytes:
    head = os.pread(fd, DEVICE_BASE, 0)
    found = _parse(head)
    if wanted is not None:
        if found != wanted:
            raise ConfigError(
                f"nvme: the index was made for another device than {path}; name the right "
                f"device, or remove the index directory to start empty"
            )
        return wanted
    if any(head) and not force:
        # Ours too: another process may be using the store, through an index we do not see.
        what = "something else" if found is None else "a kvconnect store whose index is elsewhere"
        raise ConfigError(f"nvme: {path} holds {what}; format=true takes it over and destroys that")
    fresh = os.urandom(16)
    body = _SUPER.pack(_MAGIC, fresh, os.lseek(fd, 0, os.SEEK_END))
    block = body + xxhash.xxh3_64_digest(body)
    os.pwrite(fd, block + bytes(BLOCK - len(block)), 0)
    os.fsync(fd)
    return fresh


def _parse(head: bytes) -> bytes | None:
    body, check = head[: _SUPER.size], head[_SUPER.size : _SUPER.size + 8]
    if len(body) < _SUPER.size or xxhash.xxh3_64_digest(body) != check:
        return None
    magic, found, _ = _SUPER.unpack(body)
    return bytes(found) if magic == _MAGIC else None
