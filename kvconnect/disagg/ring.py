"""Staging memory of an endpoint: equal slots in one registered allocation.

A slot holds packed pieces on their way. On the prefill side a slot is filled from pages and
pushed; on the decode side a slot is lent to a prefill rank, filled by it, and emptied into
pages. Slots run out instead of memory: who finds none waits.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Closing
from kvconnect.errors import ConfigError
from kvconnect.hostmem import HostMemory
from kvconnect.region import Region

MAX_WANTS = 1 << 16
"""A job waits for three slots at most, so this is tens of thousands of jobs."""


class Ring(Closing):
    """`slots` slots of `slot_bytes` bytes; slots are numbers from 0."""

    def __init__(self, memory: HostMemory, slot_bytes: int) -> None:
        """Take over `memory`; `ConfigError` unless it holds two slots at least."""
        self.memory, self.slot_bytes = memory, slot_bytes
        self.slots = memory.nbytes // slot_bytes
        if self.slots < 2:
            memory.close()
            raise ConfigError(
                f"staging={memory.nbytes} B holds {self.slots} slots of {slot_bytes} B; it must "
                f"hold two: raise staging or lower slot"
            )
        self.region = Region("staging", memory.address, self.slots * slot_bytes)
        self._free = deque(range(self.slots))
        self._changed = threading.Condition()
        # An array holds on to the mapping, so memory stays mapped as long as somebody copies.
        self._bytes: NDArray[np.uint8] = np.ndarray(
            [self.region.nbytes], dtype=np.uint8, buffer=memory.keep_alive()
        )

    def address(self, slot: int) -> int:
        """Return where a slot begins."""
        return self.region.address + slot * self.slot_bytes

    def buffer(self, slot: int, nbytes: int) -> NDArray[np.uint8]:
        """Return the first `nbytes` bytes of a slot."""
        start = slot * self.slot_bytes
        return self._bytes[start : start + nbytes]

    def take(self, until: float, stop: threading.Event) -> int | None:
        """Wait for a slot until `until` (monotonic) or `stop`; None where there was none."""
        with self._changed:
            while not self._free:
                left = until - time.monotonic()
                if left <= 0 or stop.is_set():
                    return None
                self._changed.wait(min(left, 0.05))
            return self._free.popleft()

    def try_take(self) -> int | None:
        """Return a free slot, or None."""
        with self._changed:
            return self._free.popleft() if self._free else None

    def give(self, slot: int) -> None:
        """Return a slot that nothing touches any more."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify()

    @property
    def free(self) -> int:
        """Slots that nobody has."""
        with self._changed:
            return len(self._free)

    def close(self) -> None:
        """Let the memory go; the second call does nothing."""
        self.memory.close()


class Lender:
    """Decode side: which slots are with which prefill rank. Used in the channel's thread only.

    Requests for slots are served in turn, one slot each, so that no rank keeps others waiting.
    Slots of a rank that was lost come back only when it can no longer write to them.
    """

    def __init__(self, ring: Ring) -> None:
        """Start with all slots free."""
        self.ring = ring
        self._wants: deque[tuple[str, int]] = deque()
        self._lent: dict[str, dict[int, int]] = {}
        """By generation and slot, which lending it is: a slot goes out again and again."""
        self._asked: dict[str, tuple[int, dict[int, int]]] = {}
        self._numbers = itertools.count(1)

    def want(self, generation: str, claim: int, count: int) -> None:
        """Note that a rank could use `count` slots for one of its jobs.

        Raises `ConfigError` where more is waited for than any honest fleet would.
        """
        if len(self._wants) + count > MAX_WANTS:
            raise ConfigError(f"{len(self._wants)} slots are waited for, {count} more wanted")
        self._wants.extend([(generation, claim)] * count)

    def pump(self) -> list[tuple[str, int, int]]:
        """Lend what is free: (generation, claim, slot) each."""
        out = []
        while self._wants and (slot := self.ring.try_take()) is not None:
            generation, claim = self._wants.popleft()
            self._lent.setdefault(generation, {})[slot] = next(self._numbers)
            out.append((generation, claim, slot))
        return out

    def take_back(self, generation: str, slot: int) -> None:
        """Count a slot as no longer lent; `ConfigError` if it was not with that rank.

        It is not free yet: the caller gives it to the ring once it is emptied.
        """
        if slot not in self._lent.get(generation, ()):
            raise ConfigError(f"slot {slot} is not with this peer")
        del self._lent[generation][slot]

    def ask(self, generation: str) -> int:
        """Return the number of a question to a rank which slots it has.

        One that was not answered yet is asked again, so that slow answers settle something too.
        """
        if generation not in self._asked:
            lent = dict(self._lent.get(generation, {}))
            self._asked[generation] = next(self._numbers), lent
        return self._asked[generation][0]

    def settle(self, generation: str, number: int, slots: Iterable[int]) -> int:
        """Take back what a rank should have had when it was asked and does not have.

        Messages keep their order, so what it gave back or filled before is not lent any more.
        Returns how many slots were lost.
        """
        asked, had = self._asked.get(generation, (0, dict[int, int]()))
        if number != asked:
            return 0
        self._asked.pop(generation, None)
        now = self._lent.get(generation, {})
        lost = {slot for slot, which in had.items() if now.get(slot) == which}.difference(slots)
        for slot in lost:
            self.take_back(generation, slot)
            self.ring.give(slot)
        return len(lost)

    def forget(self, generation: str) -> None:
        """Drop what a lost rank wanted."""
        self._wants = deque(w for w in self._wants if w[0] != generation)

    def reclaim(self, generation: str) -> None:
        """Take back everything from a rank that can write no more."""
        self.forget(generation)
        self._asked.pop(generation, None)
        for slot in self._lent.pop(generation, ()):
            self.ring.give(slot)

    @property
    def lent(self) -> int:
        """Slots that are out."""
        return sum(len(slots) for slots in self._lent.values())
