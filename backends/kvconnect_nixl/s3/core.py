"""The parts of one open store that its transfers use, and a transfer with its deadline."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from kvconnect.backend import Batch
from kvconnect.batch_memory import BatchMemory
from kvconnect.region import Region
from kvconnect.transfers import TimedTransfer
from kvconnect_nixl.s3.circuit import Circuit
from kvconnect_nixl.s3.control import Control
from kvconnect_nixl.s3.names import Names
from kvconnect_nixl.s3.options import Place, S3Options
from kvconnect_nixl.s3.wire import Wire


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


class Job(TimedTransfer):
    """A transfer with the names of its objects, the memory it moves and the time it may take."""

    def __init__(
        self, batch: Batch, names: Names, regions: tuple[Region, ...], seconds: float
    ) -> None:
        """Name and locate everything; `ConfigError` for a key, `RegistrationError` for a run."""
        super().__init__(batch, seconds)
        self.names = [names.of(key) for key in batch.keys]
        self.memory = BatchMemory(batch, regions, 1)
