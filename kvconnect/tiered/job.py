"""`Job`: one batch of the caller's, on its way through the tiers."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Batch, Op, Outcome, Status
from kvconnect.tiered.tier import Flight, Tier
from kvconnect.transfers import BatchTransfer


class Job(BatchTransfer):
    """A transfer that passes `cancel` on to the tiers.

    Invariant: it is done only after every tier that saw its memory has let go of it.
    """

    def __init__(self, batch: Batch, timeout: float) -> None:
        """`timeout`: seconds from now for all tiers together."""
        super().__init__(batch, timeout)
        self.deadline = time.monotonic() + timeout
        self.sizes = self._sizes
        self._flights: list[Flight] = []
        self._flying = threading.Lock()
        self._answered = threading.Event()

    def answer(self) -> None:
        """Let waiters have the outcome, which is final, although memory is still held."""
        self._answered.set()

    def finish(self) -> None:
        """Let go of the memory."""
        super().finish()
        self._answered.set()

    def wait(self, timeout: float | None = None) -> Outcome:
        """Wait at most `timeout` seconds (None: the store's deadline) for the outcome."""
        self._answered.wait(self._deadline if timeout is None else timeout)
        return super().wait(0)

    def start(self, tier: Tier, batch: Batch) -> Flight:
        """Start a part in one tier."""
        flight = tier.start(batch)
        with self._flying:
            self._flights.append(flight)
        if self.cancelled:
            flight.cancel()
        return flight

    def cancel(self) -> None:
        """Ask every tier to stop early; tiers not asked yet will not be."""
        super().cancel()
        for flight in self.flights():
            flight.cancel()

    def flights(self) -> list[Flight]:
        """Return all that was started."""
        with self._flying:
            return list(self._flights)

    def share(self, *, last: bool) -> float:
        """Return until when a tier may take (monotonic): half of what is left, or all of it."""
        now = time.monotonic()
        return self.deadline if last else now + (self.deadline - now) / 2

    def settle_all(
        self,
        status: NDArray[np.uint8],
        causes: Mapping[int, str],
        dirty: NDArray[np.bool_] | None = None,
    ) -> None:
        """Fix every key at once: (keys,) each."""
        with self._lock:
            self._status[:] = status
            self._dirty[:] = False
            if dirty is not None and self.batch.op is Op.LOAD:
                self._dirty[:] = dirty & (status != Status.OK)
            self._causes.update(causes)
