"""Store and load of one batch: the order of events that makes a hit mean what it says."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from kvconnect.backend import Batch, Op, Status
from kvconnect.errors import BackendError
from kvconnect.transfers import BatchTransfer
from kvconnect_nvme.catalog import Hold
from kvconnect_nvme.engine import IoEngine, PieceSkipped, Views
from kvconnect_nvme.entry import PINNED, Entry, pack_keys, seed_of, unpack
from kvconnect_nvme.failures import status_of
from kvconnect_nvme.index import Index
from kvconnect_nvme.memory import BatchMemory, BouncePool, aligned_objects
from kvconnect_nvme.pieces import PieceMaker, Placed, Work
from kvconnect_nvme.room import Room
from kvconnect_nvme.slabs import Slabs
from kvconnect_nvme.state import padded


@dataclass(slots=True)
class Parts:
    """What a job works with."""

    index: Index
    slabs: Slabs
    room: Room
    engine: IoEngine
    bounce: BouncePool
    checksum: bool
    sync: bool
    counters: Any
    clock: Callable[[], float] = time.time


def digest(views: Views, seed: int) -> int:
    """Return xxh3-64 of an object's runs, seeded with its key; never 0 (0 means none)."""
    if len(views) == 1:
        value = xxhash.xxh3_64_intdigest(views[0], seed)
    else:
        state = xxhash.xxh3_64(seed=seed)
        for view in views:
            state.update(view)
        value = state.intdigest()
    return value or 1


@dataclass(slots=True)
class Job:
    """One batch under way."""

    parts: Parts
    batch: Batch
    transfer: BatchTransfer
    memory: BatchMemory = field(init=False)
    keys: list[bytes] = field(init=False)
    hashes: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Read the rows and pack the keys once."""
        self.memory = BatchMemory(self.batch)
        self.keys = pack_keys(self.batch.keys)

    def _aligned(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        self.parts.slabs.fd(0)  # probes O_DIRECT on the first slab
        need = self.parts.slabs.memory_alignment if self.parts.slabs.direct else 1
        return aligned_objects(self.batch, need)

    def _hash(self, index: int, views: Views) -> None:
        if self.parts.checksum:
            self.hashes[index] = digest(views, seed_of(self.keys[index]))

    def _hash_slices(self, works: Sequence[Work]) -> None:
        """Hash the objects that no single piece sees whole."""
        for index in {i for work in works if not work.whole for i in work.objects}:
            self._hash(index, self.memory.views(index))

    def _move(self, works: list[Work]) -> dict[int, BaseException]:
        """Run the pieces; the error of each object that did not move whole."""
        op = self.batch.op
        errors = self.parts.engine.run(
            op, [w.piece for w in works], lambda: self.transfer.cancelled
        )
        bad: dict[int, BaseException] = {}
        for work, error in zip(works, errors, strict=True):
            if error is not None:
                bad.update(dict.fromkeys(work.objects, error))
        return bad

    def _settle_error(self, index: int, error: BaseException) -> None:
        if isinstance(error, PieceSkipped):
            self.transfer.settle(index, Status.CANCELLED, "cancelled")
        else:
            self.transfer.settle(index, status_of(error), str(error), dirty=True)


class LoadJob(Job):
    """Look up, read, verify, and look up again."""

    __slots__ = ()

    def run(self) -> None:
        """Settle every key."""
        entries, snapshot = self._look_up()
        if not entries:
            return
        maker = PieceMaker(
            Op.LOAD, self.memory, self._aligned(), self.parts.slabs, self.parts.bounce, self._hash
        )
        works = maker.make([Placed(i, e.address) for i, e in entries.items()])
        bad = self._move(works)
        self._hash_slices(works)
        current = self._still_there(entries, snapshot)
        good, poisoned = [], []
        for index, entry in entries.items():
            if index in bad:
                self._settle_error(index, bad[index])
            elif index not in current:
                # Its room may have been given to another object while we read.
                text = "evicted or replaced while it was read"
                self.transfer.settle(index, Status.ABSENT, text, dirty=True)
            elif self.parts.checksum and entry.checksum not in (0, self.hashes[index]):
                poisoned.append(index)
                text = f"checksum {self.hashes[index]:#018x}, stored {entry.checksum:#018x}"
                self.transfer.settle(index, Status.CHECKSUM, text, dirty=True)
            else:
                good.append(entry.address)
                self.transfer.settle(index, Status.OK)
        self.parts.room.visited.mark(good)
        self._heal([(self.keys[i], entries[i].seq) for i in poisoned])

    def _look_up(self) -> tuple[dict[int, Entry], int]:
        now, entries, damaged = int(self.parts.clock()), {}, []
        with self.parts.index.read() as txn:
            snapshot = txn.id()
            found = dict(txn.cursor(db=self.parts.index.db.entries).getmulti(self.keys))
        for index, key in enumerate(self.keys):
            data = found.get(key)
            if data is None:
                self.transfer.settle(index, Status.ABSENT)
                continue
            entry = unpack(key, data)
            if entry is None:
                damaged.append((key, -1))
                self.transfer.settle(index, Status.IDENTITY, "the index entry is damaged")
            elif entry.expiry and entry.expiry <= now:
                self.transfer.settle(index, Status.ABSENT, "expired")
            elif entry.nbytes != self.memory.sizes[index]:
                text = f"{entry.nbytes} B stored, {self.memory.sizes[index]} B asked"
                self.transfer.settle(index, Status.SIZE_MISMATCH, text)
            else:
                entries[index] = entry
        self._heal(damaged)
        return entries, snapshot

    def _still_there(self, entries: dict[int, Entry], snapshot: int) -> set[int]:
        """Return which entries are unchanged after the read; this is what makes it safe.

        Room is given away only after the entry is gone, so an entry that is still the same
        version proves that nobody wrote over what was read, whichever process it might be.
        """
        if self.parts.index.last_change() == snapshot:
            return set(entries)
        wanted = [self.keys[i] for i in entries]
        with self.parts.index.read() as txn:
            found = dict(txn.cursor(db=self.parts.index.db.entries).getmulti(wanted))
        same = set()
        for index, entry in entries.items():
            now = unpack(self.keys[index], found.get(self.keys[index], b""))
            if now is not None and (now.seq, now.address) == (entry.seq, entry.address):
                same.add(index)
        return same

    def _heal(self, poisoned: list[tuple[bytes, int]]) -> None:
        """Remove entries that do not verify, so that the next put stores them afresh."""
        if not poisoned:
            return

        def change(txn: Any) -> None:
            catalog = self.parts.room.catalog(txn)
            for key, seq in poisoned:
                catalog.remove(key, only=seq)
            catalog.done()

        self.parts.index.update(change)
        self.parts.counters.add("healed", len(poisoned))


class StoreJob(Job):
    """Hold room, write, sync, and only then publish."""

    __slots__ = ()

    def run(self) -> None:
        """Settle every key."""
        self._refuse_duplicates()
        wanted = self._skip_present(list(range(len(self.batch))))
        if self.transfer.cancelled:
            for index in wanted:
                self.transfer.settle(index, Status.CANCELLED, "cancelled")
            return
        placed, holds = self._hold(wanted)
        if not placed:
            return
        try:
            bad = self._write(placed)
            good = {p.index: p.address for p in placed if p.index not in bad}
            self._publish(good, holds, placed)
        except BaseException:
            self.parts.room.give_back(holds)
            raise
        for index, error in bad.items():
            self._settle_error(index, error)
        for index in good:
            self.transfer.settle(index, Status.OK)

    def _refuse_duplicates(self) -> None:
        if len(set(self.keys)) != len(self.keys):
            raise BackendError("a key appears twice in one batch; keys must be distinct")

    def _skip_present(self, wanted: list[int]) -> list[int]:
        """Leave out objects whose very bytes are stored already (known by checksum)."""
        if not self.parts.checksum:
            return wanted
        with self.parts.index.read() as txn:
            found = dict(txn.cursor(db=self.parts.index.db.entries).getmulti(self.keys))
        if not found:
            return wanted
        rest, retag = [], []
        for index in wanted:
            entry = unpack(self.keys[index], found.get(self.keys[index], b""))
            if entry is None or entry.nbytes != self.memory.sizes[index]:
                rest.append(index)
                continue
            self._hash(index, self.memory.views(index))
            if self.hashes[index] == entry.checksum:
                retag.append((index, entry))
            else:
                rest.append(index)
        return sorted(rest + self._confirm(retag))

    def _confirm(self, present: list[tuple[int, Entry]]) -> list[int]:
        """Settle objects that are still present, with their new expiry; return those gone."""
        if not present:
            return []
        expiry, flags = self._tags()

        def change(txn: Any) -> list[int]:
            catalog, gone = self.parts.room.catalog(txn), []
            for index, entry in present:
                now = catalog.entry(self.keys[index])
                if now is None or now.seq != entry.seq:
                    gone.append(index)
                elif (now.expiry, now.flags) != (expiry, flags):
                    tagged = Entry(now.address, now.nbytes, now.checksum, now.seq, expiry, flags)
                    catalog.retag(self.keys[index], tagged)
            return gone

        gone = self.parts.index.update(change)
        for index, _ in present:
            if index not in gone:
                self.transfer.settle(index, Status.OK)
        self.parts.counters.add("already_stored", len(present) - len(gone))
        return gone

    def _tags(self) -> tuple[int, int]:
        ttl = self.batch.ttl
        expiry = 0 if ttl is None else max(int(self.parts.clock() + ttl + 0.999), 1)
        return expiry, PINNED if self.batch.pin else 0

    def _hold(self, wanted: list[int]) -> tuple[list[Placed], list[Hold]]:
        """Hold room; where not all fit, for as many as do, halving until single objects."""
        if not wanted:
            return [], []
        sizes = [padded(self.memory.sizes[i]) for i in wanted]
        holds = self.parts.room.hold(sizes)
        if holds is None and len(wanted) == 1:
            self.transfer.settle(wanted[0], Status.NO_SPACE, self._why_no_room(sizes[0]))
            return [], []
        if holds is None:
            middle = len(wanted) // 2
            left, right = self._hold(wanted[:middle]), self._hold(wanted[middle:])
            return left[0] + right[0], left[1] + right[1]
        placed, at = [], 0
        for hold in holds:
            address = hold.address
            for index, size in zip(
                wanted[at : at + hold.count], sizes[at : at + hold.count], strict=True
            ):
                placed.append(Placed(index, address))
                address += size
            at += hold.count
        return placed, holds

    def _why_no_room(self, nbytes: int) -> str:
        room = self.parts.room
        if nbytes > self.parts.slabs.slab_bytes:
            return f"{nbytes} B do not fit a slab of {self.parts.slabs.slab_bytes} B; raise slab="
        reason = room.growth_error or "what is there is pinned or held; raise capacity="
        return f"no room for {nbytes} B within capacity {room.limits.capacity} B: {reason}"

    def _write(self, placed: list[Placed]) -> dict[int, BaseException]:
        maker = PieceMaker(
            Op.STORE, self.memory, self._aligned(), self.parts.slabs, self.parts.bounce, self._hash
        )
        works = maker.make(placed)
        self._hash_slices(works)
        bad = self._move(works)
        if self.parts.sync:
            slab = self.parts.slabs.slab_bytes
            self.parts.slabs.sync({p.address // slab for p in placed if p.index not in bad})
        return bad

    def _publish(self, good: dict[int, int], holds: list[Hold], placed: list[Placed]) -> None:
        """In one transaction: keys become visible, and room that was not used is returned."""
        expiry, flags = self._tags()

        def change(txn: Any) -> None:
            catalog = self.parts.room.catalog(txn)
            catalog.unhold(self.parts.room.owner.id, holds)
            for one in placed:
                nbytes = self.memory.sizes[one.index]
                if one.index not in good:
                    catalog.extents.release(one.address, padded(nbytes))
                    continue
                checksum = self.hashes.get(one.index, 0)
                entry = Entry(one.address, nbytes, checksum, 0, expiry, flags)
                catalog.publish(self.keys[one.index], entry)
            catalog.done()

        self.parts.index.update(change)
