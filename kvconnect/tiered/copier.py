"""`Copier`: moves objects from the first tier to the others through a buffer of its own."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Batch, Op, Status
from kvconnect.tiered.arena import Arena, packed, padded
from kvconnect.tiered.late import Late
from kvconnect.tiered.ledger import Ledger
from kvconnect.tiered.options import TieredOptions
from kvconnect.tiered.tier import Flight, Tier
from kvconnect.transfers import select


class Fate(enum.Enum):
    """What became of a key in the queue."""

    COPIED = "copied"
    DROPPED = "dropped"
    """The first tier does not have it any more."""
    FAILED = "failed"
    BUSY = "busy"
    """Not tried: the key changes, or a tier is not to be asked now."""


class Copier:
    """Copies groups of keys, one group at a time.

    Invariant: while a key is copied nobody changes it, and a piece of the buffer is given back
    only when both tiers have let go of it.
    """

    def __init__(
        self, tiers: Sequence[Tier], arena: Arena | None, ledger: Ledger, late: Late,
        options: TieredOptions,
    ) -> None:  # fmt: skip
        """`arena` None takes nothing."""
        self._first, self._others = tiers[0], tiers[1:]
        self._arena, self._ledger, self._late = arena, ledger, late
        self._timeout = options.timeout / 2

    def takes(self, nbytes: int) -> int:
        """Return what an object of `nbytes` takes in the buffer."""
        return int(padded(np.array([nbytes], dtype=np.uint64))[0])

    def fits(self, nbytes: int) -> bool:
        """Tell whether so much can go through the buffer at once."""
        return self._arena is not None and nbytes <= self._arena.nbytes

    def copy(
        self,
        keys: Sequence[str],
        sizes: NDArray[np.uint64],
        ttl: float | None,
        *,
        pin: bool,
        current: Callable[[int], bool],
    ) -> list[Fate]:
        """Copy keys; `current(i)` tells, once key i is held, whether it still is to be copied."""
        fates = np.full(len(keys), Fate.BUSY, dtype=object)
        dead = any(tier.circuit.is_open and not tier.circuit.due for tier in self._others)
        piece = None if dead else self._take(sizes)
        if self._arena is None or piece is None:
            return list(fates)
        mine = self._hold(keys, current)
        names = [keys[i] for i in mine.tolist()]
        flights = self._move(names, sizes[mine], piece, ttl, pin=pin, fates=fates, index=mine)
        moving = [flight.transfer for flight in flights if flight.transfer is not None]
        arena, taken = self._arena, piece

        def finish() -> None:
            arena.give(taken)
            self._ledger.end_copy(names)

        self._late.after(moving, finish)
        return list(fates)

    def lapse(self, keys: Sequence[str], current: Callable[[int], bool]) -> list[Fate]:
        """Drop keys whose object ran out before it was copied: the others have an older one."""
        fates = np.full(len(keys), Fate.BUSY, dtype=object)
        mine = self._hold(keys, current)
        names = [keys[i] for i in mine.tolist()]
        if names:
            self._outdate(names)
            self._ledger.end_copy(names)
        fates[mine] = Fate.DROPPED
        return list(fates)

    def _hold(self, keys: Sequence[str], current: Callable[[int], bool]) -> NDArray[np.intp]:
        """Keep changes off the keys that nobody changes and that are `current`; which they are."""
        mine = np.flatnonzero(self._ledger.begin_copy(keys))
        valid = np.array([current(i) for i in mine.tolist()], dtype=np.bool_)
        self._ledger.end_copy([keys[i] for i in mine[~valid].tolist()])
        return mine[valid]

    def _take(self, sizes: NDArray[np.uint64]) -> tuple[int, int] | None:
        return None if self._arena is None else self._arena.take(int(padded(sizes).sum()))

    def _move(
        self, names: list[str], sizes: NDArray[np.uint64], piece: tuple[int, int],
        ttl: float | None, *, pin: bool, fates: NDArray[np.object_], index: NDArray[np.intp],
    ) -> list[Flight]:  # fmt: skip
        """Read from the first tier, which checks the bytes, and store what came."""
        if not names:
            return []
        reading = self._first.start(packed(Op.LOAD, names, sizes, piece[0]))
        loaded = reading.collect(time.monotonic() + self._timeout)
        if not reading.asked:
            return []
        good = loaded.status == Status.OK
        gone = ~np.isin(loaded.status, (Status.OK, Status.BACKEND_ERROR, Status.TIMEOUT))
        fates[index] = Fate.FAILED
        fates[index[gone]] = Fate.DROPPED
        if not good.all():
            self._outdate([names[i] for i in np.flatnonzero(~good).tolist()])
        if not reading.quiet() or not good.any():
            return [reading]
        whole = packed(Op.STORE, names, sizes, piece[0], ttl, pin=pin)
        return [reading, *self._store(select(whole, np.flatnonzero(good)), fates, index[good])]

    def _store(
        self, batch: Batch, fates: NDArray[np.object_], index: NDArray[np.intp]
    ) -> list[Flight]:
        flights = [(tier, tier.start(batch)) for tier in self._others]
        until = time.monotonic() + self._timeout
        everywhere = np.ones(len(batch), dtype=np.bool_)
        asked = True
        for tier, flight in flights:
            stored = flight.collect(until).status == Status.OK
            # During an outage the queue keeps what it has; tries are for single keys.
            asked &= flight.asked and not tier.circuit.is_open
            everywhere &= stored
            tier.has(batch.keys[i] for i in np.flatnonzero(stored).tolist())
            if flight.asked and not stored.all():
                tier.outdate([batch.keys[i] for i in np.flatnonzero(~stored).tolist()])
        fates[index] = Fate.FAILED if asked else Fate.BUSY
        fates[index[everywhere]] = Fate.COPIED
        return [flight for _, flight in flights]

    def _outdate(self, names: list[str]) -> None:
        """Keep back what the others have under these keys: it is older than what was stored."""
        for tier in self._others:
            tier.outdate(names)
