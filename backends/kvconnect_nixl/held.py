"""What NIXL keeps for us until it is given back: registrations and prepared lists."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from kvconnect.backend import Closing


class Held(Closing):
    """A registration or prepared list; it closes with its agent at the latest.

    `handle`: NIXL's own. No transfer that uses it may be under way when it is closed.
    """

    def __init__(
        self, what: str, handle: Any, release: Callable[[Any], None], among: HeldSet
    ) -> None:
        """`release` gives `handle` back to NIXL; `what` is for messages."""
        self.what, self.handle = what, handle
        self._release, self._among = release, among
        among.add(self)

    def close(self) -> None:
        """Give it back to NIXL."""
        if self._among.take(self):
            # What releases holds the agent: whoever keeps this handle must not keep that alive.
            release, self._release = self._release, _released
            release(self.handle)

    def __repr__(self) -> str:
        return f"Held({self.what})"


def _released(_: Any) -> None:
    """Do nothing: it was given back."""


class HeldSet(Closing):
    """All that is held, so that nothing is given back twice and nothing stays behind."""

    def __init__(self) -> None:
        """Nothing is held yet."""
        self._held: dict[Held, None] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, one: Held) -> None:
        """Note what is held from now on."""
        with self._lock:
            self._held[one] = None

    def take(self, one: Held) -> bool:
        """Forget one; tell whether it was still held."""
        with self._lock:
            return self._held.pop(one, self) is None

    def close(self) -> None:
        """Give everything back, last first."""
        for one in reversed(list(self._held)):
            one.close()
