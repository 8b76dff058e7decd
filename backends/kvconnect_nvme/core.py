"""The parts of one open store that its transfers use, and the counts they keep."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from kvconnect.backend import Batch
from kvconnect.batch_memory import BatchMemory
from kvconnect.region import Region
from kvconnect.transfers import TimedTransfer
from kvconnect_nvme import keys
from kvconnect_nvme.arena import Arena
from kvconnect_nvme.bounce import BouncePool
from kvconnect_nvme.builder import Builder
from kvconnect_nvme.engine import IoEngine
from kvconnect_nvme.env import IndexEnv
from kvconnect_nvme.index import Index
from kvconnect_nvme.options import NvmeOptions
from kvconnect_nvme.owners import Owner
from kvconnect_nvme.slabs import Slabs
from kvconnect_nvme.space import Space
from kvconnect_nvme.tables import Session
from kvconnect_nvme.visited import Visited
from kvconnect_nvme.work import Stopped


@dataclass(frozen=True, slots=True)
class Core:
    """Everything a transfer needs of the store."""

    options: NvmeOptions
    env: IndexEnv
    slabs: Slabs
    visited: Visited
    space: Space
    arena: Arena
    engine: IoEngine
    bounce: BouncePool
    owner_file: Owner
    builder: Builder
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def owner(self) -> int:
        """Id under which this store holds space."""
        return self.owner_file.id

    def index(self, session: Session) -> Index:
        """Return the index inside a transaction."""
        return Index(session, self.slabs.slab_bytes)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter of this process."""
        with self.lock:
            self.counts[name] += amount

    def mark(self, addresses: list[int]) -> None:
        """Note that the objects at these addresses were used."""
        self.visited.mark(np.array(addresses, dtype=np.uint64))


class Job(TimedTransfer):
    """A transfer with the memory it moves and the time it may take."""

    def __init__(
        self, batch: Batch, regions: tuple[Region, ...], alignment: int | None, seconds: float
    ) -> None:
        """Locate the memory; `RegistrationError` if a run is outside `regions`."""
        super().__init__(batch, seconds)
        self.packed = keys.pack_all(batch.keys)
        self.memory = BatchMemory(batch, regions, alignment)

    def check(self) -> None:
        """Raise `Stopped` when the caller asked to stop or the time is up."""
        if (status := self.stop_reason()) is not None:
            raise Stopped(status)
