"""`Promoter`: keys that came from a slower tier are copied into the first, in the background.

The caller's memory is leased only until the load is done, so the bytes are copied into a
bounded buffer of the store's own before that: a copy at memory speed, where storing them from
the caller's memory would make each load as slow as a store. A full buffer skips the promotion;
a load never waits for one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Batch, Op, Status
from kvconnect.errors import TransferTimeoutError
from kvconnect.region import Region
from kvconnect.run_copy import copy_runs
from kvconnect.tiered.arena import Arena, packed, padded
from kvconnect.tiered.late import Late
from kvconnect.tiered.ledger import Ledger
from kvconnect.tiered.options import TieredOptions
from kvconnect.tiered.tier import Tier
from kvconnect.transfers import select


@dataclass(frozen=True, slots=True)
class _Copy:
    batch: Batch
    piece: tuple[int, int]
    versions: NDArray[np.uint64]
    heal: NDArray[np.bool_]


class Promoter:
    """Stores copies of objects into `target`, unless they have changed since."""

    def __init__(
        self,
        target: Tier,
        arena: Arena | None,
        ledger: Ledger,
        late: Late,
        options: TieredOptions,
        regions: Callable[[], Sequence[Region]],
    ) -> None:
        """`arena` None promotes nothing; `regions` gives what the caller has registered."""
        self._target, self._arena, self._ledger, self._late = target, arena, ledger, late
        self._options, self._regions = options, regions
        self._work: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False
        self.waiting = self.promoted = self.skipped = self.failed = 0

    def offer(self, batch: Batch, versions: NDArray[np.uint64], heal: NDArray[np.bool_]) -> None:
        """Copy what fits of a finished load (still leased to us) and store it later.

        `heal` marks keys whose object in the target is damaged.
        """
        taken = 0
        if self._arena is not None and not self._closed and not self._target.circuit.is_open:
            taken = self._take(self._arena, batch, versions, heal)
        with self._lock:
            self.skipped += len(batch) - taken

    def _take(
        self,
        arena: Arena,
        batch: Batch,
        versions: NDArray[np.uint64],
        heal: NDArray[np.bool_],
    ) -> int:
        regions = self._regions()
        if any(region.device != "cpu" for region in regions):
            return 0
        count, piece = len(batch), None
        ends = np.cumsum(padded(batch.object_nbytes()))
        while count and (piece := arena.take(int(ends[count - 1]))) is None:
            count //= 2
        if piece is None:
            return 0
        part = select(batch, np.arange(count, dtype=np.int64))
        ttl = self._options.promote_ttl
        copy = packed(Op.STORE, list(part.keys), part.object_nbytes(), piece[0], ttl)
        _gather(part, copy, regions, arena.region)
        with self._lock:
            if self._closed:
                arena.give(piece)
                return 0
            self.waiting += count
            self._work.put(_Copy(copy, piece, versions[:count], heal[:count]))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="tiered-promote", daemon=True
                )
                self._thread.start()
        return count

    def _run(self) -> None:
        # The one wait without a deadline; `close` puts the None.
        while (copy := self._work.get()) is not None:
            if self._closed:
                self._settle(copy, 0, 0)
            else:
                self._store(copy)

    def _store(self, copy: _Copy) -> None:
        keys = list(copy.batch.keys)
        free = self._ledger.begin_copy(keys)
        same = free & self._ledger.same(keys, copy.versions)
        self._ledger.end_copy([keys[i] for i in np.flatnonzero(free & ~same).tolist()])
        part = select(copy.batch, np.flatnonzero(same))
        if len(damaged := np.flatnonzero(same & copy.heal)):
            # Removed first: a store may take equal checksums for equal bytes.
            self._target.drop([keys[i] for i in damaged.tolist()])
        flight = self._target.start(part)
        outcome = flight.collect(time.monotonic() + self._options.timeout)
        good = np.flatnonzero(outcome.status == Status.OK).tolist()
        self._target.has(part.keys[i] for i in good)

        def finish() -> None:
            self._ledger.end_copy(part.keys)
            self._settle(copy, len(good), len(part) - len(good))

        self._late.after([] if flight.transfer is None else [flight.transfer], finish)

    def _settle(self, copy: _Copy, promoted: int, failed: int) -> None:
        if self._arena is not None:
            self._arena.give(copy.piece)
        with self._lock:
            self.waiting -= len(copy.batch)
            self.promoted += promoted
            self.failed += failed
            self.skipped += len(copy.batch) - promoted - failed

    def close(self, timeout: float) -> None:
        """Drop what waits; `TransferTimeoutError` if the copy under way does not end."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._work.put(None)
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TransferTimeoutError(
                    f"tiered: a promotion is under way after {timeout} s; close again later"
                )


def _gather(source: Batch, target: Batch, regions: Sequence[Region], arena: Region) -> None:
    """Copy the runs of `source` behind one another into the one run per object of `target`."""
    before = np.cumsum(source.nbytes, dtype=np.uint64) - source.nbytes
    runs = np.diff(source.first)
    inside = before - np.repeat(before[source.first[:-1]], runs)
    copy_runs(
        source.address, regions, np.repeat(target.address, runs) + inside, [arena], source.nbytes
    )
