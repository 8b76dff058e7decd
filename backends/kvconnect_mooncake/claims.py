"""Who stores what in this process: one put of a key is open here at a time.

Mooncake keeps puts by key and process: a second one of the same key would end the first.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable, Sequence


class Claim(enum.Enum):
    """What became of a wish to store a key.

    MINE: nobody had it. BUSY: another put here has it and will end soon. STUCK: another put has
    it, and the library does not let go of it; that takes up to minutes.
    """

    MINE = enum.auto()
    BUSY = enum.auto()
    STUCK = enum.auto()


class Claims:
    """Names that puts of this process have; thread-safe."""

    def __init__(self) -> None:
        """Nobody stores anything."""
        self._held: dict[str, Claim] = {}
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        """Names that somebody has."""
        return len(self._held)

    def take(self, names: Sequence[str]) -> list[Claim]:
        """Claim names; what is MINE is the caller's until `give`."""
        with self._lock:
            told = [self._held.get(name, Claim.MINE) for name in names]
            self._held.update((n, Claim.BUSY) for n, t in zip(names, told, strict=True)
                              if t is Claim.MINE)  # fmt: skip
        return told

    def stick(self, names: Iterable[str]) -> None:
        """Note that the library does not let go of claimed names."""
        with self._lock:
            self._held.update((name, Claim.STUCK) for name in names if name in self._held)

    def give(self, names: Iterable[str]) -> None:
        """Give names back; of names that nobody has, nothing."""
        with self._lock:
            for name in names:
                self._held.pop(name, None)
