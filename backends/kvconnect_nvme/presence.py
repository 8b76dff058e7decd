"""Which objects are present, in one look: a hash set beside the index, shared by all processes.

LMDB's look-ups slow down with the depth of its tree; a look into the table does not. The
table only ever receives what is committed: a write transaction leaves its changes in the
index (`kvconnect_nvme.pending`), and the next one begins by applying them, which may be
repeated and so survives a kill half-way. A reader takes the table and puts the changes of its
own snapshot over it: it sees its snapshot or, for what changed meanwhile, something newer.
Why so: `docs/design/2026-12-02-presence.md`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvconnect_nvme.pending import NAME, Pending
from kvconnect_nvme.presence_file import PresenceFile, buckets_for, create, generations, remove
from kvconnect_nvme.tables import Session
from kvconnect_nvme.words import Words

log = logging.getLogger("kvconnect.nvme")


@dataclass(frozen=True, slots=True)
class View:
    """A table with the changes of a snapshot; it may be asked after the snapshot was closed."""

    file: PresenceFile
    pending: Pending

    def find(self, asked: Words) -> Words:
        """Return for each word the one of the same object that is there, or 0."""
        return self.pending.over(self.file.table.find(asked), asked)


class Presence:
    """The tables of one index folder, as one process uses them.

    Invariant: `_writing` and `_made` are the business of the holder of the writer lock.
    """

    def __init__(self, folder: str) -> None:
        """Nothing is opened before it is used."""
        self._folder = folder
        self._file: PresenceFile | None = None
        self._made: PresenceFile | None = None
        self._before = self._writing = Pending()
        self._tidy = False

    def view(self, session: Session) -> View | None:
        """Return what a read transaction may ask; None where only the index knows."""
        pending = Pending.unpack(session.meta(NAME))
        # Written by the very last commit, or somebody who knows no table has been here since.
        if not pending.live or pending.txn != session.txn.id():
            return None
        file = self._mapped(pending.generation)
        if file is None or not file.complete or file.stamp < pending.txn:
            return None
        return View(file, pending)

    def _mapped(self, generation: int) -> PresenceFile | None:
        file = self._file
        if file is not None and file.generation == generation:
            return file
        try:
            # Threads that come here at once each map it; one map stays, the others go.
            file = self._file = PresenceFile(self._folder, generation)
        except (OSError, ValueError):
            return None
        return file

    def begin(self, session: Session) -> None:
        """Bring the table up to date; first in every write transaction."""
        self._before = self._writing = pending = Pending.unpack(session.meta(NAME))
        self._made = None
        if not self._tidy:
            # What killed or aborted writers left. Nobody else is making any: we have the lock.
            numbers = set(generations(self._folder)) - {pending.generation * pending.live}
            remove(self._folder, numbers)
            self._tidy = True
        if not pending.live:
            return
        file, txn = self._mapped(pending.generation), session.txn.id()
        # Every commit stamps the table as it begins: the stamp is the last commit's, or ours
        # if we were here before and gave up. Another one means that the index was put back, or
        # written by somebody who knows no table.
        if file is None or pending.txn != txn - 1 or file.stamp not in {txn - 1, txn}:
            self._drop("not the table of this index")
            return
        file.table.remove(pending.gone)
        self._add(file, pending.there, txn)

    def _add(self, file: PresenceFile, there: Words, txn: int) -> PresenceFile | None:
        try:
            while not file.table.add(there):
                file = self._made = file.doubled(self._folder)
        except OSError as error:
            self._drop(f"could not grow: {error}")
            return None
        file.stamp = txn
        if file is self._made:
            self._writing = replace(self._writing, generation=file.generation)
        return file

    def _drop(self, why: str) -> None:
        log.warning(
            "nvme: presence table of %s dropped (%s); exists is slower until the next open or "
            "verify makes another",
            self._folder,
            why,
        )
        self._made = None
        self._writing = replace(self._writing, live=False)

    def end(self, session: Session) -> None:
        """Leave what the transaction changed to the next one; last before its commit."""
        if not self._writing.live:
            if self._before.live:
                session.set_meta(NAME, replace(self._writing, gone=_NO, there=_NO).pack())
            return
        gone, there = self._writing.changes(session.changed)
        txn = session.txn.id()
        after = replace(self._writing, txn=txn, gone=gone, there=there)
        session.set_meta(NAME, after.pack())

    def committed(self) -> None:
        """Use the table that was made, and drop those before it, now that all others do."""
        live, number = self._writing.live, self._writing.generation
        if self._made is not None or live < self._before.live:
            self._file, self._made = self._made, None
            remove(self._folder, [n for n in generations(self._folder) if n + live <= number])

    def current(self) -> PresenceFile | None:
        """Return the up-to-date table inside a write transaction, complete or not."""
        if not self._writing.live:
            return None
        return self._made or self._mapped(self._writing.generation)

    def start(self, session: Session) -> bool:
        """Begin an empty table, inside a write transaction; False if there is no room for it."""
        objects = session.txn.stat(session.tables.entries)["entries"]
        # Above every number that was used, also where the record was lost and the files are gone.
        used = [self._writing.generation, session.txn.id(), *generations(self._folder)]
        number = max(used) + 1
        try:
            made = create(self._folder, number, buckets_for(objects))
        except OSError as error:
            self._drop(f"could not be made: {error}")
            return False
        made.stamp = session.txn.id()
        made.advance(b"", complete=not objects)
        self._made = made
        self._writing = Pending(0, number, live=True, seed=secrets.randbits(64))
        return True

    def is_exact(self, session: Session) -> bool:
        """Tell, inside a write transaction, whether there are as many words as entries."""
        file = self.current()
        entries = session.txn.stat(session.tables.entries)["entries"]
        return file is not None and file.complete and file.table.count() == entries

    def extend(self, session: Session, words: Words) -> PresenceFile | None:
        """Add words of committed entries, inside a write transaction; None if dropped."""
        file = self.current()
        return None if file is None else self._add(file, words, session.txn.id())

    def words(self, packed: Sequence[bytes], nbytes: Sequence[int] | Words) -> Words:
        """Return words under the seed of the table inside a write transaction."""
        return self._writing.words(packed, nbytes)

    def state(self, session: Session) -> tuple[str, int]:
        """Return ("complete", "building" or "off", bytes of the file) in a read transaction."""
        pending = Pending.unpack(session.meta(NAME))
        file = self._mapped(pending.generation) if pending.live else None
        if file is None:
            return "off", 0
        return "complete" if self.view(session) is not None else "building", file.nbytes

    def close(self) -> None:
        """Let go of the map."""
        self._file = self._made = None


_NO = Pending().gone
