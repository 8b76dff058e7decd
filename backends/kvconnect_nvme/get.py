"""Loading a batch: look up, read, verify, and look again.

Another process may evict an object and reuse its space while it is being read. Readers take no
lock against that: they look afterwards whether the entry is still the one they read from, as
with a seqlock, and call it a miss if it is not.
"""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass, field

from kvconnect.backend import Status
from kvconnect_nvme import entry as codec
from kvconnect_nvme import keys
from kvconnect_nvme.core import Core, Job
from kvconnect_nvme.engine import Group
from kvconnect_nvme.entry import Entry
from kvconnect_nvme.foreign import status_of, translate
from kvconnect_nvme.grouping import group
from kvconnect_nvme.recall import Object, contradicted
from kvconnect_nvme.tables import Session
from kvconnect_nvme.work import Loading, Stopped

log = logging.getLogger("kvconnect.nvme")


def load(core: Core, job: Job) -> None:
    """Load a batch; every key is settled on return."""
    _Get(core, job).run()


@dataclass(slots=True)
class _Get:
    core: Core
    job: Job
    found: dict[int, Entry] = field(default_factory=dict)
    damaged: list[int] = field(default_factory=list)
    missed: list[int] = field(default_factory=list)
    txn: int = 0

    @property
    def packed(self) -> list[bytes]:
        return self.job.packed

    def run(self) -> None:
        self._look_up()
        work = self._loading()
        failed = self._read(work)
        gone = self._vanished()
        self._heal([i for i in work.bad | _unreadable(failed) if i not in gone])
        now, good = codec.now_ms(), list[int]()
        for i, entry in self.found.items():
            status, cause = self._judge(i, entry, work, failed, gone, now)
            if status is Status.OK:
                good.append(i)
            else:
                self.job.settle(i, status, cause, dirty=i in work.dirty)
        self.job.settle_ok(good)
        self.core.mark([self.found[i].address for i in good])
        self.core.count("get.read", len(good))
        self.core.count("get.bytes", int(self.job.memory.sizes[good].sum()))

    def _look_up(self) -> None:
        with self.core.env.read() as session:
            self.txn = int(session.txn.id())
            raws = self.core.index(session).raw(self.packed)
        now, sizes = codec.now_ms(), self.job.memory.sizes.tolist()
        for i, (raw, nbytes) in enumerate(zip(raws, sizes, strict=True)):
            if raw is None:
                self.missed.append(i)
                self.job.settle(i, Status.ABSENT)
                continue
            entry = codec.unpack(self.packed[i], raw)
            if entry is None:
                self._damaged(i, raw)
            elif entry.identity != keys.identity(self.packed[i]):
                self.damaged.append(i)
                self.job.settle(i, Status.IDENTITY, "the entry was made for another key; dropped")
            elif entry.expired(now):
                self.job.settle(i, Status.ABSENT, "expired")
            elif entry.nbytes != nbytes:
                self.missed.append(i)
                cause = f"{entry.nbytes} B stored, {nbytes} B asked for"
                self.job.settle(i, Status.SIZE_MISMATCH, cause)
            else:
                self.found[i] = entry

    def _damaged(self, index: int, raw: bytes) -> None:
        self.damaged.append(index)
        other = codec.misplaced(self.packed[index], raw)
        status = Status.IDENTITY if other else Status.CHECKSUM
        self.job.settle(index, status, "its entry in the index is damaged; dropped")

    def _loading(self) -> Loading:
        verify = self.core.options.checksum
        expected = {
            i: (keys.seed(self.packed[i]), entry.checksum)
            for i, entry in self.found.items()
            if verify and entry.flags & codec.HASHED
        }
        return Loading(self.job.memory, self.core.bounce, self.job.check, expected)

    def _read(self, work: Loading) -> dict[int, Exception]:
        places = {i: entry.address for i, entry in self.found.items()}
        failed = self._run(places, work)
        again = {i: places[i] for i, error in failed.items() if isinstance(error, OSError)}
        # One bad sector fails its whole group; alone, the others come through. What is alone
        # already gets its second chance too, as it is dropped if it fails twice.
        for i, place in again.items():
            del failed[i]
            failed |= self._run({i: place}, work)
        return failed

    def _run(self, places: dict[int, int], work: Loading) -> dict[int, Exception]:
        core, job = self.core, self.job
        try:
            groups = group(places, job.memory, core.slabs, core.options, core.engine.group_bytes)
        except Exception as error:  # noqa: BLE001 - a slab that cannot be opened is data too
            return dict.fromkeys(places, error)
        errors = core.engine.run(job.batch.op, groups, work)
        return _by_object(groups, errors)

    def _vanished(self) -> set[int]:
        """Return the objects whose space was given to others while it was read."""
        if self.core.env.last_txn() == self.txn:
            return set()
        order = list(self.found)
        with self.core.env.read() as session:
            raws = self.core.index(session).raw([self.packed[i] for i in order])
        return {i for i, raw in zip(order, raws, strict=True) if not self._still(i, raw)}

    def _still(self, index: int, raw: bytes | None) -> bool:
        now = None if raw is None else codec.unpack(self.packed[index], raw)
        was = self.found[index]
        return now is not None and (now.seq, now.address) == (was.seq, was.address)

    def _heal(self, bad: list[int]) -> None:
        """Drop what can never be read again, so that the next store of it repairs it."""
        phantoms = contradicted(self.core, {self._asked(i): None for i in self.missed})
        if not bad and not self.damaged and not phantoms:
            return

        def drop(session: Session) -> None:
            index = self.core.index(session)
            for i in bad:
                session.counters.healed += index.delete(self.packed[i], self.found[i].seq)
            for i in self.damaged:
                index.delete_damaged(self.packed[i])
                index.recall(*self._asked(i))
            for key, nbytes in phantoms:
                index.recall(key, nbytes)

        try:
            self.core.env.write(drop)
        except Exception as error:  # noqa: BLE001 - the miss is reported all the same
            log.warning("nvme: %d damaged objects could not be dropped: %s", len(bad), error)

    def _asked(self, index: int) -> Object:
        return self.packed[index], int(self.job.memory.sizes[index])

    def _judge(
        self,
        index: int,
        entry: Entry,
        work: Loading,
        failed: dict[int, Exception],
        gone: set[int],
        now: int,
    ) -> tuple[Status, str]:
        error = failed.get(index)
        if isinstance(error, Stopped):
            return error.status, ""
        if index in gone:
            return Status.ABSENT, "evicted while it was being read"
        if error is not None:
            ours = translate(error, f"read {entry.nbytes} B at {entry.address}")
            status = status_of(ours)
            return Status.BACKEND_ERROR if status is Status.NO_SPACE else status, str(ours)
        if index in work.bad:
            return Status.CHECKSUM, f"{entry.nbytes} B are not what was stored; dropped"
        if entry.expired(now):
            return Status.LEASE_EXPIRED, "expired while it was being read"
        return Status.OK, ""


def _unreadable(failed: dict[int, Exception]) -> set[int]:
    # Kept, they would be taken by a store of the same bytes for stored already. Other errors
    # (no descriptors, no memory) say nothing about the object.
    errors = {i: error for i, error in failed.items() if isinstance(error, OSError)}
    return {i for i, error in errors.items() if error.errno == errno.EIO}


def _by_object(groups: list[Group], errors: list[Exception | None]) -> dict[int, Exception]:
    return {
        i: error
        for one, error in zip(groups, errors, strict=True)
        if error is not None
        for i in one.objects
    }
