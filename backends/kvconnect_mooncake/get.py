"""Loading a chunk: look up, read what has exactly the right size, verify.

What is poisoned (its trailer or checksum disagrees) is removed, so that the next store of the
same key heals it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvconnect.backend import Status
from kvconnect.errors import BackendError
from kvconnect_mooncake import rows, slots, trailer
from kvconnect_mooncake.client import Found
from kvconnect_mooncake.core import Core, Entry
from kvconnect_mooncake.foreign import NOT_MADE, SETTLED, status_of, words
from kvconnect_mooncake.hold import Hold
from kvconnect_mooncake.job import Chunk


def load(core: Core, chunk: Chunk) -> Hold | None:
    """Load a chunk; every object is settled on return. A `Hold` says what is not quiet yet."""
    return _Get(core, chunk).run()


@dataclass(slots=True)
class _Get:
    core: Core
    chunk: Chunk
    live: list[int] = field(default_factory=list)
    owners: dict[int, tuple[str, ...]] = field(default_factory=dict)
    tails: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    took: float = 0.0

    def run(self) -> Hold | None:
        found = self.core.client.find(self.chunk.names)
        seen = time.monotonic()
        for at, name in enumerate(self.chunk.names):
            self._judge_size(at, found.get(name))
        if not self.live or not self._take_slots():
            return None
        try:
            codes = self._read()
        except BaseException:
            self.core.slots.give(self.slots)
            raise
        late = time.monotonic() - seen > self.core.options.lease
        bad = [n for n, code in enumerate(codes) if self._settle(n, code, late=late)]
        self._heal(bad)
        return self._hold(codes)

    def _judge_size(self, at: int, one: Found | None) -> None:
        chunk, want = self.chunk, self.chunk.nbytes[at]
        plain = trailer.PLAIN if self.core.options.checksum else 0
        expiring = trailer.EXPIRING if self.core.options.checksum else 0
        if one is None:
            chunk.settle(at, Status.ABSENT)
        elif want < 1 or one.nbytes not in {want + plain, want + expiring}:
            cause = f"{max(one.nbytes - plain, 0)} B stored, {want} B asked for"
            chunk.settle(at, Status.SIZE_MISMATCH, cause)
        elif one.owners and not any(map(self.core.breakers.passes, set(one.owners))):
            cause = f"{' '.join(one.owners)} failed lately and is left alone for a while"
            chunk.settle(at, Status.BACKEND_ERROR, cause)
        else:
            self.live.append(at)
            self.owners[at] = one.owners
            self.tails.append(one.nbytes - want)

    def _take_slots(self) -> bool:
        if self.core.options.checksum:
            taken = self.core.slots.take(len(self.live), self.chunk.job.until)
            if taken is None:
                self.chunk.settle_rest(Status.TIMEOUT, "no slot of the side buffer was free")
                return False
            self.slots = taken
        return True

    def _read(self) -> list[int]:
        core, most = self.core, self.core.options.call_entries
        addresses, sizes = rows.with_slots(self.chunk, self.live, self.slots, self.tails)
        names = [self.chunk.names[at] for at in self.live]
        entries = min(sum(map(len, sizes)), most)
        owners = {owner for at in self.live for owner in self.owners[at]}
        nbytes = sum(map(sum, sizes))
        entry = Entry(entries, nbytes, self.chunk.job.until, owners)
        if len(sizes[0]) <= most:
            made = core.call(entry, lambda: core.client.get(names, addresses, sizes))
        else:
            made = core.call(entry, lambda: [self._read_long(names[0], addresses[0], sizes[0])])
        if made is None:
            return [NOT_MADE] * len(names)
        codes, self.took = made
        return codes

    def _read_long(self, name: str, addresses: list[int], sizes: list[int]) -> int:
        code = self.core.client.open_get(name)
        if code != 0:
            return code
        try:
            total = 0
            for part in rows.parts(addresses, sizes, self.core.options.call_entries):
                moved = self.core.client.get_part(name, part)
                if moved < 0:
                    return moved
                total += moved
        finally:
            self.core.client.close_get(name)
        return total

    def _settle(self, n: int, code: int, *, late: bool) -> bool:
        """Settle an object by its code; True if it is poisoned."""
        at = self.live[n]
        want, owners = self.chunk.nbytes[at] + self.tails[n], self.owners[at]
        if code == NOT_MADE:
            self.chunk.settle(at, Status.TIMEOUT, "no room for it in the library")
            return False
        if code != want:
            status = status_of(code) if code < 0 else Status.SIZE_MISMATCH
            cause = words(code) if code < 0 else f"{code} of {want} B came"
            self.chunk.settle(at, status, cause, dirty=True)
            if code not in SETTLED and code < 0 and len(owners) == 1:
                self.core.breakers.trip(owners[0])
            return False
        if len(owners) == 1:
            self.core.breakers.heal(owners[0])
        status, cause = self._verify(n, at)
        if status is Status.OK and late:
            status, cause = Status.LEASE_EXPIRED, f"took longer than {self.core.options.lease:g} s"
        self.chunk.settle(at, status, cause, dirty=status is not Status.OK)
        if status is Status.OK:
            self.core.count("get.read")
            self.core.count("get.bytes", self.chunk.nbytes[at])
        return status in {Status.CHECKSUM, Status.IDENTITY}

    def _verify(self, n: int, at: int) -> tuple[Status, str]:
        if not self.slots:
            return Status.OK, ""
        key, want = self.chunk.keys[at], self.chunk.nbytes[at]
        told = trailer.unpack(key, slots.read(self.slots[n], self.tails[n]))
        if isinstance(told, Status):
            return told, "its trailer is damaged or another key's; removed"
        if told.nbytes != want:
            return Status.SIZE_MISMATCH, f"{told.nbytes} B stored, {want} B asked for"
        if told.expired():
            return Status.ABSENT, "expired"
        if told.checksum != trailer.checksum(key, self.chunk.runs(at)):
            return Status.CHECKSUM, f"{want} B are not what was stored; removed"
        return Status.OK, ""

    def _heal(self, bad: list[int]) -> None:
        if not bad:
            return
        self.core.count("healed", len(bad))
        try:
            self.core.client.remove([self.chunk.names[self.live[n]] for n in bad], force=True)
        except BackendError:
            self.core.count("healed.failed", len(bad))

    def _hold(self, codes: list[int]) -> Hold | None:
        loose = [self.live[n] for n, c in enumerate(codes) if c < 0 and c not in SETTLED]
        if not loose:
            self.core.slots.give(self.slots)
            return None
        longest = max(len(sizes) + 1 for sizes in self.chunk.sizes)
        runs = [run for at in loose for run in self.chunk.runs(at)]
        return Hold(self.took, longest, self.slots, runs)
