"""A negative cache: pages that vanished between exists and get stay absent for a while.

Some stores go on saying "exists" for seconds after an object is gone (a dead segment owner in
Mooncake, 8 to 13 s). Believing them again and again costs a failed load for each request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST = 1 << 16
"""Entries kept; beyond it the oldest go first."""


class NegativeCache:
    """Remembers page hashes for `ttl` seconds; thread-safe and bounded."""

    __slots__ = ("_clock", "_lock", "_seen", "_until", "ttl")

    def __init__(self, ttl: float, clock: Callable[[], float]) -> None:
        """Start empty; a `ttl` of 0 remembers nothing."""
        self.ttl = ttl
        self._clock = clock
        self._until: dict[bytes, float] = {}
        self._seen: dict[bytes, None] = {}
        self._lock = threading.Lock()

    def saw(self, hashes: Iterable[bytes]) -> None:
        """Note pages that the store says it has."""
        with self._lock:
            self._seen.update(dict.fromkeys(hashes))
            _bound(self._seen)

    def vanished(self, hashes: Iterable[bytes]) -> int:
        """Take those pages for absent that were seen and now are not; return how many.

        A page that was never seen is an ordinary miss: another rank may store it at any time,
        and must then be found at once.
        """
        until, count = self._clock() + self.ttl, 0
        with self._lock:
            for page_hash in hashes:
                if self._seen.pop(page_hash, 0) is None:
                    self._until.pop(page_hash, None)
                    self._until[page_hash] = until
                    count += 1
            _bound(self._until)
        return count

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Let pages exist again that were stored."""
        if not self._until:
            return
        with self._lock:
            for page_hash in hashes:
                self._until.pop(page_hash, None)

    def known(self, hashes: Sequence[bytes]) -> NDArray[np.bool_]:
        """Tell which pages are taken for absent: (pages,) bool."""
        if not self._until:
            return np.zeros(len(hashes), dtype=np.bool_)
        now = self._clock()
        with self._lock:
            found = [self._until.get(page_hash, now) > now for page_hash in hashes]
        return np.array(found, dtype=np.bool_)


def _bound(entries: dict[bytes, Any]) -> None:
    # All at once: each look for the oldest passes over what was deleted before it, which one by
    # one took 2 ms for 128 pages.
    for old in list(islice(entries, max(len(entries) - MOST, 0))):
        del entries[old]
