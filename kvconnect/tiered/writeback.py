"""`WriteBack`: keys of the first tier that the others are still to get.

The queue holds keys, not bytes: they are read back from the first tier into a registered
buffer, so that neither the caller's memory nor unbounded memory is held. What is lost in a
crash is a copy. A key that is stored anew or removed leaves the queue first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvconnect.errors import TransferTimeoutError
from kvconnect.tiered.copier import Copier, Fate
from kvconnect.tiered.options import TieredOptions
from kvconnect.tiered.tier import Tier

log = logging.getLogger("kvconnect.tiered")

PAUSE = 0.05
"""Seconds before a key is tried again whose tier could not be asked."""

TRIES = 3


@dataclass(slots=True, eq=False)
class Entry:
    """A key in the queue; `expires` is monotonic seconds, None for never."""

    key: str
    nbytes: int
    expires: float | None
    pin: bool
    tries: int = 0


class WriteBack:
    """The queue and its thread.

    Invariants: entries and their bytes never exceed their options; a key is pending until it
    is copied, given up or changed; the thread lives while the queue is not empty.
    """

    def __init__(self, tiers: Sequence[Tier], copier: Copier, options: TieredOptions) -> None:
        """Copy from the first of `tiers` to all others."""
        self._others, self._copier, self._options = tiers[1:], copier, options
        self._changed = threading.Condition()
        self._entries: dict[str, Entry] = {}
        self._order: deque[Entry] = deque()
        self._nbytes = 0
        self._running = self._closed = self._stop = False
        self.counts: Counter[str] = Counter(
            dict.fromkeys(("queued", "copied", "dropped", "failed", "refused", "superseded"), 0)
        )

    @property
    def entries(self) -> int:
        """Keys waiting or being copied."""
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return self._nbytes

    def pending(self, keys: Sequence[str]) -> NDArray[np.bool_]:
        """Tell which keys the other tiers do not have yet: (keys,) bool."""
        if not self._entries:
            return np.zeros(len(keys), dtype=np.bool_)
        with self._changed:
            return np.array([key in self._entries for key in keys], dtype=np.bool_)

    def offer(
        self, keys: Sequence[str], sizes: Sequence[int], ttl: float | None, *, pin: bool
    ) -> NDArray[np.bool_]:
        """Queue keys that the first tier has; False for those without room: (keys,) bool."""
        expires = None if ttl is None else time.monotonic() + ttl
        taken = np.zeros(len(keys), dtype=np.bool_)
        with self._changed:
            for at, (key, nbytes) in enumerate(zip(keys, sizes, strict=True)):
                if self._room(nbytes):
                    entry = self._entries[key] = Entry(key, nbytes, expires, pin)
                    self._order.append(entry)
                    self._nbytes += nbytes
                    taken[at] = True
            good = int(taken.sum())
            self.counts["queued"] += good
            self.counts["refused"] += len(keys) - good
            if good and not self._running:
                self._running = True
                threading.Thread(target=self._run, name="tiered-write-back", daemon=True).start()
        return taken

    def _room(self, nbytes: int) -> bool:
        options = self._options
        return (
            not self._closed
            and len(self._order) < options.queue_entries
            and len(self._entries) < options.queue_entries
            and self._nbytes + nbytes <= options.queue_bytes
            and self._copier.fits(nbytes)
        )

    def discard(self, keys: Sequence[str]) -> None:
        """Forget keys that change; the ledger keeps copies under way off them."""
        with self._changed:
            for key in keys:
                if key in self._entries:
                    self._drop(self._entries[key], "superseded")

    def discard_prefix(self, prefix: str) -> None:
        """Forget every key that begins with `prefix`."""
        with self._changed:
            for key in [key for key in self._entries if key.startswith(prefix)]:
                self._drop(self._entries[key], "superseded")

    def _drop(self, entry: Entry, why: str) -> None:
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
            self._nbytes -= entry.nbytes
            self.counts[why] += 1
            self._changed.notify_all()

    def _current(self, entry: Entry) -> bool:
        with self._changed:
            return self._entries.get(entry.key) is entry

    def _run(self) -> None:
        while group := self._next():
            again = self._copy(group)
            with self._changed:
                self._order.extend(again)
                if again:
                    self._changed.wait_for(lambda: self._stop, PAUSE)

    def _next(self) -> list[Entry]:
        """Take entries with one TTL and pin that fit the buffer; empty ends the thread."""
        group: list[Entry] = []
        room = 0
        with self._changed:
            while self._order and not self._stop:
                entry = self._order[0]
                if self._entries.get(entry.key) is not entry:
                    self._order.popleft()
                    continue
                room += self._copier.takes(entry.nbytes)
                first = group[0] if group else entry
                same = (entry.expires, entry.pin) == (first.expires, first.pin)
                if group and not (same and self._copier.fits(room)):
                    break
                group.append(self._order.popleft())
            self._running = bool(group)
            if not group:
                self._changed.notify_all()
        return group

    def _copy(self, group: list[Entry]) -> list[Entry]:
        """Copy a group; return what is to be tried again."""
        left = None if group[0].expires is None else group[0].expires - time.monotonic()
        names = [entry.key for entry in group]

        def current(index: int) -> bool:
            return self._current(group[index])

        if left is not None and left <= 0:
            fates = self._copier.lapse(names, current)
        else:
            sizes = np.array([entry.nbytes for entry in group], dtype=np.uint64)
            fates = self._copier.copy(names, sizes, left, pin=group[0].pin, current=current)
        pairs = zip(group, fates, strict=True)
        return [entry for entry, fate in pairs if self._settle(entry, fate)]

    def _settle(self, entry: Entry, fate: Fate) -> bool:
        """Note what became of an entry; True if it is to be tried again."""
        if fate is Fate.FAILED:
            entry.tries += 1
            if entry.tries < TRIES:
                return True
        with self._changed:
            if fate is Fate.BUSY:
                return self._entries.get(entry.key) is entry
            self._drop(entry, fate.value)
        return False

    def flush(self, timeout: float) -> bool:
        """Wait until the other tiers have all that is queued; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._entries, timeout)

    def close(self, timeout: float) -> None:
        """Copy what is queued for at most `timeout` seconds, then stop."""
        with self._changed:
            self._closed = True
        until = time.monotonic() + timeout
        while not self.flush(min(PAUSE, max(until - time.monotonic(), 0))):
            dead = all(tier.circuit.is_open for tier in self._others)
            if dead or time.monotonic() >= until:
                break
        with self._changed:
            self._stop = True
            self._changed.notify_all()
            ended = self._changed.wait_for(lambda: not self._running, self._options.timeout + 1)
            lost = len(self._entries)
            for entry in list(self._entries.values()):
                self._drop(entry, "dropped")
        if lost:
            log.warning("tiered: closed with %d keys that only the first tier has", lost)
        if not ended:
            raise TransferTimeoutError("tiered: a write-back is under way; close again later")
