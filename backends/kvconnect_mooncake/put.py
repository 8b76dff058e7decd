"""Storing a chunk: seal, begin, write, end; and what to do with a key that is taken.

A plain put answers success for a key that exists, without storing, and for one that another
writer has open. A put in three steps says so at its beginning: only bytes that this call wrote
or that it compared with its own are reported OK.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvconnect.backend import Status
from kvconnect_mooncake import rows, slots, trailer
from kvconnect_mooncake.breakers import STORES
from kvconnect_mooncake.claims import Claim
from kvconnect_mooncake.compare import Compared, compare
from kvconnect_mooncake.core import Core, Entry
from kvconnect_mooncake.foreign import NOT_MADE, SETTLED, Code, status_of, words
from kvconnect_mooncake.hold import Hold, give_up
from kvconnect_mooncake.job import Chunk
from kvconnect_mooncake.names import page_of
from kvconnect_mooncake.trailer import Trailer

BUSY_SECONDS = 40.0
"""How long another writer is waited for: the master discards an abandoned put after 30 s."""
FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.1


def pauses() -> Iterator[int]:
    """Count, with a pause before every number but the first, twice as long as the one before."""
    for number in itertools.count():
        yield number
        time.sleep(min(FIRST_PAUSE * 2**number, LONGEST_PAUSE))


def store(core: Core, chunk: Chunk) -> Hold | None:
    """Store a chunk; every object is settled on return. A `Hold` says what is not quiet yet."""
    return _Put(core, chunk).run()


@dataclass(slots=True)
class _Put:
    core: Core
    chunk: Chunk
    slots: list[int] = field(default_factory=list)
    sealed: list[Trailer] = field(default_factory=list)
    loose: list[str] = field(default_factory=list)
    took: float = 0.0
    space_until: float = 0.0
    busy_until: float = 0.0

    def run(self) -> Hold | None:
        chunk, core = self.chunk, self.core
        if not core.breakers.passes(STORES):
            chunk.settle_rest(Status.BACKEND_ERROR, "a store failed lately; tried again later")
            return None
        todo = [at for at in range(len(chunk.keys)) if self._has_bytes(at)]
        if not todo or not self._seal():
            return None
        now = time.monotonic()
        self.space_until = now + core.options.space_wait
        self.busy_until = now + BUSY_SECONDS
        try:
            self._rounds(self._tried(todo) if core.breakers.doubts(STORES) else todo)
        except Exception as error:
            if not self.loose:
                core.slots.give(self.slots)
                raise
            # What had failed before is still the library's, and is not forgotten for this.
            chunk.settle_rest(Status.BACKEND_ERROR, str(error), dirty=True)
        if not self.loose:
            core.slots.give(self.slots)
            return None
        longest = max(len(sizes) + 1 for sizes in chunk.sizes)
        return Hold(self.took, longest, self.slots, open_names=self.loose)

    def _tried(self, todo: list[int]) -> list[int]:
        """Store one object at first, after stores have failed; return the others if it went well.

        A call lasts as long as its slowest entry, and each entry to a dead owner takes seconds.
        """
        chunk, breakers = self.chunk, self.core.breakers
        for _ in pauses():
            again: list[int] = []
            for count, at in enumerate(todo, 1):
                again += self._round([at])
                if not breakers.doubts(STORES):
                    return again + todo[count:]
                if self.loose:
                    words = "a store failed lately, and the next one too"
                    chunk.settle_rest(Status.BACKEND_ERROR, words)
                    return []
                if (stop := chunk.job.stop_reason()) is not None:
                    chunk.settle_rest(stop, "")
                    again = []
                    break
            if not again:
                break
            todo = again
        # No byte was moved, as of keys that are there already: so the next one is the trial.
        breakers.hand_on(STORES)
        return []

    def _rounds(self, todo: list[int]) -> None:
        for _ in pauses():
            if not (todo := self._round(todo)):
                return
            if (stop := self.chunk.job.stop_reason()) is not None:
                self.chunk.settle_rest(stop, "")
                return

    def _has_bytes(self, at: int) -> bool:
        if self.chunk.nbytes[at] < 1:
            self.chunk.settle(at, Status.SIZE_MISMATCH, "0 B; an object has at least one byte")
            return False
        return True

    def _seal(self) -> bool:
        """Write the trailers; False, with all settled, where no slot is free in time."""
        if not self.core.options.checksum:
            return True
        chunk, batch = self.chunk, self.chunk.job.batch
        taken = self.core.slots.take(len(chunk.keys), chunk.job.until)
        if taken is None:
            chunk.settle_rest(Status.TIMEOUT, "no slot of the side buffer was free")
            return False
        self.slots = taken
        expires, flags = trailer.expiry(batch.ttl), trailer.PINNED if batch.pin else 0
        for at, key in enumerate(chunk.keys):
            total = trailer.checksum(key, chunk.runs(at))
            self.sealed.append(Trailer(chunk.nbytes[at], total, flags, expires))
            packed = trailer.pack(key, self.sealed[at], expiring=batch.ttl is not None)
            slots.write(taken[at], packed)
        return True

    def _round(self, todo: list[int]) -> list[int]:
        """Try to store objects; return those to try again."""
        chunk, core = self.chunk, self.core
        tail = trailer.nbytes_for(chunk.job.batch.ttl) if self.slots else 0
        mine, again = self._claim(todo)
        if not mine:
            return self._unless_late(again, "a store of it in this process is not quiet yet")
        try:
            codes = self._open(mine, tail)
        except BaseException:
            core.claims.give([chunk.names[at] for at in mine])
            raise
        by_code: dict[int, list[int]] = {}
        for at, code in zip(mine, codes, strict=True):
            by_code.setdefault(code, []).append(at)
        if stale := by_code.get(Code.REFUSED):
            # Nobody here has it open: a master that was lost left it open in the library. At
            # once, while it is ours: later the same call would end what another put here began.
            give_up(core, [chunk.names[at] for at in stale])
        for code in by_code.keys() - {0, Code.REFUSED}:
            core.claims.give([chunk.names[at] for at in by_code[code]])
        self._write(by_code.pop(0, []), tail)
        again += self._compare(by_code.pop(Code.EXISTS, []))
        limits: dict[int, float] = {
            Code.NO_SPACE: self.space_until,
            Code.QUOTA: self.space_until,
            Code.REFUSED: self.busy_until,
        }
        for code, some in by_code.items():
            if time.monotonic() < limits.get(code, 0):
                again += some
                continue
            for at in some:
                chunk.settle(at, status_of(code), words(code))
        return again

    def _open(self, mine: list[int], tail: int) -> list[int]:
        chunk, client = self.chunk, self.core.client
        groups = None
        if self.core.options.group == "page":
            groups = [page_of(chunk.keys[at]) for at in mine]
        config = client.config(pin=chunk.job.batch.pin, groups=groups)
        names = [chunk.names[at] for at in mine]
        return client.open_put(names, [chunk.nbytes[at] + tail for at in mine], config)

    def _claim(self, todo: list[int]) -> tuple[list[int], list[int]]:
        """Take objects that nobody in this process stores now; also return those to wait for."""
        told = self.core.claims.take([self.chunk.names[at] for at in todo])
        by_claim: dict[Claim, list[int]] = {claim: [] for claim in Claim}
        for at, claim in zip(todo, told, strict=True):
            by_claim[claim].append(at)
        for at in by_claim[Claim.STUCK]:
            # Not waited for: the other keys of the batch would wait as well.
            self.chunk.settle(at, Status.BACKEND_ERROR, "an earlier store of it is stuck")
        return by_claim[Claim.MINE], by_claim[Claim.BUSY]

    def _unless_late(self, again: list[int], cause: str) -> list[int]:
        """Return objects to try again; none, all settled, once they were waited for long enough."""
        if time.monotonic() < self.busy_until:
            return again
        for at in again:
            self.chunk.settle(at, Status.BACKEND_ERROR, cause)
        return []

    def _write(self, mine: list[int], tail: int) -> None:
        if not mine:
            return
        names = [self.chunk.names[at] for at in mine]
        try:
            codes = self._move(mine, tail)
        except BaseException:
            give_up(self.core, names)
            raise
        want = [self.chunk.nbytes[at] + tail for at in mine]
        good = [n for n in range(len(mine)) if codes[n] == want[n]]
        bad = [n for n in range(len(mine)) if codes[n] != want[n]]
        for n in bad:
            late = codes[n] == NOT_MADE
            cause = "no room for it in the library" if late else words(codes[n])
            self.chunk.settle(mine[n], Status.TIMEOUT if late else Status.BACKEND_ERROR, cause)
        self._leave([names[n] for n in bad if codes[n] in SETTLED], bad=False)
        self._leave([names[n] for n in bad if codes[n] not in SETTLED])
        if good:
            self._end([mine[n] for n in good], [names[n] for n in good], whole=not bad)

    def _leave(self, names: list[str], *, bad: bool = True) -> None:
        """Give puts up at once, or (bad) when the library has let go of their bytes."""
        if not names:
            return
        if bad:
            self.loose += names
            self.core.claims.stick(names)
            self.core.breakers.trip(STORES)
        else:
            give_up(self.core, names)

    def _end(self, good: list[int], names: list[str], *, whole: bool) -> None:
        core = self.core
        if whole:
            core.breakers.heal(STORES)
        try:
            codes = core.client.end_put(names)
        except BaseException:
            give_up(core, names)
            raise
        core.claims.give([name for name, code in zip(names, codes, strict=True) if code == 0])
        # A put that the master dropped stays open in the library.
        failed = [name for name, code in zip(names, codes, strict=True) if code != 0]
        if failed:
            give_up(core, failed)
        for at, code in zip(good, codes, strict=True):
            if code == 0:
                self.chunk.settle(at, Status.OK)
                core.count("put.written")
                core.count("put.bytes", self.chunk.nbytes[at])
            else:
                self.chunk.settle(at, Status.BACKEND_ERROR, words(code))

    def _move(self, mine: list[int], tail: int) -> list[int]:
        core, chunk, most = self.core, self.chunk, self.core.options.call_entries
        taken = [self.slots[at] for at in mine] if self.slots else []
        addresses, sizes = rows.with_slots(chunk, mine, taken, [tail] * len(mine))
        names = [chunk.names[at] for at in mine]
        entries = min(sum(map(len, sizes)), most)
        nbytes = sum(map(sum, sizes))
        entry = Entry(entries, nbytes, chunk.job.until, [STORES], names)
        if len(sizes[0]) <= most:
            begin = [rows.starts(one) for one in sizes]
            made = core.call(entry, lambda: core.client.put_runs(names, addresses, sizes, begin))
        else:
            made = core.call(entry, lambda: [self._move_long(names, addresses[0], sizes[0])])
        if made is None:
            return [NOT_MADE] * len(names)
        codes, took = made
        self.took = max(self.took, took)
        return codes

    def _move_long(self, name: list[str], addresses: list[int], sizes: list[int]) -> int:
        total = 0
        for part in rows.parts(addresses, sizes, self.core.options.call_entries):
            begin = rows.starts(part.sizes, part.offset)
            moved = self.core.client.put_runs(name, [part.addresses], [part.sizes], [begin])[0]
            if moved < 0:
                return moved
            total += moved
        return total

    def _compare(self, taken: list[int]) -> list[int]:
        """Settle objects that are there with the same bytes; remove others; return the rest."""
        if not taken:
            return []
        # Without trailers nothing proves what is there, and looking would lease it again.
        found = compare(self.core, self.chunk, taken, self.sealed) if self.slots else Compared()
        for at in found.same:
            self.chunk.settle(at, Status.OK)
            self.core.count("put.same")
        self._replace([at for at in taken if at not in found.same and at not in found.unread])
        again = [at for at in taken if at not in found.same]
        return self._unless_late(again, "leased to readers, or another writer has it open")

    def _replace(self, other: list[int]) -> None:
        """Remove objects with other bytes, so that the next round stores ours."""
        if other:
            names = [self.chunk.names[at] for at in other]
            # By force only where every reader verifies: it may be reading right now.
            self.core.client.remove(names, force=self.core.options.checksum)
