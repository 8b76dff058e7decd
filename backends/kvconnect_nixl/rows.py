"""Descriptors as arrays: what NIXL takes without a Python object per descriptor.

Plain rows are (n, 3) uint64: address, nbytes, device. Strided rows are (n, 5): address, nbytes,
device, stride, count; one of them describes all pages of a pool. Address is an offset for files
and blocks; device is the id under which file, block device or object was registered.
"""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvconnect.errors import RegistrationError

U64 = NDArray[np.uint64]

FIRST_ID = 1 << 40
"""Far from any file descriptor: where NIXL misreads a file's name it takes the id for one."""

_ids = itertools.count(FIRST_ID)
_lock = threading.Lock()


def device_ids(count: int) -> U64:
    """Return ids that no other registration of this process has: (count,) uint64."""
    with _lock:
        return np.array([next(_ids) for _ in range(count)], dtype=np.uint64)


def plain(address: ArrayLike, nbytes: ArrayLike, device: ArrayLike = 0) -> U64:
    """Return (n, 3) rows; scalars stand for every row.

    >>> plain([4096, 8192], 512).tolist()
    [[4096, 512, 0], [8192, 512, 0]]
    """
    columns = np.broadcast_arrays(*(np.atleast_1d(_u64(c)) for c in (address, nbytes, device)))
    return np.ascontiguousarray(np.stack(columns, axis=1))


def strided(address: int, nbytes: int, stride: int, count: int, device: int = 0) -> U64:
    """Return one (1, 5) row for `count` blocks of `nbytes`, `stride` bytes apart."""
    return np.array([[address, nbytes, device, stride, count]], dtype=np.uint64)


def split(rows: U64, piece: int) -> U64:
    """Cut (n, 3) rows of address, nbytes, offset so that none has more than `piece` bytes.

    >>> split(np.array([[4096, 1000, 0]], dtype=np.uint64), 512).tolist()
    [[4096, 512, 0], [4608, 488, 512]]
    """
    size = np.uint64(piece)
    if not len(rows) or rows[:, 1].max() <= size:
        return rows
    counts = ((rows[:, 1] + (size - np.uint64(1))) // size).astype(np.int64)
    out = np.repeat(rows, counts, axis=0)
    number = np.arange(len(out)) - np.repeat(np.cumsum(counts) - counts, counts)
    moved = number.astype(np.uint64) * size
    out[:, 0] += moved
    out[:, 2] += moved
    out[:, 1] = np.minimum(out[:, 1] - moved, size)
    return out


def check(rows: U64) -> U64:
    """Return `rows` if NIXL can take them; it crashes on or misreads much that it accepts.

    Raises `RegistrationError` naming the first empty row, or the shape.
    """
    if rows.ndim != 2 or rows.shape[1] not in {3, 5} or not len(rows):
        raise RegistrationError(f"nixl: descriptors have shape {rows.shape}; (n, 3) or (n, 5)")
    if rows.dtype != np.uint64 or not rows.flags.c_contiguous:
        raise RegistrationError(f"nixl: descriptors are {rows.dtype}; they must be packed uint64")
    if not rows[:, 1].all():
        row = int(np.flatnonzero(rows[:, 1] == 0)[0])
        raise RegistrationError(f"nixl: descriptor {row} of {len(rows)} has no bytes")
    return rows


def file_name(path: Path, *, direct: bool) -> str:
    """Return the name under which a file is registered: NIXL opens it, for reading and writing.

    A word that NIXL does not know makes it take the descriptor's id for an open file, and write
    there; so the words are these two and `device_ids` are no file's.
    """
    return f"rw{',direct' * direct}:{path.absolute()}"


def _u64(values: ArrayLike) -> U64:
    return np.asarray(values, dtype=np.uint64)
