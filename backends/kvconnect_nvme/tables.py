"""The tables of the index, and one transaction's view of them.

| table   | key                  | value                                     |
| entries | packed key           | `kvconnect_nvme.entry`                    |
| order   | seq                  | packed key; seq rises with every publish  |
| space   | address              | seq, blocks: which object lies where      |
| free    | address              | nbytes: unused space, neighbours joined   |
| holes   | nbytes, address      | the same by size, for best fit            |
| held    | owner, address       | nbytes: reserved, not published           |
| slabs   | slab number          | nbytes it has on disk                     |
| meta    | name                 | counters, sizes fixed at creation         |
| records | name                 | bytes                                     |

Numbers are big-endian, so that LMDB's byte order is numeric order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import lmdb
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvconnect.errors import CorruptionError

PAIR = struct.Struct(">QQ")
ONE = struct.Struct(">Q")
PLACE = struct.Struct(">QI")
PLACES = np.dtype([("seq", ">u8"), ("blocks", ">u4")])
"""Many values of `space` at once; each is what `PLACE` packs."""

NAMES = ("entries", "order", "space", "free", "holes", "held", "slabs", "meta", "records")


@dataclass(slots=True)
class Counters:
    """Sums kept with every change, so that opening scans nothing.

    Bytes: `used` by objects, `free`, `held`; their sum is the bytes of all slabs, `total`.
    `hand` is the seq where the eviction walk goes on.
    """

    used: int = 0
    free: int = 0
    held: int = 0
    objects: int = 0
    seq: int = 1
    hand: int = 0
    evicted: int = 0
    expired: int = 0
    healed: int = 0
    pinned: int = 0

    @property
    def total(self) -> int:
        """Bytes of all slabs."""
        return self.used + self.free + self.held

    def pack(self) -> bytes:
        """Encode."""
        body = _COUNTERS.pack(*(getattr(self, name) for name in _COUNTER_NAMES))
        return body + xxhash.xxh32_digest(body)

    @classmethod
    def unpack(cls, value: bytes | None) -> Counters:
        """Decode; all zero for a new store. `CorruptionError` if a byte has changed."""
        if not value:
            return cls()
        body = value[:-4]
        if len(body) != _COUNTERS.size or xxhash.xxh32_digest(body) != value[-4:]:
            raise CorruptionError(
                "nvme: the counters of the index are damaged; stop every process that uses the "
                "store and remove its index directory, it then starts empty"
            )
        return cls(*_COUNTERS.unpack(body))


_COUNTER_NAMES = [field.name for field in fields(Counters)]
_COUNTERS = struct.Struct(f">{len(_COUNTER_NAMES)}Q")


@dataclass(frozen=True, slots=True)
class Tables:
    """Handles of the tables."""

    entries: lmdb._Database
    order: lmdb._Database
    space: lmdb._Database
    free: lmdb._Database
    holes: lmdb._Database
    held: lmdb._Database
    slabs: lmdb._Database
    meta: lmdb._Database
    records: lmdb._Database

    @classmethod
    def open(cls, env: lmdb.Environment) -> Tables:
        """Open the tables, creating those that are missing."""
        with env.begin(write=True) as txn:
            return cls(*(env.open_db(name.encode(), txn=txn) for name in NAMES))


class Session:
    """One transaction: the tables and the counters as it sees them.

    `changed`: what it did to which objects, by packed key and object size; the last word counts.
    None: gone; otherwise there, and whether with an expiry.
    """

    __slots__ = ("changed", "counters", "tables", "txn")

    def __init__(self, txn: lmdb.Transaction, tables: Tables) -> None:
        """Load the counters."""
        self.txn, self.tables = txn, tables
        self.changed: dict[tuple[bytes, int], bool | None] = {}
        self.counters = Counters.unpack(self.meta("counters"))

    def save(self) -> None:
        """Write the counters back; before every commit."""
        self.set_meta("counters", self.counters.pack())

    def get(self, key: bytes, table: lmdb._Database) -> bytes | None:
        """Return a value; bytes of its own, as the transactions are opened without buffers."""
        return cast("bytes | None", self.txn.get(key, db=table))

    def meta(self, name: str) -> bytes | None:
        """Return a fixed value."""
        return self.get(name.encode(), self.tables.meta)

    def meta_number(self, name: str) -> int | None:
        """Return a fixed number."""
        value = self.meta(name)
        return None if value is None else int(ONE.unpack(value)[0])

    def set_meta(self, name: str, value: bytes) -> None:
        """Set a fixed value."""
        self.txn.put(name.encode(), value, db=self.tables.meta)

    def cursor(self, table: lmdb._Database) -> lmdb.Cursor:
        """Return a cursor."""
        return self.txn.cursor(db=table)

    def put_all(
        self, table: lmdb._Database, items: Sequence[tuple[bytes, bytes]], *, append: bool = False
    ) -> None:
        """Set many values; `append`: the keys follow each other and all that are there."""
        self.cursor(table).putmulti(items, append=append)

    def slabs(self) -> Iterator[tuple[int, int]]:
        """Yield (number, nbytes on disk) of each slab."""
        for key, value in self.cursor(self.tables.slabs):
            yield ONE.unpack(key)[0], ONE.unpack(value)[0]

    def set_slab(self, number: int, nbytes: int) -> None:
        """Note what a slab has on disk; none at all removes it."""
        if nbytes:
            self.txn.put(ONE.pack(number), ONE.pack(nbytes), db=self.tables.slabs)
        else:
            self.txn.delete(ONE.pack(number), db=self.tables.slabs)


def pieces(rows: NDArray[Any]) -> list[bytes]:
    """Return the bytes of each row."""
    packed, size = rows.tobytes(), rows.itemsize
    return [packed[at : at + size] for at in range(0, len(packed), size)]


def numbers(values: NDArray[np.uint64]) -> list[bytes]:
    """Return each number as `ONE` packs it."""
    return pieces(values.astype(">u8"))
