"""The presence table's file: a header, then the buckets; mapped by every process of the store.

It is never synced. The header names the boot during which it was made, and after another boot
nothing of it is believed. Its blocks are allocated when it is made, because a sparse mapping on
a full disk ends in SIGBUS.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from kvconnect.boot import boot_id
from kvconnect_nvme.buckets import BUCKET_BYTES, WIDTH, Buckets
from kvconnect_nvme.words import Words

SMALLEST = 512
"""Buckets of a new table: 32 KiB."""
HEADER = 4096
_MAGIC, _VERSION = b"kvpresnc", 1
_FIXED = struct.Struct("<8sQQQ36s")
"""Magic, version, generation, buckets, boot."""
_STAMP, _COMPLETE, _BUILT, _BUILT_TO = 128, 136, 144, 256
_NUMBER = struct.Struct("<Q")
_PREFIX = "presence-"


class PresenceFile:
    """One generation of the table, mapped. The map goes with the last reference to it.

    `stamp`: the write transaction that last brought it up to date; `complete`: whether every
    entry is in it; `built_to`: until then, the last key of those that are. Only the holder of
    the index's writer lock may change anything.
    """

    def __init__(self, folder: str, generation: int) -> None:
        """Map an existing file; `OSError` or `ValueError` where there is none to be believed."""
        self.generation = generation
        fd = os.open(file_of(folder, generation), os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            buckets = _check(os.pread(fd, _FIXED.size, 0), size, generation)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        rows = np.frombuffer(self._map, dtype=np.uint64, offset=HEADER)
        self.table = Buckets(rows.reshape(buckets, WIDTH))
        self.nbytes = size

    @property
    def stamp(self) -> int:
        """Number of a transaction."""
        return self._number(_STAMP)

    @stamp.setter
    def stamp(self, txn: int) -> None:
        _NUMBER.pack_into(self._map, _STAMP, txn)

    @property
    def complete(self) -> bool:
        """Whether a miss is a miss."""
        return self._number(_COMPLETE) == 1

    @property
    def built_to(self) -> bytes:
        """The last packed key that is known to be in; empty at the start."""
        return self._map[_BUILT_TO : _BUILT_TO + self._number(_BUILT)]

    def advance(self, built_to: bytes, *, complete: bool) -> None:
        """Note that the entries up to a key, or all, are in."""
        # A kill in between has the scan begin again, and not go on behind a key of two halves.
        _NUMBER.pack_into(self._map, _BUILT, 0)
        self._map[_BUILT_TO : _BUILT_TO + len(built_to)] = built_to
        _NUMBER.pack_into(self._map, _BUILT, len(built_to))
        _NUMBER.pack_into(self._map, _COMPLETE, complete)

    def _number(self, at: int) -> int:
        return int(_NUMBER.unpack_from(self._map, at)[0])

    def doubled(self, folder: str) -> PresenceFile:
        """Make the next generation: the same words and progress in a table twice as large."""
        made = create(folder, self.generation + 1, 2 * len(self.table.rows), self.table.doubled())
        made.advance(self.built_to, complete=self.complete)
        return made


def _check(head: bytes, size: int, generation: int) -> int:
    """Return the buckets of a file; `ValueError` if it is not whole, or not of this boot."""
    if len(head) < _FIXED.size:
        raise ValueError(f"{size} B")
    magic, version, number, buckets, boot = _FIXED.unpack(head)
    if (magic, version, number) != (_MAGIC, _VERSION, generation):
        raise ValueError(f"its header says {magic!r}, version {version}, generation {number}")
    if not 0 < buckets == 1 << (buckets.bit_length() - 1) or size != nbytes_of(buckets):
        raise ValueError(f"{size} B for {buckets} buckets")
    if boot != boot_id().encode():
        raise ValueError("made before the machine was started")
    return int(buckets)


def create(folder: str, generation: int, buckets: int, rows: Iterable[Words] = ()) -> PresenceFile:
    """Make and map a table, empty or of these rows; `OSError` if there is no room for it.

    Nobody looks at it until its generation is committed, so what an aborted transaction left
    under the name is replaced.
    """
    path = file_of(folder, generation)
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes_of(buckets))
        head = _FIXED.pack(_MAGIC, _VERSION, generation, buckets, boot_id().encode())
        _write(fd, head, 0)
        at = HEADER
        # Written, not mapped: a fault per page costs more than the copy.
        for part in rows:
            _write(fd, part.reshape(-1).view(np.uint8).data, at)
            at += part.nbytes
        return PresenceFile(folder, generation)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _write(fd: int, data: bytes | memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], at + done)


def buckets_for(objects: int) -> int:
    """Return the buckets of a table that takes so many objects and some more: half full."""
    wanted = SMALLEST
    while wanted * WIDTH < 2 * objects:
        wanted *= 2
    return wanted


def nbytes_of(buckets: int) -> int:
    """Return the file size of a table."""
    return HEADER + BUCKET_BYTES * buckets


def file_of(folder: str, generation: int) -> Path:
    """Return the path of a generation."""
    return Path(folder, f"{_PREFIX}{generation}")


def generations(folder: str) -> Iterator[int]:
    """Yield the generations that have a file."""
    for path in Path(folder).glob(f"{_PREFIX}*"):
        with suppress(ValueError):
            yield int(path.name.removeprefix(_PREFIX))


def remove(folder: str, numbers: Iterable[int]) -> None:
    """Unlink generations; processes that have them mapped keep what they have."""
    for number in numbers:
        with suppress(OSError):
            file_of(folder, number).unlink()
