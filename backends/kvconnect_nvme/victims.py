"""Eviction inside one transaction: who goes (SIEVE), and how a large hole is made (windows).

SIEVE: a hand walks from old to new; an object used since the last pass is spared once, the
first that was not goes. Objects are stored next to each other in the order they come, so
walking that order also frees neighbours.

A hole for an object much larger than the others is not waited for: the objects from the
victim's address upward go until it fits, which costs about the bytes asked and no more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from kvconnect_nvme.entry import Entry
from kvconnect_nvme.extents import Extent
from kvconnect_nvme.index import Index
from kvconnect_nvme.options import BLOCK, Eviction
from kvconnect_nvme.tables import ONE, PLACE
from kvconnect_nvme.visited import Visited

SPARE_AT_MOST = 4096
"""Objects spared per transaction; a store where all were used must not stop its writers."""
EVICT_AT_MOST = 4096
"""Objects evicted per transaction beyond what the caller needs."""
WINDOWS_AT_MOST = 32


class Victims:
    """Chooses and evicts; `keep` are seqs that must stay (what this batch reports as there)."""

    def __init__(
        self,
        index: Index,
        visited: Visited,
        policy: Eviction,
        now: int,
        keep: Collection[int] = (),
    ) -> None:
        """`now`: ms since 1970."""
        self.index, self._visited, self._policy = index, visited, policy
        self._now, self._keep = now, keep
        self._spared = 0

    def make_room(self, goal: int, at_least: int) -> None:
        """Evict until used and held are at most `goal` bytes, or nothing is left to evict.

        Stops early after `EVICT_AT_MOST` objects, but not above `at_least` bytes.
        """
        counters, number = self.index.session.counters, 0
        while counters.used + counters.held > goal:
            if number >= EVICT_AT_MOST and counters.used + counters.held <= at_least:
                return
            victim = self.next()
            if victim is None:
                return
            self._evict(*victim)
            number += 1

    def next(self) -> tuple[bytes, Entry] | None:
        """Advance the hand to the next victim; None if every object is pinned or kept."""
        counters = self.index.session.counters
        for _ in range(2 * counters.objects + 1):
            if counters.pinned >= counters.objects:
                return None
            at = self._step()
            if at is None:
                return None
            seq, key = at
            entry = self.index.find(key)
            if entry is None or entry.seq != seq:
                self._clean(seq, key, damaged=entry is None)
            elif self._may_go(entry):
                return key, entry
        return None

    def _step(self) -> tuple[int, bytes] | None:
        session = self.index.session
        cursor = session.cursor(session.tables.order)
        if not cursor.set_range(ONE.pack(session.counters.hand)) and not cursor.first():
            return None
        seq = int(ONE.unpack(cursor.key())[0])
        session.counters.hand = seq + 1
        return seq, bytes(cursor.value())

    def _may_go(self, entry: Entry) -> bool:
        if entry.pinned or entry.seq in self._keep:
            return False
        if entry.expired(self._now) or self._policy == "fifo":
            return True
        if self._spared < SPARE_AT_MOST and self._visited.take(entry.address):
            self._spared += 1
            return False
        return True

    def _clean(self, seq: int, key: bytes, *, damaged: bool) -> None:
        # Only damage leads here; a record that points nowhere must not stop the walk.
        self.index.session.txn.delete(ONE.pack(seq), db=self.index.session.tables.order)
        if damaged:
            self.index.delete(key)

    def _evict(self, key: bytes, entry: Entry) -> None:
        counters = self.index.session.counters
        if self.index.delete(key):
            counters.expired += entry.expired(self._now)
            counters.evicted += not entry.expired(self._now)

    def window(self, nbytes: int, slabs: dict[int, int], slab_bytes: int) -> Extent | None:
        """Make a hole of `nbytes` and return the free extent; None if pins are everywhere.

        `slabs`: bytes on disk by slab number.
        """
        for _ in range(WINDOWS_AT_MOST):
            victim = self.next()
            if victim is None:
                return None
            number = victim[1].address // slab_bytes
            begin, have = number * slab_bytes, slabs.get(number, 0)
            if have < nbytes:
                continue
            low = self._hole_before(victim[1].address)
            low = max(min(low, begin + have - nbytes), begin)
            inside = self._inside(low, low + nbytes)
            if inside is not None:
                for key, entry in inside:
                    self._evict(key, entry)
                return self.index.fit(nbytes)
        return None

    def occupied(self, extent: Extent) -> bool:
        """Tell whether an object lies in an extent that is said to be free."""
        address, nbytes = extent
        return any(True for _ in self._overlapping("space", address, address + nbytes))

    def _hole_before(self, address: int) -> int:
        if not address % self.index.slab_bytes:
            return address
        for start, nbytes in self._overlapping("free", address - 1, address):
            if start + nbytes == address:
                return start
        return address

    def _inside(self, low: int, high: int) -> list[tuple[bytes, Entry]] | None:
        """Return the objects in [low, high), or None where something has to stay."""
        places = list(self._overlapping("space", low, high))
        reach = low
        for start, nbytes in sorted([*places, *self._overlapping("free", low, high)]):
            if start > reach:
                return None  # held by a writer
            reach = max(reach, start + nbytes)
        if reach < high:
            return None
        found = [self._object_at(start) for start, _ in places]
        whole = [one for one in found if one is not None]
        return whole if len(whole) == len(found) else None

    def _object_at(self, address: int) -> tuple[bytes, Entry] | None:
        owner = self.index.owner_at(address)
        key = None if owner is None else self.index.key_of(owner[0])
        entry = None if key is None else self.index.find(key)
        if key is None or entry is None or entry.pinned or entry.seq in self._keep:
            return None
        return key, entry

    def _overlapping(self, table: str, low: int, high: int) -> Iterator[Extent]:
        session = self.index.session
        cursor = session.cursor(getattr(session.tables, table))
        found = cursor.set_range(ONE.pack(low))
        if not (found and cursor.key() == ONE.pack(low)):
            # What begins before `low` may reach into the range.
            found = (cursor.prev() if found else cursor.last()) or cursor.first()
        while found:
            start = ONE.unpack(cursor.key())[0]
            if start >= high:
                return
            value = cursor.value()
            wide = table == "space"
            nbytes = PLACE.unpack(value)[1] * BLOCK if wide else ONE.unpack(value)[0]
            if start + nbytes > low:
                yield start, nbytes
            found = cursor.next()
