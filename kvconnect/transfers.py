"""`BatchTransfer`: the caller's handle on a batch that another thread moves key by key.

Why it exists: half of the protocol's promises are about what a caller may see while a batch
is under way (a snapshot at a time-out, the lease until `done`, cancel without waiting). They
are kept here once, for every backend and wrapper whose worker can say "key i is settled".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Batch, Op, Outcome, Status


class BatchTransfer:
    """A `kvconnect.backend.Transfer` that a worker fills in.

    Invariants: each key is settled at most once and keeps its status; `done()` turns true
    only by `finish`, after which nothing changes any more; a key that is not settled reads as
    TIMEOUT, and as dirty when the batch is a load.
    """

    def __init__(self, batch: Batch, deadline: float) -> None:
        """`deadline`: seconds that `wait(None)` waits at most."""
        self.batch = batch
        self._deadline = deadline
        self._lock = threading.Lock()
        self._cancel = threading.Event()
        self._finished = threading.Event()
        self._sizes = batch.object_nbytes()
        self._status = np.full(len(batch), Status.TIMEOUT, dtype=np.uint8)
        self._dirty = np.full(len(batch), batch.op is Op.LOAD, dtype=np.bool_)
        self._causes: dict[int, str] = {}

    @property
    def leased(self) -> NDArray[np.uint64]:
        """Addresses of the runs whose memory it holds: (runs,) uint64."""
        return self.batch.address

    @property
    def cancelled(self) -> bool:
        """Whether the caller asked to stop; the worker looks at it between keys."""
        return self._cancel.is_set()

    def settle(self, index: int, status: int, cause: str = "", *, dirty: bool = False) -> None:
        """Worker: fix the status of key `index`; `dirty` only counts for loads that failed."""
        with self._lock:
            self._status[index] = status
            self._dirty[index] = dirty and self.batch.op is Op.LOAD and status != Status.OK
            if cause:
                self._causes[index] = cause

    def settle_ok(self, index: Sequence[int]) -> None:
        """Worker: fix the status of many keys as OK, at once."""
        at = np.asarray(index, dtype=np.int64)
        with self._lock:
            self._status[at] = Status.OK
            self._dirty[at] = False

    def finish(self) -> None:
        """Worker: let go of the memory. Nothing may be settled afterwards."""
        self._finished.set()

    def settled(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds; tell whether the memory is free."""
        return self._finished.wait(timeout)

    def done(self) -> bool:
        """Tell, without blocking, whether the backend has let go of the memory."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> Outcome:
        """Wait at most `timeout` seconds (None: the backend's deadline) for the outcome."""
        self._finished.wait(self._deadline if timeout is None else timeout)
        with self._lock:
            status, causes = self._status.copy(), dict(self._causes)
            dirty = self._dirty.copy()
        confirmed = int(self._sizes[status == Status.OK].sum())
        return Outcome(status, confirmed, causes, dirty if self.batch.op is Op.LOAD else None)

    def cancel(self) -> None:
        """Ask to stop early; keys not moved become CANCELLED. Does not wait."""
        self._cancel.set()

    def __repr__(self) -> str:
        state = "done" if self.done() else "cancelling" if self.cancelled else "under way"
        return f"Transfer({self.batch.op.value}, {len(self.batch)} keys, {state})"


class TimedTransfer(BatchTransfer):
    """A batch that its worker gives up at `until` (monotonic), settling what is left at once."""

    def __init__(self, batch: Batch, seconds: float) -> None:
        """`seconds`: how long the worker may take, and how long `wait(None)` waits."""
        super().__init__(batch, seconds)
        self.until = time.monotonic() + seconds
        self._settled = np.zeros(len(batch), dtype=np.bool_)

    def stop_reason(self) -> Status | None:
        """Return why to stop, or None to go on."""
        # Time first: a caller that was told TIMEOUT is not to find the object later.
        if time.monotonic() > self.until:
            return Status.TIMEOUT
        return Status.CANCELLED if self.cancelled else None

    def settle(self, index: int, status: int, cause: str = "", *, dirty: bool = False) -> None:
        """Worker: fix the status of one key."""
        super().settle(index, status, cause, dirty=dirty)
        self._settled[index] = True

    def settle_ok(self, index: Sequence[int]) -> None:
        """Worker: fix the status of many keys as OK, at once."""
        super().settle_ok(index)
        self._settled[np.asarray(index, dtype=np.int64)] = True

    def settle_rest(self, status: int, cause: str, *, dirty: bool = False) -> None:
        """Worker: fix the status of all keys that have none."""
        for index in np.flatnonzero(~self._settled).tolist():
            self.settle(index, status, cause, dirty=dirty)


def select(batch: Batch, index: NDArray[np.int64]) -> Batch:
    """Return the batch of the keys at `index`, (keys,) int64, in that order."""
    counts = np.diff(batch.first)[index]
    first = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    # Row numbers: each key's own start, plus 0, 1, 2 ... that restarts at every key.
    rows = np.repeat(batch.first[:-1][index] - first[:-1], counts) + np.arange(first[-1])
    return replace(
        batch,
        keys=[batch.keys[i] for i in index.tolist()],
        address=batch.address[rows],
        nbytes=batch.nbytes[rows],
        first=first,
    )


def verified(batch: Batch, outcome: Outcome) -> Outcome:
    """Return `outcome` if its numbers agree with `batch`; else nothing of it is believed.

    A result with too few or too many statuses, or whose confirmed bytes are not those of the
    keys it calls OK, says that a transfer was short without saying which: every key becomes
    BACKEND_ERROR, dirty for loads, with both numbers as the cause.
    """
    sizes = batch.object_nbytes()
    if len(outcome.status) != len(batch):
        wrong = f"{len(outcome.status)} results for {len(batch)} keys"
    elif (want := int(sizes[outcome.status == Status.OK].sum())) != outcome.nbytes:
        wrong = f"{outcome.nbytes} B confirmed, the keys called OK have {want} B"
    else:
        return outcome
    status = np.full(len(batch), Status.BACKEND_ERROR, dtype=np.uint8)
    dirty = np.ones(len(batch), dtype=np.bool_) if batch.op is Op.LOAD else None
    return Outcome(status, 0, dict.fromkeys(range(len(batch)), wrong), dirty)
