"""Free space: extents of a linear address space, in the index, coalesced within slabs.

Best fit by size, so that a batch gets one contiguous extent where there is one (neighbouring
objects are then written by one call), and large holes stay large.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvconnect_nvme.index import U64, Databases


class Extents:
    """Allocate and free inside one write transaction."""

    __slots__ = ("_db", "_slab", "_txn")

    def __init__(self, txn: Any, db: Databases, slab_bytes: int) -> None:
        """Work in `txn`; extents never cross a multiple of `slab_bytes`."""
        self._txn, self._db, self._slab = txn, db, slab_bytes

    def release(self, address: int, nbytes: int) -> None:
        """Make a range free and join it with free neighbours in its slab."""
        start, stop = address, address + nbytes
        with self._txn.cursor(db=self._db.free) as cursor:
            if cursor.set_range(U64.pack(stop)):
                after, length = U64.unpack(cursor.key())[0], U64.unpack(cursor.value())[0]
                if after == stop and stop % self._slab:
                    self._drop(after, length)
                    stop += length
        with self._txn.cursor(db=self._db.free) as cursor:
            found = cursor.set_range(U64.pack(start))
            if cursor.prev() if found else cursor.last():
                before, length = U64.unpack(cursor.key())[0], U64.unpack(cursor.value())[0]
                if before + length == start and start % self._slab:
                    self._drop(before, length)
                    start = before
        self._add(start, stop - start)

    def largest(self) -> int:
        """Return the bytes of the largest free extent, 0 if there is none."""
        with self._txn.cursor(db=self._db.sizes) as cursor:
            return int(U64.unpack(cursor.key())[0]) if cursor.last() else 0

    def take(self, nbytes: int) -> int | None:
        """Cut `nbytes` from the smallest extent that has them; None if there is none."""
        with self._txn.cursor(db=self._db.sizes) as cursor:
            if not cursor.set_range(U64.pack(nbytes)):
                return None
            length = int(U64.unpack(cursor.key())[0])
            address = int(U64.unpack(cursor.value())[0])
        self._drop(address, length)
        if length > nbytes:
            self._add(address + nbytes, length - nbytes)
        return address

    def take_at(self, address: int, length: int, nbytes: int) -> None:
        """Cut `nbytes` from the start of the free extent (`address`, `length`)."""
        self._drop(address, length)
        if length > nbytes:
            self._add(address + nbytes, length - nbytes)

    def place(self, sizes: Sequence[int]) -> list[tuple[int, int]] | None:
        """Cut room for objects of `sizes`, in order, into as few extents as possible.

        Returns (address, count) of each extent and how many objects it takes, or None (and
        nothing taken) where they do not all fit.
        """
        taken: list[tuple[int, int]] = []
        at = 0
        while at < len(sizes):
            count = len(sizes) - at
            whole = sum(sizes[at:])
            if whole > (largest := self.largest()):
                count, whole = _how_many(sizes, at, largest)
            address = self.take(whole) if count else None
            if address is None:
                self._undo(taken, sizes)
                return None
            taken.append((address, count))
            at += count
        return taken

    def _undo(self, taken: list[tuple[int, int]], sizes: Sequence[int]) -> None:
        at = 0
        for address, count in taken:
            self.release(address, sum(sizes[at : at + count]))
            at += count

    def _add(self, address: int, nbytes: int) -> None:
        key, size = U64.pack(address), U64.pack(nbytes)
        self._txn.put(key, size, db=self._db.free)
        self._txn.put(size, key, db=self._db.sizes)

    def _drop(self, address: int, nbytes: int) -> None:
        key, size = U64.pack(address), U64.pack(nbytes)
        self._txn.delete(key, db=self._db.free)
        self._txn.delete(size, key, db=self._db.sizes)


def _how_many(sizes: Sequence[int], at: int, room: int) -> tuple[int, int]:
    count, whole = 0, 0
    while at + count < len(sizes) and whole + sizes[at + count] <= room:
        whole += sizes[at + count]
        count += 1
    return count, whole
