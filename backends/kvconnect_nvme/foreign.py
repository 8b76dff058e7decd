"""Foreign errors (errno, LMDB) become ours here and nowhere else."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import lmdb

from kvconnect.backend import Status
from kvconnect.errors import (
    BackendError,
    CapacityError,
    CorruptionError,
    KVConnectError,
    TransferTimeoutError,
    UnavailableError,
)

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_GONE = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENODEV, errno.ENOTDIR}
_DAMAGED = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.PanicError,
    lmdb.BadTxnError,
)


def translate(error: BaseException, doing: str) -> KVConnectError:
    """Return our error for a foreign one; `doing` names operation and file."""
    if isinstance(error, KVConnectError):
        return error
    if isinstance(error, _DAMAGED):
        return CorruptionError(
            f"nvme: {doing}: {error}. The index is damaged: stop every process that uses the "
            f"store and remove its index directory; the store then starts empty"
        )
    if isinstance(error, lmdb.Error):
        return _from_lmdb(error, doing)
    if isinstance(error, OSError):
        return _from_errno(error, doing)
    return BackendError(f"nvme: {doing}: {error!r}")


def _from_lmdb(error: lmdb.Error, doing: str) -> KVConnectError:
    if isinstance(error, (lmdb.MapFullError, lmdb.DiskError)):
        return CapacityError(f"nvme: {doing}: {error}")
    if isinstance(error, lmdb.LockError):
        return UnavailableError(f"nvme: {doing}: {error}; is the index on a network file system?")
    # LMDB reports a failed write of the index file as a plain error with the errno's text.
    full = any(word in str(error) for word in ("No space", "File too large", "quota"))
    kind = CapacityError if full else BackendError
    return kind(f"nvme: {doing}: {error}")


def _from_errno(error: OSError, doing: str) -> KVConnectError:
    if error.errno in _FULL:
        return CapacityError(
            f"nvme: {doing}: {error}. Free space on the file system, raise its quota or "
            f"RLIMIT_FSIZE, or lower capacity="
        )
    if error.errno in _GONE:
        return UnavailableError(f"nvme: {doing}: {error}")
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return UnavailableError(f"nvme: {doing}: {error}; raise ulimit -n or slab=")
    if isinstance(error, TimeoutError):
        return TransferTimeoutError(f"nvme: {doing}: {error}")
    return BackendError(f"nvme: {doing}: {error}")


def status_of(error: BaseException) -> Status:
    """Return the status that stands for an error of one key."""
    if isinstance(error, CapacityError):
        return Status.NO_SPACE
    if isinstance(error, TimeoutError):
        return Status.TIMEOUT
    return Status.BACKEND_ERROR


@contextmanager
def mapped(doing: str) -> Iterator[None]:
    """Translate what is raised inside."""
    try:
        yield
    except KVConnectError:
        raise
    except (OSError, lmdb.Error) as error:
        raise translate(error, doing) from error
