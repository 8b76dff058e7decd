"""The parts of `kvconnect.wrappers.faulty`: transfers and registrations that go wrong."""

from __future__ import annotations

import ctypes
import enum
import threading
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Batch, Closing, Outcome, Registration, Status, Transfer
from kvconnect.region import Region


class Lie(enum.Enum):
    """A whole result that is wrong without saying so."""

    TOO_FEW = "one result too few"
    TOO_MANY = "one result too many"
    SHORT_BYTES = "every key OK, half the bytes confirmed and (loads) only half written"
    FORGOTTEN = "every store OK, nothing stored"


class Dirt(enum.Enum):
    """How much of its destination a load with an injected fault has overwritten."""

    NONE = 0.0
    HALF = 0.5
    ALL = 1.0


GARBAGE = 0xA5


class BrokenTransfer:
    """A transfer of `inner` with injected statuses, dirt and lies put over its outcome.

    `through`: indices of the keys that `inner` has, (n,) int64; `injected`: (keys,) uint8,
    `Status.OK` where nothing was injected.
    """

    def __init__(
        self,
        inner: Transfer,
        batch: Batch,
        through: NDArray[np.int64],
        injected: NDArray[np.uint8],
        lie: Lie | None,
        dirt: Dirt,
    ) -> None:
        self._inner, self._batch, self._through = inner, batch, through
        self._injected, self._lie, self._dirt = injected, lie, dirt
        self._lock = threading.Lock()
        self._spoiled = False

    def done(self) -> bool:
        """Tell whether `inner` is done; the dirt is there before this turns true."""
        if not self._inner.done():
            return False
        with self._lock:
            if not self._spoiled:
                self._spoil()
            self._spoiled = True
        return True

    def wait(self, timeout: float | None = None) -> Outcome:
        """Wait for `inner` and report what the script says."""
        inner = self._inner.wait(timeout)
        self.done()
        status = np.zeros(len(self._batch), dtype=np.uint8)
        dirty = np.zeros(len(self._batch), dtype=np.bool_)
        status[self._through] = inner.status
        if inner.dirty is not None:
            dirty[self._through] = inner.dirty
        injected = self._injected != Status.OK
        status[injected] = self._injected[injected]
        dirty[injected] = self._dirt is not Dirt.NONE
        causes = {int(self._through[i]): words for i, words in inner.causes.items()}
        causes |= {int(i): "injected" for i in np.flatnonzero(injected)}
        confirmed = int(self._batch.object_nbytes()[status == Status.OK].sum())
        honest = Outcome(status, confirmed, causes, None if inner.dirty is None else dirty)
        return self._told(honest)

    def cancel(self) -> None:
        """Ask `inner` to stop early."""
        self._inner.cancel()

    def _told(self, honest: Outcome) -> Outcome:
        status, dirty = honest.status, honest.dirty
        if self._lie is Lie.TOO_FEW:
            return Outcome(status[:-1], honest.nbytes, honest.causes, dirty)
        if self._lie is Lie.TOO_MANY:
            more = np.append(status, np.uint8(Status.OK))
            return Outcome(more, honest.nbytes, honest.causes, dirty)
        if self._lie is Lie.SHORT_BYTES:
            return Outcome(status, honest.nbytes // 2, honest.causes, dirty)
        return honest

    def _spoil(self) -> None:
        """Overwrite the destinations of failed loads; all of them were checked by `inner`."""
        if self._dirt is Dirt.NONE:
            return
        for index in np.flatnonzero(self._injected != Status.OK).tolist():
            self._scribble(index, 0.0, self._dirt.value)
        if self._lie is Lie.SHORT_BYTES:
            for index in range(len(self._batch)):
                self._scribble(index, 0.5, 1.0)

    def _scribble(self, index: int, start: float, stop: float) -> None:
        """Fill the part [start, stop) of object `index`, as fractions of its bytes."""
        first, last = int(self._batch.first[index]), int(self._batch.first[index + 1])
        sizes = self._batch.nbytes[first:last].tolist()
        low, high, at = int(sum(sizes) * start), int(sum(sizes) * stop), 0
        for address, nbytes in zip(self._batch.address[first:last].tolist(), sizes, strict=True):
            begin, end = max(low - at, 0), min(high - at, nbytes)
            if begin < end:
                ctypes.memset(address + begin, GARBAGE, end - begin)
            at += nbytes


class Chunked(Closing):
    """One registration per region, released in reverse."""

    def __init__(
        self,
        regions: tuple[Region, ...],
        handles: Mapping[Region, Registration],
        undo: Callable[[Region], None],
    ) -> None:
        self.regions = regions
        self._handles, self._undo = handles, undo

    def close(self) -> None:
        """Release every region that still is registered."""
        for region in reversed(self.regions):
            if region in self._handles:
                self._undo(region)
