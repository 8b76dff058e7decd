"""How many entries are inside the library at once, over all threads.

Mooncake over TCP queues 1024 transfers per peer for the whole process and fails what does not
get in within a second; one run is one entry.
"""

from __future__ import annotations

import threading
import time


class Budget:
    """A counting semaphore with deadlines. Invariant: 0 <= used <= total."""

    def __init__(self, total: int) -> None:
        """`total`: entries."""
        self.total, self.used = total, 0
        self._changed = threading.Condition()

    def take(self, count: int, until: float) -> bool:
        """Take `count` entries; False if they are not free by `until` (monotonic)."""
        with self._changed:
            left = max(until - time.monotonic(), 0)
            if not self._changed.wait_for(lambda: self.used + count <= self.total, left):
                return False
            self.used += count
            return True

    def give(self, count: int) -> None:
        """Give entries back that the library has let go of."""
        with self._changed:
            self.used -= count
            self._changed.notify_all()
