"""`Limited`: bounds what is under way at once, for stores and networks that choke on more."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Backend, Batch, Status
from kvconnect.errors import ConfigError
from kvconnect.transfers import BatchTransfer
from kvconnect.wrappers.deferring import TICK, Deferring


class Limited(Deferring):
    """Passes batches on in pieces.

    Invariants: no piece has more than `max_keys_per_batch` keys; the pieces under way have at
    most `max_in_flight_bytes` together, save that one larger object goes alone.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        max_in_flight_bytes: int = 64 << 20,
        max_keys_per_batch: int = 1024,
        deadline: float = 30.0,
    ) -> None:
        """`deadline`: seconds that a piece may wait for its turn, or run."""
        for field, value in (
            ("max_in_flight_bytes", max_in_flight_bytes),
            ("max_keys_per_batch", max_keys_per_batch),
        ):
            if value < 1:
                raise ConfigError(f"limited: {field}={value}; it must be at least 1")
        super().__init__(inner, deadline=deadline)
        self.max_in_flight_bytes = max_in_flight_bytes
        self.max_keys_per_batch = max_keys_per_batch
        self.in_flight_bytes = 0
        self._changed = threading.Condition()

    def exists(self, keys: Sequence[str], nbytes: Sequence[int]) -> NDArray[np.bool_]:
        """Ask `inner` for at most `max_keys_per_batch` keys at a time: (keys,) bool."""
        step = self.max_keys_per_batch
        if len(keys) <= step or len(keys) != len(nbytes):
            return self.inner.exists(keys, nbytes)
        parts = [
            self.inner.exists(keys[at : at + step], nbytes[at : at + step])
            for at in range(0, len(keys), step)
        ]
        return np.concatenate(parts)

    def pieces(self, batch: Batch) -> Iterator[tuple[int, int]]:
        """Cut by keys and by bytes; an object above the limit is a piece of its own."""
        ends = np.cumsum(batch.object_nbytes(), dtype=np.uint64)
        start = 0
        while start < len(batch):
            before = int(ends[start - 1]) if start else 0
            reach = np.uint64(before + self.max_in_flight_bytes)
            fits = int(np.searchsorted(ends, reach, side="right"))
            stop = min(max(fits, start + 1), start + self.max_keys_per_batch, len(batch))
            yield start, stop
            start = stop

    def admit(self, transfer: BatchTransfer, piece: Batch) -> Status:
        """Wait until the piece fits beside what is under way."""
        size, end = int(piece.nbytes.sum()), time.monotonic() + self.deadline
        with self._changed:
            while time.monotonic() < end:
                if self.closing or transfer.cancelled:
                    return Status.CANCELLED
                if not self.in_flight_bytes or self._fits(size):
                    self.in_flight_bytes += size
                    return Status.OK
                self._changed.wait(TICK)
        return Status.TIMEOUT

    def leave(self, piece: Batch) -> None:
        """Give the bytes of a piece back to the ones that wait."""
        with self._changed:
            self.in_flight_bytes -= int(piece.nbytes.sum())
            self._changed.notify_all()

    def _fits(self, size: int) -> bool:
        return self.in_flight_bytes + size <= self.max_in_flight_bytes
