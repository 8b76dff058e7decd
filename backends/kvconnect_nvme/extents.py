"""Free and held space in the store's linear address space, inside one transaction.

Addresses run over all slabs: slab number * slab bytes + offset. Free neighbours are joined,
never across slabs, so that an extent is always one range of one file.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvconnect_nvme.tables import ONE, PAIR, Session

Extent = tuple[int, int]
"""(address, nbytes), both multiples of the block."""


class Extents:
    """Allocator over one transaction.

    Invariants: free, held and used space are disjoint and cover all slabs exactly; no two free
    extents of a slab touch; `free` and `holes` hold the same extents.
    """

    __slots__ = ("session", "slab_bytes")

    def __init__(self, session: Session, slab_bytes: int) -> None:
        """`slab_bytes`: where extents may not join."""
        self.session, self.slab_bytes = session, slab_bytes

    def free(self, address: int, nbytes: int) -> Extent:
        """Add free space, joined with its neighbours; return the whole."""
        self.session.counters.free += nbytes
        start, end = address, address + nbytes
        for at, length in list(self._neighbours(address)):
            # Another extent that overlaps would be handed out twice: the index is damaged
            # there, and joining would hide it for ever.
            if at + length == start and start % self.slab_bytes:
                self._drop(at, length)
                start = at
            elif at == end and end % self.slab_bytes:
                self._drop(at, length)
                end = at + length
        self._add(start, end - start)
        return start, end - start

    def _neighbours(self, address: int) -> Iterator[Extent]:
        cursor = self.session.cursor(self.session.tables.free)
        if cursor.set_range(ONE.pack(address)):
            yield ONE.unpack(cursor.key())[0], ONE.unpack(cursor.value())[0]
            found = cursor.prev()
        else:
            found = cursor.last()
        if found:
            yield ONE.unpack(cursor.key())[0], ONE.unpack(cursor.value())[0]

    def fit(self, nbytes: int) -> Extent | None:
        """Return the smallest free extent of at least `nbytes`, without taking it."""
        cursor = self.session.cursor(self.session.tables.holes)
        if not cursor.set_range(PAIR.pack(nbytes, 0)):
            return None
        length, address = PAIR.unpack(cursor.key())
        return address, length

    def largest(self) -> Extent | None:
        """Return the largest free extent."""
        cursor = self.session.cursor(self.session.tables.holes)
        if not cursor.last():
            return None
        length, address = PAIR.unpack(cursor.key())
        return address, length

    def take(self, extent: Extent, nbytes: int) -> Extent:
        """Use the first `nbytes` of a free extent; return what was taken."""
        address, length = extent
        self._drop(address, length)
        if length > nbytes:
            self._add(address + nbytes, length - nbytes)
        self.session.counters.free -= nbytes
        return address, nbytes

    def free_before(self, end: int) -> Extent | None:
        """Return the free extent that ends at `end`."""
        for address, nbytes in self._neighbours(end):
            if address + nbytes == end:
                return address, nbytes
        return None

    def all_free(self) -> Iterator[Extent]:
        """Yield every free extent, by address."""
        for key, value in self.session.cursor(self.session.tables.free):
            yield ONE.unpack(key)[0], ONE.unpack(value)[0]

    def _add(self, address: int, nbytes: int) -> None:
        txn, tables = self.session.txn, self.session.tables
        txn.put(ONE.pack(address), ONE.pack(nbytes), db=tables.free)
        txn.put(PAIR.pack(nbytes, address), b"", db=tables.holes)

    def _drop(self, address: int, nbytes: int) -> None:
        txn, tables = self.session.txn, self.session.tables
        txn.delete(ONE.pack(address), db=tables.free)
        txn.delete(PAIR.pack(nbytes, address), db=tables.holes)

    # Held space: reserved by one open store, not yet published.

    def hold(self, owner: int, extent: Extent) -> None:
        """Note that `owner` has taken an extent."""
        address, nbytes = extent
        self.session.counters.held += nbytes
        self._put_held(owner, address, nbytes)

    def unhold(self, owner: int, address: int, nbytes: int) -> None:
        """Note that a range is no longer held; `LookupError` if some of it was not.

        The range may span several extents: what was reserved in turns lies side by side.
        """
        end = address + nbytes
        while address < end:
            address = self._unhold(owner, address, end)

    def _unhold(self, owner: int, address: int, end: int) -> int:
        cursor = self.session.cursor(self.session.tables.held)
        key = PAIR.pack(owner, address)
        found = cursor.set_range(key)
        if not (found and bytes(cursor.key()) == key):
            # The range begins inside an extent, which is then the one before.
            found = cursor.prev() if found else cursor.last()
        if not found:
            raise LookupError(f"nothing is held at {address}")
        holder, start = PAIR.unpack(cursor.key())
        stop = start + ONE.unpack(cursor.value())[0]
        if holder != owner or stop <= address:
            raise LookupError(f"nothing is held at {address}")
        cursor.delete()
        cut = min(stop, end)
        if address > start:
            self._put_held(owner, start, address - start)
        if stop > cut:
            self._put_held(owner, cut, stop - cut)
        self.session.counters.held -= cut - address
        return int(cut)

    def held(self, owner: int | None = None) -> Iterator[tuple[int, Extent]]:
        """Yield (owner, extent) of what is held, by one owner or by all."""
        cursor = self.session.cursor(self.session.tables.held)
        found = cursor.set_range(PAIR.pack(owner or 0, 0))
        while found:
            holder, address = PAIR.unpack(cursor.key())
            if owner is not None and holder != owner:
                return
            yield holder, (address, ONE.unpack(cursor.value())[0])
            found = cursor.next()

    def release(self, owner: int) -> int:
        """Return everything `owner` holds to free space; return the bytes."""
        extents = [extent for _, extent in self.held(owner)]
        for address, nbytes in extents:
            self.unhold(owner, address, nbytes)
            self.free(address, nbytes)
        return sum(nbytes for _, nbytes in extents)

    def _put_held(self, owner: int, address: int, nbytes: int) -> None:
        held = self.session.tables.held
        self.session.txn.put(PAIR.pack(owner, address), ONE.pack(nbytes), db=held)


def joined(extents: list[Extent], slab_bytes: int) -> list[Extent]:
    """Join touching extents, but not across slabs.

    >>> joined([(8, 4), (0, 8), (20, 1)], 64), joined([(0, 8), (8, 4)], 8)
    ([(0, 12), (20, 1)], [(0, 8), (8, 4)])
    """
    out: list[Extent] = []
    for address, nbytes in sorted(extents):
        if out and sum(out[-1]) == address and address % slab_bytes:
            out[-1] = (out[-1][0], out[-1][1] + nbytes)
        else:
            out.append((address, nbytes))
    return out
