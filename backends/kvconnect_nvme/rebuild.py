"""Rebuilding the free list from what is certain: the entries, and what is held."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from kvconnect_nvme.extents import Extent
from kvconnect_nvme.index import Index
from kvconnect_nvme.options import BLOCK
from kvconnect_nvme.tables import ONE, PLACE


def rebuild(index: Index) -> None:
    """Recount everything and make free what no object and no writer has.

    Objects are believed by their entries' checks; a record of space that leads to no entry
    is dropped.
    """
    session, counters = index.session, index.session.counters
    for table in (session.tables.free, session.tables.holes):
        session.txn.drop(table, delete=False)
    counters.free = counters.used = counters.objects = counters.pinned = 0
    held = sorted(extent for _, extent in index.held())
    counters.held = sum(nbytes for _, nbytes in held)
    slabs = dict(session.slabs())
    edges: list[Extent] = []
    # Also those that `compact` has cut off whole: their addresses are nobody's to hand out.
    for number in range(max(slabs, default=-1) + 1):
        start, nbytes = number * index.slab_bytes, slabs.get(number, 0)
        edges += [(start, 0), (start + nbytes, index.slab_bytes - nbytes)]
    at = 0
    for address, nbytes in heapq.merge(_objects(index), held, sorted(edges)):
        if address > at:
            index.free(at, address - at)
        at = max(at, address + nbytes)
    session.counters = counters


def _objects(index: Index) -> Iterator[Extent]:
    session, counters = index.session, index.session.counters
    cursor = session.cursor(session.tables.space)
    found = cursor.first()
    while found:
        address = ONE.unpack(cursor.key())[0]
        seq, blocks = PLACE.unpack(cursor.value())
        key = index.key_of(seq)
        entry = None if key is None else index.find(key)
        if entry is not None and (entry.seq, entry.address) == (seq, address):
            counters.used += entry.room
            counters.objects += 1
            counters.pinned += entry.pinned
            yield address, blocks * BLOCK
            found = cursor.next()
        else:
            # After a delete the cursor is on the next record already.
            cursor.delete()
            found = bool(cursor.key())
