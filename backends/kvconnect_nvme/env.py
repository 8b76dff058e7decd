"""The index file: one LMDB environment per path and process, shared by all stores on it.

LMDB must not be opened twice in a process (its file locks would be lost with the first close)
and must not be used across a fork. Both are taken care of here, as is a map that is too small.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import lmdb

from kvconnect.backend import Closing
from kvconnect.errors import ClosedError, ConfigError, CorruptionError, TransferTimeoutError
from kvconnect_nvme.foreign import mapped
from kvconnect_nvme.options import Durability
from kvconnect_nvme.presence import Presence
from kvconnect_nvme.tables import NAMES, Session, Tables

T = TypeVar("T")

MAP_BYTES = 1 << 30
"""Address space of the index at first; it doubles when full. The file grows only with use."""
LOCK_BYTES = 128 << 10
"""Of the reader table: 2048 readers, 64 B each."""

FORK = (
    "LMDB does not survive a fork: start processes with the spawn method, or open the store "
    "only after the fork"
)

_open: dict[tuple[int, str], IndexEnv] = {}
_open_lock = threading.Lock()


class IndexEnv(Closing):
    """A shared, counted handle: `attach` counts up, `close` down.

    Invariant: while the map is being resized no transaction of this process is open.
    """

    def __init__(self, path: str, durability: Durability, timeout: float) -> None:
        """Open or create; use `attach`. `timeout`: seconds any wait may take."""
        self.path, self.durability, self.timeout = path, durability, timeout
        self.presence = Presence(path)
        self.users = 0
        self._writer = threading.Lock()
        self._gate = threading.Condition()
        self._active = self._resizing = 0
        with mapped(f"open index {path}"):
            # The lock file is a sparse mapping in LMDB's hands: on a full disk its first
            # write would kill the process with SIGBUS. Reserved, it fails here instead.
            _reserve(f"{path}/lock.mdb", LOCK_BYTES)
            self._env = lmdb.open(
                path, map_size=MAP_BYTES, max_dbs=16, mode=0o600, readahead=False,
                sync=durability != "none", metasync=durability == "index", max_spare_txns=4,
            )  # fmt: skip
            try:
                self._check_whole()
                self._env.reader_check()
                self.tables = Tables.open(self._env)
            except BaseException:
                # Left open it could not be opened again in this process.
                self._env.close()
                raise

    def _check_whole(self) -> None:
        # A truncated file would be noticed only as SIGBUS, in the middle of a lookup.
        info, page = self._env.info(), int(self._env.stat()["psize"])
        have = Path(self.path, "data.mdb").stat().st_size
        if have < (need := (int(info["last_pgno"]) + 1) * page):
            raise CorruptionError(
                f"nvme: {self.path}/data.mdb has {have} B of {need} B; remove the index "
                f"directory, the store then starts empty"
            )

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Open a read transaction: a snapshot that blocks nobody."""
        with mapped(f"read index {self.path}"), self._shared(), self._begin(write=False) as txn:
            yield Session(txn, self.tables)

    def write(self, change: Callable[[Session], T]) -> T:
        """Run `change` in a write transaction; commits unless it raises.

        It runs again from the start when the map had to grow, so nothing outside the
        transaction may depend on it before it returns.
        """
        if not self._writer.acquire(timeout=self.timeout):
            raise TransferTimeoutError(
                f"nvme: index {self.path} was locked by another thread for {self.timeout} s"
            )
        try:
            with mapped(f"write index {self.path}"):
                return self._write(change)
        finally:
            self._writer.release()

    def _write(self, change: Callable[[Session], T]) -> T:
        while True:
            try:
                with self._shared(), self._begin(write=True) as txn:
                    session = Session(txn, self.tables)
                    self.presence.begin(session)
                    result = change(session)
                    self.presence.end(session)
                    session.save()
            except lmdb.MapFullError:
                # A reader that was killed pins every page freed since: let go of it first.
                if not self._env.reader_check():
                    self._resize(2 * self._info("map_size"))
            else:
                self.presence.committed()
                return result

    def _begin(self, *, write: bool) -> lmdb.Transaction:
        while True:
            try:
                return self._env.begin(write=write)
            except lmdb.MapResizedError:
                # Another process has grown the map; take over its size.
                self._resize(0, own=1)

    @contextmanager
    def _shared(self) -> Iterator[None]:
        with self._gate:
            # Newcomers queue behind a resize, or it would wait for a quiet moment for ever.
            if not self._gate.wait_for(lambda: not self._resizing, self.timeout):
                raise TransferTimeoutError(
                    f"nvme: index {self.path} was being resized for {self.timeout} s"
                )
            self._active += 1
        try:
            yield
        finally:
            with self._gate:
                self._active -= 1
                self._gate.notify_all()

    def _resize(self, nbytes: int, own: int = 0) -> None:
        # `own`: whether the caller is counted as active without having a transaction.
        with self._gate:
            self._active -= own
            self._resizing += 1
            quiet = self._gate.wait_for(lambda: not self._active, self.timeout)
            try:
                if not quiet:
                    raise TransferTimeoutError(
                        f"nvme: index {self.path} could not grow to {nbytes} B: {self._active} "
                        f"transactions were open for {self.timeout} s"
                    )
                self._env.set_mapsize(nbytes)
            finally:
                self._active += own
                self._resizing -= 1
                self._gate.notify_all()

    def last_txn(self) -> int:
        """Return the number of the last commit of any process."""
        with mapped(f"read index {self.path}"):
            return self._info("last_txnid")

    def _info(self, name: Literal["last_txnid", "map_size"]) -> int:
        # It reads the map without the GIL: during a resize there is none, which is EINVAL at best.
        with self._shared():
            return int(self._env.info()[name])

    def nbytes(self) -> int:
        """Bytes of the index that hold something."""
        with self.read() as session:
            stats = [session.txn.stat(getattr(self.tables, name)) for name in NAMES]
        pages = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        return pages * int(self._env.stat()["psize"])

    def file_bytes(self) -> int:
        """Bytes of the index file, with the pages that wait to be used again."""
        with self._shared():
            return (int(self._env.info()["last_pgno"]) + 1) * int(self._env.stat()["psize"])

    def sync(self) -> None:
        """Write everything to disk."""
        with mapped(f"sync index {self.path}"):
            self._env.sync(True)  # noqa: FBT003 - lmdb's own signature

    def close(self) -> None:
        """Give one share back; the last one closes the file."""
        with _open_lock:
            self.users -= 1
            if self.users > 0 or _open.get((os.getpid(), self.path)) is not self:
                return
            del _open[os.getpid(), self.path]
            until = time.monotonic() + self.timeout
            with self._gate:
                quiet = self._gate.wait_for(lambda: not self._active, until - time.monotonic())
                if quiet:
                    self._env.close()
            self.presence.close()


def _reserve(path: str, nbytes: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(fd).st_size < nbytes:
            os.posix_fallocate(fd, 0, nbytes)
    finally:
        os.close(fd)


def attach(path: Path, durability: Durability, timeout: float) -> IndexEnv:
    """Return this process's environment at `path`, opened if need be.

    Raises `ConfigError` if it is open with another durability, `CorruptionError` if damaged.
    """
    name = os.path.realpath(path)
    with _open_lock:
        if any(pid != os.getpid() and name == path for pid, path in _open):
            raise ClosedError(f"nvme: {name} was open when this process was forked. {FORK}")
        env = _open.get((os.getpid(), name))
        if env is None:
            env = _open[os.getpid(), name] = IndexEnv(name, durability, timeout)
        elif env.durability != durability:
            raise ConfigError(
                f"nvme: {name} is open in this process with durability={env.durability}; "
                f"durability={durability} needs a process of its own"
            )
        env.users += 1
        return env


def check_process(pid: int, what: str) -> None:
    """Raise `ClosedError` in a process other than the one that opened `what`."""
    if os.getpid() != pid:
        raise ClosedError(
            f"nvme: {what} was opened by process {pid}, before a fork that made process "
            f"{os.getpid()}. {FORK}"
        )
