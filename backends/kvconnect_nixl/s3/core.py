"""The parts of one open store that its transfers use, and a transfer with its deadline."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from kvconnect.backend import Batch, Status
from kvconnect.region import Region
from kvconnect.transfers import BatchTransfer
from kvconnect_nixl.s3.circuit import Circuit
from kvconnect_nixl.s3.control import Control
from kvconnect_nixl.s3.names import Names
from kvconnect_nixl.s3.options import Place, S3Options
from kvconnect_nixl.s3.wire import Wire
from kvconnect_nvme.memory import BatchMemory


@dataclass(frozen=True, slots=True)
class Core:
    """Everything a transfer needs of the store."""

    options: S3Options
    place: Place
    names: Names
    circuit: Circuit
    control: Control
    wire: Wire
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter of this process."""
        with self.lock:
            self.counts[name] += amount


class Job(BatchTransfer):
    """A transfer with the names of its objects, the memory it moves and the time it may take."""

    def __init__(
        self, batch: Batch, names: Names, regions: tuple[Region, ...], seconds: float
    ) -> None:
        """Name and locate everything; `ConfigError` for a key, `RegistrationError` for a run."""
        super().__init__(batch, seconds)
        self.names = [names.of(key) for key in batch.keys]
        self.memory = BatchMemory(batch, regions, 1)
        self.until = time.monotonic() + seconds
        self._settled = np.zeros(len(batch), dtype=np.bool_)

    def stop_reason(self) -> Status | None:
        """Return why to stop, or None to go on."""
        if time.monotonic() > self.until:
            return Status.TIMEOUT
        return Status.CANCELLED if self.cancelled else None

    def settle(self, index: int, status: int, cause: str = "", *, dirty: bool = False) -> None:
        """Fix the status of one key."""
        super().settle(index, status, cause, dirty=dirty)
        self._settled[index] = True

    def settle_rest(self, status: int, cause: str, *, dirty: bool = False) -> None:
        """Fix the status of all keys that have none."""
        for index in np.flatnonzero(~self._settled).tolist():
            self.settle(index, status, cause, dirty=dirty)
