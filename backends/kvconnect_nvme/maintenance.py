"""`verify`: read everything and drop what is damaged. `compact`: move objects down, shrink.

Both run beside readers and writers; memory is bounded by one bounce buffer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import xxhash

from kvconnect.errors import BackendError, KVConnectError, TransferTimeoutError
from kvconnect_nvme import entry as codec
from kvconnect_nvme import keys, recall
from kvconnect_nvme.core import Core
from kvconnect_nvme.entry import Entry
from kvconnect_nvme.foreign import mapped
from kvconnect_nvme.opening import Home, reclaim
from kvconnect_nvme.options import BLOCK
from kvconnect_nvme.pending import Changed
from kvconnect_nvme.rebuild import rebuild
from kvconnect_nvme.tables import ONE, PLACE, Session

CHUNK = 512
PIECE = 4 << 20
"""Bytes read or copied at once."""
ROUND = 64 << 20
"""Bytes moved between two syncs of `compact`."""
HOLES = 4096
"""Free extents looked at per round, from the lowest address up."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Objects read and their bytes; `bad` were dropped, `recovered` bytes had been lost.

    `unlisted` objects were there and `exists` did not find them.
    """

    objects: int
    nbytes: int
    bad: int
    recovered: int
    unlisted: int = 0


@dataclass(frozen=True, slots=True)
class CompactReport:
    """Objects moved and their bytes; `returned` bytes went back to the file system."""

    moved: int
    nbytes: int
    returned: int


def verify(core: Core, home: Home) -> VerifyReport:
    """Read every object; drop those that are not what was stored; recover lost space."""
    recovered = reclaim(core, home)
    objects = nbytes = bad = unlisted = 0
    after = b""
    while chunk := _chunk(core, after):
        after = chunk[-1][0]
        wrong = [key for key, raw in chunk if not _is_right(core, key, raw)]
        bad += _drop(core, dict(chunk), wrong)
        unlisted += recall.correct(core, recall.contradicted(core, _there(chunk)))
        objects += len(chunk)
        nbytes += sum(codec.trusted(r).nbytes for k, r in chunk if k not in wrong)
    if bad or not _adds_up(core):
        recovered += core.env.write(lambda session: _recount(core, session))
    recall.complete(core)
    return VerifyReport(objects, nbytes, bad, recovered, unlisted)


def _there(chunk: list[tuple[bytes, bytes]]) -> Changed:
    entries = [(key, codec.trusted(raw)) for key, raw in chunk if len(raw) == codec.NBYTES]
    return {(key, entry.nbytes): entry.expiry > 0 for key, entry in entries}


def _recount(core: Core, session: Session) -> int:
    # Compared inside the transaction: what others free meanwhile had not been lost.
    before = session.counters.free
    rebuild(core.index(session))
    return max(session.counters.free - before, 0)


def _chunk(core: Core, after: bytes) -> list[tuple[bytes, bytes]]:
    with core.env.read() as session:
        cursor = session.cursor(session.tables.entries)
        if not cursor.set_range(after + b"\0" if after else b""):
            return []
        return [(bytes(key), bytes(value)) for key, value in islice(cursor, CHUNK)]


def _is_right(core: Core, key: bytes, raw: bytes) -> bool:
    entry = codec.unpack(key, raw)
    if entry is None or entry.identity != keys.identity(key):
        return False
    with core.env.read() as session:
        index = core.index(session)
        if index.owner_at(entry.address) != (entry.seq, entry.room):
            return index.raw([key])[0] != raw
    if not entry.flags & codec.HASHED:
        return True
    return digest(core, key, entry) == entry.checksum


def digest(core: Core, key: bytes, entry: Entry) -> int | None:
    """Return xxh3 of an object's bytes as they are on disk; None where they cannot be read."""
    state = xxhash.xxh3_64(seed=keys.seed(key))
    try:
        for at, piece in _pieces(core, entry):
            state.update(piece[: entry.nbytes - at])
    except TransferTimeoutError:
        raise  # no buffer came free, which says nothing about the object
    except (BackendError, OSError):
        return None
    return int(state.intdigest())


def _pieces(core: Core, entry: Entry) -> Iterator[tuple[int, memoryview]]:
    """Yield (offset, bytes) of an object's extent, whole blocks."""
    fd, offset = core.slabs.locate(entry.address)
    with core.bounce.slot(min(PIECE, entry.room, core.bounce.limit)) as slot:
        for at in range(0, entry.room, len(slot.view)):
            piece = slot.view[: min(len(slot.view), entry.room - at)]
            with mapped(f"read {entry.room} B at {entry.address}"):
                if os.preadv(fd, [piece], offset + at) != len(piece):
                    raise BackendError(f"nvme: short read at {entry.address + at}")
            yield at, piece


def _drop(core: Core, chunk: dict[bytes, bytes], wrong: list[bytes]) -> int:
    """Drop the entries that are still the ones that were found wrong."""
    if not wrong:
        return 0

    def change(session: Session) -> int:
        index, dropped = core.index(session), 0
        for key in wrong:
            if index.raw([key])[0] == chunk[key] and index.delete(key):
                session.counters.healed += 1
                dropped += 1
        return dropped

    return core.env.write(change)


def _adds_up(core: Core) -> bool:
    with core.env.read() as session:
        tables = (session.tables.entries, session.tables.order, session.tables.space)
        records = {int(session.txn.stat(table)["entries"]) for table in tables}
        total = sum(nbytes for _, nbytes in session.slabs())
        return session.counters.total == total and records == {session.counters.objects}


def compact(core: Core, home: Home) -> CompactReport:
    """Move objects to lower addresses until none fits, then cut free tails off the slabs."""
    reclaim(core, home)
    core.arena.drain()
    moved = nbytes = 0
    while kept := _round(core):
        moved += len(kept)
        nbytes += sum(entry.nbytes for entry in kept)
    # The last moves must outlive a power cut before the bytes they were made from are cut off.
    core.env.sync()
    returned = core.env.write(lambda session: _trim(core, session))
    return CompactReport(moved, nbytes, returned)


Move = tuple[bytes, Entry, int]
"""Packed key, entry where the object is, address where it goes."""


def _round(core: Core) -> list[Entry]:
    """Move some objects down; return them, none when it is done."""
    plan = core.env.write(lambda session: _plan(core, session))
    if not plan:
        return []
    done = [move for move in plan if _copy(core, *move)]
    try:
        core.slabs.sync(new // core.slabs.slab_bytes for _, _, new in done)
    except BackendError:
        with suppress(KVConnectError):  # the first error is the one to tell
            core.env.write(lambda session: _switch(core, session, plan, []))
        raise
    return core.env.write(lambda session: _switch(core, session, plan, done))


def _plan(core: Core, session: Session) -> list[Move]:
    """Choose the highest objects that fit into lower holes, and hold those holes."""
    index, total, plan = core.index(session), 0, list[Move]()
    holes = list(islice(index.all_free(), HOLES))
    cursor = session.cursor(session.tables.space)
    found = cursor.last()
    while found and total < ROUND:
        address = ONE.unpack(cursor.key())[0]
        seq, blocks = PLACE.unpack(cursor.value())
        key = index.key_of(seq)
        entry = None if key is None else index.find(key)
        fits = (i for i, hole in enumerate(holes) if hole[1] >= blocks * BLOCK)
        at = next(fits, None)
        if at is None or holes[at][0] > address:
            break
        if key is not None and entry is not None and entry.address == address:
            start, nbytes = holes[at]
            index.hold(core.owner, index.take(holes[at], entry.room))
            rest = nbytes - entry.room
            holes[at : at + 1] = [(start + entry.room, rest)] if rest else []
            plan.append((key, entry, start))
            total += entry.room
        found = cursor.prev()
    return plan


def _copy(core: Core, key: bytes, old: Entry, new: int) -> bool:
    fd, offset = core.slabs.locate(new)
    state = xxhash.xxh3_64(seed=keys.seed(key))
    try:
        for at, piece in _pieces(core, old):
            state.update(piece[: old.nbytes - at])
            with mapped(f"write {old.room} B at {new}"):
                if os.pwritev(fd, [piece], offset + at) != len(piece):
                    return False
    except BackendError:
        return False
    return not old.flags & codec.HASHED or state.intdigest() == old.checksum


def _switch(core: Core, session: Session, plan: list[Move], done: list[Move]) -> list[Entry]:
    """Point the entries at the copies; what was not copied or has changed gives them back."""
    index, moved = core.index(session), list[Entry]()
    for move in plan:
        key, old, new = move
        index.unhold(core.owner, new, old.room)
        if move in done and index.find(key) == old:
            index.relocate(key, old, new)
            moved.append(old)
        else:
            index.free(new, old.room)
    return moved


def _trim(core: Core, session: Session) -> int:
    index, returned = core.index(session), 0
    if core.slabs.device:
        return 0
    for number, nbytes in list(session.slabs()):
        end = number * core.slabs.slab_bytes + nbytes
        tail = index.free_before(end)
        if tail is not None:
            index.take(tail, tail[1])
            # Inside the transaction: another process may grow the slab once it commits.
            core.slabs.shrink(number, nbytes - tail[1])
            session.set_slab(number, nbytes - tail[1])
            returned += tail[1]
    return returned
