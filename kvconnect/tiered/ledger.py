"""`Ledger`: which keys are being written or copied, so that no copy undoes a later change.

Why it exists: promotion and write-back move bytes that were read some time ago. A key that was
stored anew or removed in between must not get them back. Changes of one key also happen one
after another, so that all tiers end with the same bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

STRIPES = 1 << 14
"""Version counters; keys share them, and a shared one only costs a copy that was not needed."""


class Ledger:
    """Changes and copies under way.

    Invariants: a key is changed by one caller at a time, and never while it is copied; a
    version taken before a change is not valid after it, nor is one taken during it.
    """

    def __init__(self) -> None:
        """Start with nothing under way."""
        self._changed = threading.Condition()
        self._versions = np.zeros(STRIPES, dtype=np.uint64)
        self._writing: set[str] = set()
        self._copying: set[str] = set()
        self._clearing: list[str] = []

    def versions(self, keys: Sequence[str]) -> NDArray[np.uint64]:
        """Return the keys' versions: (keys,) uint64."""
        with self._changed:
            return self._versions[_stripes(keys)]

    def same(self, keys: Sequence[str], before: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Tell which keys have not changed since: (keys,) bool."""
        return np.asarray(self.versions(keys) == before)

    def begin_change(
        self, keys: Sequence[str], until: float, stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """Take all keys for a change; False if one was not free by `until` (monotonic)."""
        mine = set(keys)
        with self._changed:
            while not self._free(mine):
                left = until - time.monotonic()
                if left <= 0 or stop():
                    return False
                self._changed.wait(min(left, 0.05))
            self._writing |= mine
            self._versions[_stripes(keys)] += np.uint64(1)
            return True

    def end_change(self, keys: Sequence[str]) -> None:
        """Give the keys back; versions taken meanwhile are not valid any more."""
        with self._changed:
            self._writing.difference_update(keys)
            self._versions[_stripes(keys)] += np.uint64(1)
            self._changed.notify_all()

    def begin_clear(self, prefix: str, until: float) -> bool:
        """Keep copies and changes off a whole prefix; False if some were not over by `until`."""
        with self._changed:
            self._clearing.append(prefix)
            while any(key.startswith(prefix) for key in self._writing | self._copying):
                left = until - time.monotonic()
                if left <= 0:
                    self._clearing.remove(prefix)
                    self._changed.notify_all()
                    return False
                self._changed.wait(left)
            return True

    def end_clear(self, prefix: str) -> None:
        """Let the prefix go; every version is new, as any key may have been dropped."""
        with self._changed:
            self._clearing.remove(prefix)
            self._versions += np.uint64(1)
            self._changed.notify_all()

    def begin_copy(self, keys: Sequence[str]) -> NDArray[np.bool_]:
        """Take the keys that nobody changes or copies; what the caller knew is checked after."""
        with self._changed:
            free = [self._free({key}) for key in keys]
            self._copying.update(key for key, one in zip(keys, free, strict=True) if one)
        return np.array(free, dtype=np.bool_)

    def end_copy(self, keys: Sequence[str]) -> None:
        """Give copied keys back."""
        with self._changed:
            self._copying.difference_update(keys)
            self._changed.notify_all()

    def _free(self, keys: set[str]) -> bool:
        if not (self._writing.isdisjoint(keys) and self._copying.isdisjoint(keys)):
            return False
        return not self._clearing or not any(key.startswith(tuple(self._clearing)) for key in keys)


def _stripes(keys: Sequence[str]) -> NDArray[np.intp]:
    return np.fromiter((hash(key) % STRIPES for key in keys), dtype=np.intp, count=len(keys))
