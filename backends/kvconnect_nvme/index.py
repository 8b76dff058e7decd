"""The index: one LMDB environment that many processes share.

LMDB gives what a store's index needs: atomic transactions that a kill at any instant cannot
tear, readers that never block, and one writer at a time over all processes. Databases:

``entries``  packed key -> `Entry`
``order``    seq -> packed key (insertion order, the queue that eviction walks)
``space``    address -> seq (what lies where)
``free``     address -> nbytes of each free extent; ``sizes``: nbytes -> address of the same
``held``     owner + address -> nbytes: reserved by a process, not published
``meta``     the superblock and the running state; ``records`` named records
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from kvconnect.errors import BackendError
from kvconnect_nvme.failures import translated

T = TypeVar("T")
U64 = struct.Struct(">Q")
"""Big-endian, so that LMDB's byte order of keys is the numeric order."""

MAP_BYTES = 64 << 30
"""Address space reserved for the index: about 200 million objects. Every process maps the
same size, so none ever meets an index larger than its map."""

NAMES = ("entries", "order", "space", "free", "sizes", "held", "meta", "records")


@dataclass(frozen=True, slots=True)
class Databases:
    """Handles of the named databases."""

    entries: Any
    order: Any
    space: Any
    free: Any
    sizes: Any
    held: Any
    meta: Any
    records: Any


class Index:
    """One LMDB environment, opened once per process and shared by reference count."""

    _open: dict[str, Index] = {}  # noqa: RUF012 - one table per process is the point
    _lock = threading.Lock()

    def __init__(self, path: Path, *, sync: bool, metasync: bool) -> None:
        """Open or create the environment in folder `path`; use `Index.shared` instead."""
        self.path, self.references, self.pid = path, 1, os.getpid()
        self.modes = (sync, metasync)
        with translated(f"index {path}"):
            self.env = _open_env(path, sync=sync, metasync=metasync)
            self.env.reader_check()
            self.db = Databases(
                **{name: self.env.open_db(name.encode(), dupsort=name == "sizes") for name in NAMES}
            )

    @classmethod
    def shared(cls, path: Path, *, sync: bool, metasync: bool) -> Index:
        """Return this process's handle on the index in `path`; close it once per call."""
        name = str(path.resolve())
        with cls._lock:
            found = cls._open.get(name)
            if found is not None and found.pid == os.getpid():
                if found.modes != (sync, metasync):
                    raise BackendError(
                        f"index {path} is open in this process with another durability; close "
                        f"that store first or use the same"
                    )
                found.references += 1
                return found
            cls._open[name] = opened = cls(path, sync=sync, metasync=metasync)
            return opened

    def close(self) -> None:
        """Give one reference back; the last one closes the environment."""
        with self._lock:
            self.references -= 1
            if self.references == 0:
                self._open.pop(str(self.path.resolve()), None)
                self.env.close()

    @contextmanager
    def read(self) -> Iterator[Any]:
        """Give a short read transaction with one consistent snapshot."""
        self._check_process()
        with translated(f"index {self.path}"), self.env.begin(buffers=False) as txn:
            yield txn

    def update(self, change: Callable[[Any], T]) -> T:
        """Run `change` in one write transaction: all of it happens, or nothing."""
        self._check_process()
        with translated(f"index {self.path}"), self.env.begin(write=True) as txn:
            return change(txn)

    def sync(self) -> None:
        """Put what was committed on disk."""
        with translated(f"index {self.path}"):
            self.env.sync(True)  # noqa: FBT003 - lmdb's own signature

    def last_change(self) -> int:
        """Return the number of the newest committed transaction, of any process."""
        return int(self.env.info()["last_txnid"])

    def nbytes(self) -> int:
        """Return the bytes the index takes on disk."""
        return (self.path / "data.mdb").stat().st_size

    def _check_process(self) -> None:
        if self.pid != os.getpid():
            raise BackendError(
                f"index {self.path} was opened in process {self.pid} and is used in "
                f"{os.getpid()}: open the store again after fork"
            )


def _open_env(path: Path, *, sync: bool, metasync: bool) -> Any:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    options: dict[str, Any] = {
        "max_dbs": len(NAMES), "max_readers": 1024, "mode": 0o600, "sync": sync,
        "metasync": metasync, "readahead": False, "meminit": False,
    }  # fmt: skip
    for nbytes in (MAP_BYTES, 4 << 30, 1 << 30):
        try:
            return lmdb.open(str(path), map_size=nbytes, **options)
        except lmdb.MemoryError:
            continue  # a limited address space (RLIMIT_AS) gets a smaller map
    return lmdb.open(str(path), map_size=256 << 20, **options)
