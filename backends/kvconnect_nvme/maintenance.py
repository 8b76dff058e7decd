"""Maintenance: statistics, verify, compact, and removal in bounded portions."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvconnect_nvme.catalog import Catalog
from kvconnect_nvme.engine import transfer
from kvconnect_nvme.entry import Entry, seed_of, unpack
from kvconnect_nvme.index import U64
from kvconnect_nvme.jobs import Parts, digest
from kvconnect_nvme.room import Room
from kvconnect_nvme.state import padded, read_state

PORTION = 1024
"""Keys in one write transaction: long ones would hold up every other process."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a maintenance run found and did."""

    checked: int = 0
    bad: int = 0
    removed: int = 0
    moved: int = 0
    freed: int = 0
    seconds: float = 0.0


def portions(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Yield keys in portions for one transaction each."""
    for at in range(0, len(keys), PORTION):
        yield keys[at : at + PORTION]


def remove(room: Room, keys: Sequence[bytes]) -> list[bool]:
    """Remove keys in one transaction; True where one was there."""

    def change(txn: Any) -> list[bool]:
        catalog = room.catalog(txn)
        gone = [catalog.remove(key) for key in keys]
        catalog.done()
        return gone

    return room.index.update(change)


def release_owner(room: Room) -> None:
    """Return what this process still holds."""

    def change(txn: Any) -> None:
        catalog = room.catalog(txn)
        catalog.release_owner(room.owner.id)
        catalog.done()

    room.index.update(change)


def matching(room: Room, prefix: str) -> list[bytes]:
    """Return the packed keys that begin with `prefix`, in both ways a key is packed."""
    even = prefix[: len(prefix) // 2 * 2]
    is_hex = not prefix.strip("0123456789abcdef")
    starts = [b"u" + prefix.encode()]
    if is_hex:
        starts.append(b"h" + bytes.fromhex(even))
    out = []
    with room.index.read() as txn:
        for start in starts:
            with txn.cursor(db=room.index.db.entries) as cursor:
                more = cursor.set_range(start)
                while more and cursor.key().startswith(start):
                    out.append(bytes(cursor.key()))
                    more = cursor.next()
    odd = prefix[len(even) :]
    return [k for k in out if not odd or k[:1] == b"u" or k[1:].hex().startswith(prefix)]


def stats(parts: Parts) -> dict[str, int | float | str]:
    """Return what the store holds and did."""
    room, index = parts.room, parts.index
    with index.read() as txn:
        state = read_state(txn, index.db.meta)
        held = sum(U64.unpack(v)[0] for _, v in txn.cursor(db=index.db.held))
        free = sum(U64.unpack(v)[0] for _, v in txn.cursor(db=index.db.free))
    counters = {k: v for k, v in parts.counters.snapshot().items() if "." not in k}
    return {
        "objects": state.objects,
        "used_bytes": state.used,
        "free_bytes": free,
        "held_bytes": held,
        "slab_total_bytes": state.total,
        "capacity_bytes": room.limits.capacity,
        "slabs": state.slabs,
        "slab_bytes": parts.slabs.slab_bytes,
        "index_bytes": index.nbytes(),
        "evictions": state.evictions,
        "bounce_bytes": parts.bounce.nbytes,
        "direct": str(parts.slabs.direct).lower(),
        "healed": counters.get("healed", 0),
        "already_stored": counters.get("already_stored", 0),
    }


def verify(parts: Parts, *, repair: bool) -> Report:
    """Read every object once through one buffer and compare size, checksum and identity."""
    started, checked, bad = time.monotonic(), 0, list[tuple[bytes, int]]()
    for key, data in _entries(parts):
        checked += 1
        entry = unpack(key, data)
        if entry is None:
            bad.append((key, -1))
        elif not _reads_right(parts, key, entry) and _unchanged(parts, key, data):
            bad.append((key, entry.seq))
    removed = _drop(parts, bad) if repair and bad else 0
    return Report(checked, len(bad), removed, seconds=time.monotonic() - started)


def _entries(parts: Parts) -> Iterator[tuple[bytes, bytes]]:
    """Walk all entries in portions, each under a snapshot of its own."""
    last = b""
    while True:
        out: list[tuple[bytes, bytes]] = []
        with parts.index.read() as txn, txn.cursor(db=parts.index.db.entries) as cursor:
            more = cursor.set_range(last)
            if more and cursor.key() == last:
                more = cursor.next()
            while more and len(out) < PORTION:
                out.append((bytes(cursor.key()), bytes(cursor.value())))
                more = cursor.next()
        if not out:
            return
        yield from out
        last = out[-1][0]


def _reads_right(parts: Parts, key: bytes, entry: Entry) -> bool:
    try:
        with mmap.mmap(-1, max(padded(entry.nbytes), 4096)) as memory:
            view = memoryview(memory)
            read_object(parts, entry, view)
            got = digest([view[: entry.nbytes]], seed_of(key))
            view.release()
    except OSError:
        return False
    return entry.checksum in (0, got)


def read_object(parts: Parts, entry: Entry, view: memoryview) -> None:
    """Read an object with its padding to the start of `view`."""
    number, offset = parts.slabs.place(entry.address)
    nbytes = padded(entry.nbytes)
    transfer(os.preadv, parts.slabs.fd(number), [view[:nbytes]], offset, nbytes)


def _unchanged(parts: Parts, key: bytes, data: bytes) -> bool:
    with parts.index.read() as txn:
        return bool(txn.get(key, db=parts.index.db.entries) == data)


def _drop(parts: Parts, bad: list[tuple[bytes, int]]) -> int:
    def change(txn: Any) -> int:
        catalog = parts.room.catalog(txn)
        gone = sum(catalog.remove(key, only=None if seq < 0 else seq) for key, seq in bad)
        catalog.done()
        return gone

    return parts.index.update(change)


def compact(parts: Parts) -> Report:
    """Move objects of the last slabs into holes before them, then delete empty slabs.

    Each move is a read, a checked write to held room, a sync and one transaction, as for a
    put: a kill in between loses nothing.
    """
    started, moved = time.monotonic(), 0
    parts.room.sweep()
    while (found := _last_object(parts)) is not None and _move_down(parts, *found):
        moved += 1
    freed = 0 if parts.slabs.device else _drop_empty_slabs(parts)
    return Report(moved=moved, freed=freed, seconds=time.monotonic() - started)


def _last_object(parts: Parts) -> tuple[bytes, Entry] | None:
    db = parts.index.db
    with parts.index.read() as txn, txn.cursor(db=db.space) as cursor:
        if not cursor.last():
            return None
        key = txn.get(cursor.value(), db=db.order)
        entry = unpack(key, txn.get(key, db=db.entries) or b"") if key else None
    return (bytes(key), entry) if key and entry else None


def _move_down(parts: Parts, key: bytes, entry: Entry) -> bool:
    size = padded(entry.nbytes)
    address = parts.index.update(lambda txn: _hold_below(parts, txn, entry.address, size))
    if address is None:
        return False
    with mmap.mmap(-1, size) as memory:
        view = memoryview(memory)
        read_object(parts, entry, view)
        good = entry.checksum in (0, digest([view[: entry.nbytes]], seed_of(key)))
        if good:
            number, offset = parts.slabs.place(address)
            transfer(os.pwritev, parts.slabs.fd(number), [view], offset, size)
            parts.slabs.sync({number})
        view.release()

    def change(txn: Any) -> bool:
        catalog = parts.room.catalog(txn)
        txn.delete(parts.room.owner.id + U64.pack(address), db=parts.index.db.held)
        now = catalog.entry(key)
        same = now is not None and now.seq == entry.seq
        if good and same:
            catalog.publish(key, entry.moved(address, 0))
        else:
            catalog.extents.release(address, size)
            if same:
                catalog.remove(key)
        catalog.done()
        return True

    return parts.index.update(change)


def _hold_below(parts: Parts, txn: Any, below: int, size: int) -> int | None:
    """Hold the first hole of `size` that lies before `below`."""
    catalog = Catalog(txn, parts.index, parts.slabs.slab_bytes)
    db = parts.index.db
    with txn.cursor(db=db.free) as cursor:
        for raw_address, raw_length in cursor:
            address, length = U64.unpack(raw_address)[0], U64.unpack(raw_length)[0]
            if address >= below:
                return None
            if length >= size:
                break
        else:
            return None
    catalog.extents.take_at(address, length, size)
    txn.put(parts.room.owner.id + U64.pack(address), U64.pack(size), db=db.held)
    catalog.done()
    return int(address)


def _drop_empty_slabs(parts: Parts) -> int:
    def change(txn: Any) -> list[tuple[int, int]]:
        catalog, out = parts.room.catalog(txn), list[tuple[int, int]]()
        while catalog.state.slabs:
            start = (catalog.state.slabs - 1) * parts.slabs.slab_bytes
            nbytes = catalog.state.total - start
            if txn.get(U64.pack(start), db=parts.index.db.free) != U64.pack(nbytes):
                break
            catalog.extents.take_at(start, nbytes, nbytes)
            catalog.state.slabs -= 1
            catalog.state.total -= nbytes
            out.append((catalog.state.slabs, nbytes))
        catalog.done()
        return out

    gone = parts.index.update(change)
    for number, _ in gone:
        parts.slabs.truncate(number)
    return sum(nbytes for _, nbytes in gone)
