"""A batch under way: cut into chunks that threads move, answered before it is quiet.

Two ends are told apart. *Answered*: every key has its status. *Done*: the library has let go
of the memory. After a failed transfer the second comes seconds later than the first.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Batch, Outcome
from kvconnect.transfers import TimedTransfer

CHUNK_BYTES = 128 << 20
"""Payload of one call at most, if it is more than one object: hashing one chunk overlaps with
moving another."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Objects that go through the library together; lists run over its objects.

    `index`: their places in the batch; `addresses`, `sizes`: their runs.
    """

    job: Job
    index: list[int]
    keys: list[str]
    names: list[str]
    addresses: list[list[int]]
    sizes: list[list[int]]
    nbytes: list[int]

    def runs(self, at: int) -> Iterator[tuple[int, int]]:
        """Yield (address, nbytes) of the runs of one object."""
        return zip(self.addresses[at], self.sizes[at], strict=True)

    def settle(self, at: int, status: int, cause: str = "", *, dirty: bool = False) -> None:
        """Fix the status of one object."""
        self.job.settle(self.index[at], status, cause, dirty=dirty)

    def settle_rest(self, status: int, cause: str, *, dirty: bool = False) -> None:
        """Fix the status of all objects that have none."""
        for index in self.index:
            if not self.job.is_settled(index):
                self.job.settle(index, status, cause, dirty=dirty)


class Job(TimedTransfer):
    """A transfer that ends twice: `wait` returns when it is answered, `done` when it is quiet."""

    def __init__(self, batch: Batch, seconds: float) -> None:
        """`seconds`: how long it may take."""
        super().__init__(batch, seconds)
        self._answered = threading.Event()
        self._moving = self._leased = 0
        self._count = threading.Lock()

    def start(self, chunks: int) -> None:
        """Say how many chunks there are; none is an end at once."""
        self._moving = self._leased = chunks
        if not chunks:
            self.finish()
            self._answered.set()

    def let_go(self) -> None:
        """Note that the memory of one chunk is free."""
        with self._count:
            self._leased -= 1
            last = not self._leased
        if last:
            self.finish()

    def answered(self) -> None:
        """Note that the objects of one chunk are settled; after its `let_go` where it is quiet."""
        with self._count:
            self._moving -= 1
            last = not self._moving
        if last:
            self._answered.set()

    def is_settled(self, index: int) -> bool:
        """Tell whether a key has its status."""
        return bool(self._settled[index])

    def wait(self, timeout: float | None = None) -> Outcome:
        """Wait until every key has its status, at most `timeout` seconds."""
        self._answered.wait(self._deadline if timeout is None else timeout)
        return super().wait(0)


def cut(
    job: Job, entries: int, trailers: int, naming: Callable[[Sequence[str]], list[str]]
) -> list[Chunk]:
    """Cut a batch into chunks of at most `entries` runs; a larger object is one of its own.

    `trailers`: runs that each object has beside its own; `naming` maps keys to names.
    """
    batch = job.batch
    if not len(batch):
        return []
    sizes = batch.object_nbytes()
    runs = np.cumsum(np.diff(batch.first) + trailers)
    totals = np.cumsum(sizes)
    names = naming(batch.keys)
    chunks, low = [], 0
    while low < len(batch):
        before = (int(runs[low - 1]), int(totals[low - 1])) if low else (0, 0)
        by_runs = int(np.searchsorted(runs, before[0] + entries, side="right"))
        by_bytes = int(np.searchsorted(totals, np.uint64(before[1] + CHUNK_BYTES), side="right"))
        high = max(min(by_runs, by_bytes), low + 1)
        chunks.append(_chunk(job, low, high, names, sizes))
        low = high
    return chunks


def _chunk(job: Job, low: int, high: int, names: list[str], sizes: NDArray[np.uint64]) -> Chunk:
    batch = job.batch
    first = batch.first[low : high + 1].tolist()
    start, end = first[0], first[-1]
    addresses, nbytes = batch.address[start:end].tolist(), batch.nbytes[start:end].tolist()
    # An empty run is nothing to move, and the library refuses it.
    rows = [slice(a - start, b - start) for a, b in itertools.pairwise(first)]
    return Chunk(
        job,
        list(range(low, high)),
        list(batch.keys[low:high]),
        names[low:high],
        [_without_empty(addresses[row], nbytes[row]) for row in rows],
        [_without_empty(nbytes[row], nbytes[row]) for row in rows],
        sizes[low:high].tolist(),
    )


def _without_empty(values: list[int], nbytes: list[int]) -> list[int]:
    if 0 not in nbytes:
        return values
    return [value for value, size in zip(values, nbytes, strict=True) if size]
