"""Log lines that do not flood: each kind at once, and then a count at most once a minute."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger("kvconnect.sglang")

EVERY = 60.0
"""Seconds between two lines of one kind."""


class Notices:
    """Warnings of one pool by kind; thread-safe."""

    __slots__ = ("_clock", "_label", "_lock", "_said")

    def __init__(self, label: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`label` begins every line."""
        self._label = label
        self._clock = clock
        self._said: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()

    def say(self, kind: str, text: str) -> None:
        """Log `text` as a warning, unless its `kind` was logged less than a minute ago."""
        now = self._clock()
        with self._lock:
            last, held_back = self._said.get(kind, (-EVERY, 0))
            if now - last < EVERY and kind in self._said:
                self._said[kind] = (last, held_back + 1)
                return
            self._said[kind] = (now, 0)
        more = f" ({held_back} more like it since)" if held_back else ""
        log.warning("kvconnect: %s: %s%s", self._label, text, more)
