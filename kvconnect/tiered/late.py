"""`Late`: waits for transfers that missed their deadline, in one thread for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvconnect.backend import Transfer

LOOK = 0.005
"""Seconds between two looks: late transfers have cost far more already."""


class Late:
    """Calls back once a tier has let go of the memory.

    Invariant: the thread lives only while something is late.
    """

    def __init__(self) -> None:
        """Start with nothing late."""
        self._lock = threading.Lock()
        self._waiting: list[tuple[list[Transfer], Callable[[], None]]] = []
        self._running = False

    def __len__(self) -> int:
        return len(self._waiting)

    def after(self, transfers: Sequence[Transfer], then: Callable[[], None]) -> None:
        """Call `then` when all `transfers` are done: now, or from the thread."""
        rest = [one for one in transfers if not one.done()]
        if not rest:
            then()
            return
        with self._lock:
            self._waiting.append((rest, then))
            if not self._running:
                self._running = True
                threading.Thread(target=self._watch, name="tiered-late", daemon=True).start()

    def _watch(self) -> None:
        pause, going = threading.Event(), True
        while going:
            pause.wait(LOOK)
            with self._lock:
                looked = [(one, all(t.done() for t in one[0])) for one in self._waiting]
                self._waiting = [one for one, done in looked if not done]
                going = self._running = bool(self._waiting)
            for (_, then), done in looked:
                if done:
                    then()
