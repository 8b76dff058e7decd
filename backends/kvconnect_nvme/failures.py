"""The one place where foreign errors become kvconnect's: errno and LMDB codes."""

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
    UnavailableError,
)

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn OSError and lmdb.Error raised inside into kvconnect's errors, naming `what`."""
    try:
        yield
    except KVConnectError:
        raise
    except (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError) as error:
        raise CorruptionError(
            f"{what} is damaged: {error}. Its payloads cannot be found without it: close every "
            f"process that uses the store and delete the index folder to start empty"
        ) from error
    except (lmdb.MapFullError, lmdb.DiskError) as error:
        raise CapacityError(f"{what}: no room for the index: {error}") from error
    except lmdb.Error as error:
        text = str(error)
        if any(str(errno_text) in text for errno_text in ("No space left", "File too large")):
            raise CapacityError(f"{what}: no room for the index: {error}") from error
        raise BackendError(f"{what}: {error}") from error
    except OSError as error:
        raise from_os(what, error) from error


def from_os(what: str, error: OSError) -> BackendError:
    """Map an OSError; no room and no access are told apart from the rest."""
    if error.errno in NO_ROOM:
        return CapacityError(f"{what}: {error.strerror}: the file system or a limit is full")
    if error.errno in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENODEV):
        return UnavailableError(f"{what}: {error.strerror}; check the path and its permissions")
    return BackendError(f"{what}: {error.strerror or error}")


def status_of(error: BaseException) -> Status:
    """Map an error of one object to its status."""
    if isinstance(error, CapacityError) or (isinstance(error, OSError) and error.errno in NO_ROOM):
        return Status.NO_SPACE
    return Status.BACKEND_ERROR
