"""`Delayed`: bytes move late, by a time or when a test opens the gate."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator

from kvconnect.backend import Backend, Batch, Status
from kvconnect.transfers import BatchTransfer
from kvconnect.wrappers.deferring import TICK, Deferring


class Delayed(Deferring):
    """Passes every batch on after a random time, and only while the gate is open.

    The caller's memory is read or written only then: a caller that reuses leased memory after
    a time-out is caught by the late bytes. With `obeys_cancel` false a cancelled batch still
    moves, as a network card does that has its descriptors already.
    """

    def __init__(
        self,
        inner: Backend,
        seconds: tuple[float, float] = (0.0, 0.0),
        *,
        seed: int = 0,
        obeys_cancel: bool = True,
        deadline: float = 30.0,
    ) -> None:
        """`seconds`: least and most delay of a batch, drawn from `seed`."""
        super().__init__(inner, deadline=deadline)
        self.seconds = seconds
        self.obeys_cancel = obeys_cancel
        self.waiting = 0
        self._random = random.Random(seed)  # noqa: S311 - repeatable, not secret
        self._changed = threading.Condition()
        self._held = False

    def hold(self) -> None:
        """Close the gate: nothing submitted so far or later moves until `release`."""
        with self._changed:
            self._held = True

    def release(self) -> None:
        """Open the gate."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Close the gate for the length of a ``with`` block."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def admit(self, transfer: BatchTransfer, piece: Batch) -> Status:  # noqa: ARG002
        """Wait for the delay and the gate."""
        with self._changed:
            begin = time.monotonic()
            due = begin + self._random.uniform(*self.seconds)
            self.waiting += 1
            try:
                return self._until(transfer, due, begin + self.deadline)
            finally:
                self.waiting -= 1

    def _until(self, transfer: BatchTransfer, due: float, end: float) -> Status:
        while (now := time.monotonic()) < end:
            if self.closing or (transfer.cancelled and self.obeys_cancel):
                return Status.CANCELLED
            if now >= due and not self._held:
                return Status.OK
            # Cancel and close do not notify: their callers must not need this lock.
            self._changed.wait(TICK)
        return Status.TIMEOUT
