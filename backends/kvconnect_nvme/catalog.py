"""The catalog: what lies where, as pure operations inside one index transaction.

Nothing here touches payload files. The order of events is the whole of crash safety: room is
held first, payload written and synced next, and one transaction publishes. A process that
dies in between leaves only held extents, tagged with its owner id, which anyone may return
once the owner's lock is free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvconnect_nvme.entry import Entry, unpack
from kvconnect_nvme.extents import Extents
from kvconnect_nvme.index import U64, Index
from kvconnect_nvme.state import State, padded, read_state, write_state


@dataclass(frozen=True, slots=True)
class Hold:
    """Room for `count` objects in one extent, held until published or returned."""

    address: int
    nbytes: int
    count: int


class Catalog:
    """One write transaction's view: free space, entries, order, and the running state."""

    def __init__(self, txn: Any, index: Index, slab_bytes: int) -> None:
        """Read the state; `done` writes it back."""
        self.txn, self.db = txn, index.db
        self.extents = Extents(txn, index.db, slab_bytes)
        self.slab_bytes = slab_bytes
        self.state: State = read_state(txn, index.db.meta)

    def done(self) -> None:
        """Write the state back; call it last in the transaction."""
        write_state(self.txn, self.db.meta, self.state)

    def add_slab(self, nbytes: int) -> None:
        """Make a new slab's room free."""
        self.extents.release(self.state.slabs * self.slab_bytes, nbytes)
        self.state.slabs += 1
        self.state.total += nbytes

    def entry(self, key: bytes) -> Entry | None:
        """Return the entry of a key; a damaged one is removed and counts as absent."""
        data = self.txn.get(key, db=self.db.entries)
        return unpack(key, data) if data is not None else None

    def hold(self, owner: bytes, sizes: Sequence[int]) -> list[Hold] | None:
        """Hold room for objects of these padded sizes; None (nothing held) if there is none."""
        placed = self.extents.place(sizes)
        if placed is None:
            return None
        holds, at = [], 0
        for address, count in placed:
            nbytes = sum(sizes[at : at + count])
            self.txn.put(owner + U64.pack(address), U64.pack(nbytes), db=self.db.held)
            holds.append(Hold(address, nbytes, count))
            at += count
        return holds

    def unhold(self, owner: bytes, holds: Iterable[Hold]) -> None:
        """Forget holds without freeing them: their ranges are published or released next."""
        for hold in holds:
            self.txn.delete(owner + U64.pack(hold.address), db=self.db.held)

    def holders(self) -> set[bytes]:
        """Return the ids of all owners that hold room."""
        with self.txn.cursor(db=self.db.held) as cursor:
            return {bytes(key[:-8]) for key in cursor.iternext(keys=True, values=False)}

    def release_owner(self, owner: bytes) -> int:
        """Return everything a dead owner held; bytes returned."""
        found = []
        with self.txn.cursor(db=self.db.held) as cursor:
            more = cursor.set_range(owner)
            while more and cursor.key().startswith(owner):
                found.append((cursor.key(), cursor.value()))
                more = cursor.next()
        for key, value in found:
            self.txn.delete(key, db=self.db.held)
            self.extents.release(U64.unpack(key[len(owner) :])[0], U64.unpack(value)[0])
        return sum(U64.unpack(value)[0] for _, value in found)

    def retag(self, key: bytes, entry: Entry) -> None:
        """Change expiry and flags of a visible object; its bytes stay where they are."""
        self.txn.put(key, entry.pack(key), db=self.db.entries)

    def publish(self, key: bytes, entry: Entry) -> None:
        """Make an object visible; an older version of the key is replaced and its room freed."""
        self.remove(key)
        entry = entry.moved(entry.address, self.state.seq)
        self.state.seq += 1
        self.txn.put(key, entry.pack(key), db=self.db.entries)
        self.txn.put(U64.pack(entry.seq), key, db=self.db.order, append=True)
        self.txn.put(U64.pack(entry.address), U64.pack(entry.seq), db=self.db.space)
        self.state.used += padded(entry.nbytes)
        self.state.objects += 1

    def remove(self, key: bytes, *, only: int | None = None) -> bool:
        """Remove a key and free its room; with `only`, just that version (seq)."""
        data = self.txn.get(key, db=self.db.entries)
        if data is None:
            return False
        entry = unpack(key, data)
        if entry is None:
            # Damaged: where its payload lies is not known. `verify` finds the lost room.
            self.txn.delete(key, db=self.db.entries)
            self.state.objects -= 1
            return True
        if only is not None and entry.seq != only:
            return False
        self.txn.delete(key, db=self.db.entries)
        self.txn.delete(U64.pack(entry.seq), db=self.db.order)
        self.txn.delete(U64.pack(entry.address), db=self.db.space)
        self.extents.release(entry.address, padded(entry.nbytes))
        self.state.used -= padded(entry.nbytes)
        self.state.objects -= 1
        return True

    def keys(self, prefix: bytes) -> Iterator[bytes]:
        """Yield packed keys that begin with `prefix`."""
        with self.txn.cursor(db=self.db.entries) as cursor:
            more = cursor.set_range(prefix)
            while more and cursor.key().startswith(prefix):
                yield cursor.key()
                more = cursor.next()

    def evict(self, nbytes: int, visited: Callable[[int], bool]) -> int:
        """Evict by SIEVE until `nbytes` are freed; return bytes freed.

        The hand walks the queue from old to new and wraps. What was read since the hand last
        came by is spared once; pinned objects are skipped; expired ones go in any case. Two
        rounds visit everything, so it ends.
        """
        freed, now = 0, int(time.time())
        for seq, key in self._two_rounds():
            if freed >= nbytes:
                break
            self.state.hand = seq
            entry = self.entry(key)
            if entry is None:
                self.txn.delete(U64.pack(seq), db=self.db.order)
                self.remove(key)
                continue
            expired = bool(entry.expiry) and entry.expiry <= now
            if not expired and (entry.pinned or visited(entry.address)):
                continue
            freed += padded(entry.nbytes)
            self.remove(key)
            self.state.evictions += 1
        return freed

    def _two_rounds(self) -> Iterator[tuple[int, bytes]]:
        position = self.state.hand
        for _ in range(3):  # the rest of a round, then two whole ones
            while (found := self._next(position)) is not None:
                yield found
                position = found[0]
            position = 0

    def _next(self, seq: int) -> tuple[int, bytes] | None:
        with self.txn.cursor(db=self.db.order) as cursor:
            if not cursor.set_range(U64.pack(seq + 1)):
                return None
            return int(U64.unpack(cursor.key())[0]), bytes(cursor.value())

    def evict_window(self, nbytes: int) -> bool:
        """Free one contiguous range of `nbytes` by evicting neighbours; False if pins forbid.

        Where single evictions left holes too small, this costs `nbytes` and no more, instead
        of evicting at random until two holes happen to meet.
        """
        start = self._address_at_hand()
        for begin in (start, 0) if start else (0,):
            victims = self._window(begin, nbytes)
            if victims is not None:
                for key in victims:
                    self.remove(key)
                    self.state.evictions += 1
                return True
        return False

    def _address_at_hand(self) -> int:
        found = self._next(self.state.hand)
        entry = self.entry(found[1]) if found else None
        return entry.address if entry else 0

    def _window(self, begin: int, nbytes: int) -> list[bytes] | None:
        """Find keys whose removal makes `nbytes` contiguous at or after `begin`."""
        keys: list[tuple[int, int, bytes]] = []
        end = start = begin
        while (step := self._at_or_after(end)) is not None:
            address, length, key = step
            if address != end or address % self.slab_bytes == 0:
                keys, start = [], address
            end = address + length
            if key is None:
                pass
            elif (entry := self.entry(key)) is None or entry.pinned:
                keys, start = [], end
            else:
                keys.append((address, length, key))
            if end - start >= nbytes:
                return [k for _, _, k in keys]
            while keys and end - (keys[0][0] + keys[0][1]) >= nbytes:
                start = keys.pop(0)[0]
        return None

    def _at_or_after(self, address: int) -> tuple[int, int, bytes | None] | None:
        """Return the next object or free extent: (address, nbytes, key or None)."""
        where = U64.pack(address)
        best: tuple[int, int, bytes | None] | None = None
        with self.txn.cursor(db=self.db.free) as cursor:
            if cursor.set_range(where):
                best = (U64.unpack(cursor.key())[0], U64.unpack(cursor.value())[0], None)
        with self.txn.cursor(db=self.db.space) as cursor:
            if cursor.set_range(where):
                at = U64.unpack(cursor.key())[0]
                if best is None or at < best[0]:
                    key = self.txn.get(cursor.value(), db=self.db.order)
                    entry = self.entry(key) if key else None
                    size = padded(entry.nbytes) if entry else 4096
                    best = (at, size, key or b"")
        return best
