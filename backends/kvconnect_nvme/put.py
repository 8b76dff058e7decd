"""Storing a batch: compare, reserve, write, sync, publish; in that order, for any crash.

Until the one transaction that publishes, nothing of the batch is visible; when it commits, all
written objects are, and their bytes are on disk already.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np

from kvconnect.backend import Status
from kvconnect_nvme import entry as codec
from kvconnect_nvme import keys
from kvconnect_nvme.core import Core, Job
from kvconnect_nvme.engine import Group
from kvconnect_nvme.entry import Entry
from kvconnect_nvme.extents import Extent, joined
from kvconnect_nvme.foreign import status_of, translate
from kvconnect_nvme.grouping import group
from kvconnect_nvme.options import up_all
from kvconnect_nvme.recall import Object, contradicted
from kvconnect_nvme.tables import Session
from kvconnect_nvme.work import Stopped, Storing, checksum

_ROUNDS = 3
"""Attempts at objects that are evicted by others between comparing and publishing."""


def store(core: Core, job: Job) -> None:
    """Store a batch; every key is settled on return."""
    put = _Put(core, job)
    todo = put.not_empty()
    for _ in range(_ROUNDS):
        todo = put.run(todo)
        if not todo:
            return
    job.settle_rest(Status.BACKEND_ERROR, "evicted again and again while it was being stored")


@dataclass(slots=True)
class _Put:
    core: Core
    job: Job
    expiry: int = field(init=False)
    flags: int = field(init=False)
    same: dict[int, Entry] = field(default_factory=dict)
    unlisted: set[Object] = field(default_factory=set)

    @property
    def packed(self) -> list[bytes]:
        return self.job.packed

    def __post_init__(self) -> None:
        batch, options = self.job.batch, self.core.options
        self.expiry = 0 if batch.ttl is None else math.ceil((time.time() + batch.ttl) * 1000)
        self.flags = codec.PINNED * batch.pin | codec.HASHED * options.checksum

    def not_empty(self) -> list[int]:
        sizes = self.job.memory.sizes.tolist()
        if all(sizes):
            return list(range(len(sizes)))
        for index, size in enumerate(sizes):
            if not size:
                self.job.settle(index, Status.SIZE_MISMATCH, "0 B; an object has at least one byte")
        return [index for index, size in enumerate(sizes) if size]

    def run(self, todo: list[int]) -> list[int]:
        """Store the objects `todo`; return those that have to be stored again."""
        self.same = self._compare(todo)
        new = [i for i in todo if i not in self.same]
        again = self._confirm_same()
        if new:
            self._write_new(new)
        return again

    def _compare(self, todo: list[int]) -> dict[int, Entry]:
        """Find the objects that are stored already, byte for byte by their checksum."""
        if not self.core.options.checksum:
            return {}
        with self.core.env.read() as session:
            raws = self.core.index(session).raw([self.packed[i] for i in todo])
        now, found = codec.now_ms(), dict[int, Entry]()
        for i, raw in zip(todo, raws, strict=True):
            entry = None if raw is None else codec.unpack(self.packed[i], raw)
            if entry is not None and self._comparable(i, entry, now):
                found[i] = entry
        sums = self.core.engine.each(self._sum, list(found))
        pairs = zip(found.items(), sums, strict=True)
        same = {i: entry for (i, entry), digest in pairs if digest == entry.checksum}
        there = {(self.packed[i], e.nbytes): e.expiry > 0 for i, e in same.items()}
        self.unlisted = set(contradicted(self.core, there))
        return same

    def _comparable(self, index: int, entry: Entry, now: int) -> bool:
        hashed = entry.flags & codec.HASHED
        return (
            bool(hashed) and entry.nbytes == self.job.memory.sizes[index] and not entry.expired(now)
        )

    def _sum(self, index: int) -> int | None:
        if self.job.stop_reason() is not None:
            return None
        return checksum(self.job.memory.views(index), keys.seed(self.packed[index]))

    def _confirm_same(self) -> list[int]:
        """Settle what is stored already; return what has vanished meanwhile."""
        changed = {i: e for i, e in self.same.items() if self._differs(i, e)}
        gone: list[int] = []
        if changed:

            def touch(session: Session) -> list[int]:
                index = self.core.index(session)
                return [
                    i
                    for i, e in changed.items()
                    if not index.touch(self.packed[i], e.seq, *self._merged(e))
                ]

            gone = self.core.env.write(touch)
        kept = {i: e for i, e in self.same.items() if i not in gone}
        self.core.mark([e.address for e in kept.values()])
        self.core.count("put.same", len(kept))
        for i in kept:
            self.job.settle(i, Status.OK)
        self.same = kept
        return gone

    def _differs(self, index: int, entry: Entry) -> bool:
        merged = self._merged(entry) != (entry.expiry, entry.flags)
        return merged or (self.packed[index], entry.nbytes) in self.unlisted

    def _merged(self, entry: Entry) -> tuple[int, int]:
        """Return (expiry, flags) after storing the same again: the later one; a pin stays."""
        forever = not entry.expiry or not self.expiry
        expiry = 0 if forever else max(entry.expiry, self.expiry)
        return expiry, entry.flags | self.flags

    def _write_new(self, new: list[int]) -> None:
        sizes = up_all(self.job.memory.sizes[new]).tolist()
        keep = frozenset(entry.seq for entry in self.same.values())
        got = self.core.arena.reserve(sizes, keep)
        extents = {
            i: (place, room)
            for i, place, room in zip(new, got.places, sizes, strict=True)
            if place is not None
        }
        if len(extents) < len(new):
            for at, i in enumerate(new):
                if i not in extents:
                    self.job.settle(i, Status.NO_SPACE, got.causes.get(at, ""))
        unused = dict(extents)
        try:
            self._write(extents, unused)
        finally:
            # Whatever was not published stays held by this store and serves the next put.
            self.core.arena.give(list(unused.values()))

    def _write(self, extents: dict[int, Extent], unused: dict[int, Extent]) -> None:
        core, job = self.core, self.job
        seeds = {i: keys.seed(self.packed[i]) for i in extents} if core.options.checksum else None
        work = Storing(job.memory, core.bounce, job.check, seeds)
        places = {i: address for i, (address, _) in extents.items()}
        groups = group(places, job.memory, core.slabs, core.options, core.engine.group_bytes)
        errors = core.engine.run(job.batch.op, groups, work)
        self._settle_failed(groups, errors)
        written = [i for i in places if i in work.moved]
        if not written:
            return
        if core.options.durability != "none":
            core.slabs.sync(g.slab for g in groups)
        if job.stop_reason() is Status.TIMEOUT:
            # Nobody waits any more; the space is reused.
            job.settle_rest(Status.TIMEOUT, "the deadline passed before it was published")
            return
        self._publish(written, extents, work.checksums)
        for i in written:
            del unused[i]
        job.settle_ok(written)
        core.count("put.written", len(written))
        core.count("put.bytes", int(job.memory.sizes[written].sum()))

    def _settle_failed(self, groups: list[Group], errors: list[Exception | None]) -> None:
        for one, error in zip(groups, errors, strict=True):
            if error is None:
                continue
            if isinstance(error, Stopped):
                status, cause = error.status, ""
            else:
                ours = translate(error, f"write {one.nbytes} B to slab {one.slab}")
                status, cause = status_of(ours), str(ours)
            for i in one.objects:
                self.job.settle(i, status, cause)

    def _publish(
        self, written: list[int], extents: dict[int, Extent], sums: dict[int, int]
    ) -> None:
        packed = [self.packed[i] for i in written]
        held = [extents[i] for i in written]
        entries = np.zeros(len(written), dtype=codec.DTYPE)
        entries["address"] = [address for address, _ in held]
        entries["nbytes"] = self.job.memory.sizes[written]
        entries["checksum"] = [sums.get(i, 0) for i in written]
        entries["identity"] = [keys.identity(key) for key in packed]
        entries["expiry"], entries["flags"] = self.expiry, self.flags
        self.core.visited.forget(entries["address"])
        space = joined(held, self.core.slabs.slab_bytes)

        def change(session: Session) -> None:
            index = self.core.index(session)
            for address, nbytes in space:
                index.unhold(self.core.owner, address, nbytes)
            index.publish(packed, entries)

        self.core.env.write(change)
