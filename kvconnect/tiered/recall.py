"""`Recall`: a bounded memory of keys until a time: absent in a tier, or not to be believed."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class Recall:
    """Keys with a value (their size, where it matters), forgotten after `ttl` seconds.

    Invariant: never more than `most` keys; the oldest go first and are counted.
    """

    def __init__(self, ttl: float, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`ttl` math.inf keeps keys until forgotten; 0 keeps none."""
        self._ttl, self._most, self._clock = ttl, most, clock
        self._keys: dict[str, tuple[int, float]] = {}
        self._lock = threading.Lock()
        self.lost = 0

    def __len__(self) -> int:
        return len(self._keys)

    def note(self, keys: Iterable[str], values: Iterable[int] | None = None) -> None:
        """Remember keys, each with its value (0 by default)."""
        if not self._ttl:
            return
        until = math.inf if math.isinf(self._ttl) else self._clock() + self._ttl
        named = list(keys)
        numbers = [0] * len(named) if values is None else list(values)
        with self._lock:
            for key, value in zip(named, numbers, strict=True):
                self._keys.pop(key, None)
                self._keys[key] = (value, until)
            while len(self._keys) > self._most:
                del self._keys[next(iter(self._keys))]
                self.lost += 1

    def forget(self, keys: Iterable[str]) -> None:
        """Remember these keys no longer."""
        if self._keys:
            with self._lock:
                for key in keys:
                    self._keys.pop(key, None)

    def clear(self, prefix: str) -> None:
        """Forget every key that begins with `prefix`."""
        with self._lock:
            self._keys = {k: v for k, v in self._keys.items() if not k.startswith(prefix)}

    def knows(self, keys: Sequence[str], values: Sequence[int] | None = None) -> NDArray[np.bool_]:
        """Tell which keys (with exactly these values, if given) are remembered: (keys,) bool."""
        if not self._keys:
            return np.zeros(len(keys), dtype=np.bool_)
        now = self._clock()
        with self._lock:
            found = [self._keys.get(key, (-1, -math.inf)) for key in keys]
        live = np.array([until > now for _, until in found], dtype=np.bool_)
        if values is None or not live.any():
            return live
        # Compared as Python ints: a size that was asked for may be anything.
        same = [has == value for (has, _), value in zip(found, values, strict=True)]
        return np.asarray(live & np.array(same, dtype=np.bool_))
