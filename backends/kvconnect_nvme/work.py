"""What happens to the bytes of a group around its I/O: gather, pad, hash; verify, scatter.

Runs on the engine's threads, so that hashing one group overlaps with the disk moving others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import xxhash

from kvconnect.backend import Status
from kvconnect.batch_memory import BatchMemory
from kvconnect.region import Region
from kvconnect_nvme.bounce import BouncePool, aligned
from kvconnect_nvme.engine import Group, Lent
from kvconnect_nvme.lent import Bounced, InPlace
from kvconnect_nvme.options import BLOCK, up

_ZEROS = aligned(BLOCK)
"""Written between objects; never written to."""
_JUNK = aligned(BLOCK)
"""Where the bytes between objects are read to; what it holds means nothing."""


class Stopped(Exception):  # noqa: N818 - no error: the caller asked, or the deadline passed
    """The transfer is to stop; `status` says why."""

    def __init__(self, status: Status) -> None:
        """`status`: CANCELLED or TIMEOUT."""
        super().__init__(status.name)
        self.status = status


def checksum(buffers: Sequence[memoryview], seed: int) -> int:
    """Return xxh3_64 over the bytes of all buffers."""
    if len(buffers) == 1:
        return int(xxhash.xxh3_64_intdigest(buffers[0], seed=seed))
    state = xxhash.xxh3_64(seed=seed)
    for buffer in buffers:
        state.update(buffer)
    return int(state.intdigest())


class _Moving:
    """What storing and loading share: the memory of a group, padded to whole blocks."""

    def __init__(self, memory: BatchMemory, bounce: BouncePool, check: Callable[[], None]) -> None:
        self.memory, self._bounce = memory, bounce
        self.check = check

    @contextmanager
    def _slot(self, group: Group, *, wait: bool) -> Iterator[tuple[Bounced, Region]]:
        with self._bounce.slot(group.nbytes, wait=wait) as slot:
            lent = Bounced(slot.view[: group.nbytes], slot.address)
            yield lent, Region("bounce", slot.address, len(slot.view))

    def _pieces(self, group: Group, view: memoryview) -> Iterator[tuple[int, int, memoryview]]:
        """Yield (object, start, its bytes) inside a bounce buffer."""
        for i, start in zip(group.objects, group.starts, strict=True):
            yield i, start, view[start : start + int(self.memory.sizes[i])]


class Storing(_Moving):
    """Reads the caller's memory; `checksums` fills up with the sums of what was written."""

    def __init__(
        self,
        memory: BatchMemory,
        bounce: BouncePool,
        check: Callable[[], None],
        seeds: Mapping[int, int] | None,
    ) -> None:
        """`seeds`: by object; None where checksums are off."""
        super().__init__(memory, bounce, check)
        self._seeds = seeds
        self.checksums: dict[int, int] = {}
        self.moved: set[int] = set()

    @contextmanager
    def lend(self, group: Group, *, wait: bool = True) -> Iterator[Lent]:
        """Lend the bytes to write."""
        if not group.bounced:
            for i in group.objects:
                self._hash(i, self.memory.views(i))
            yield InPlace(self.memory, group, _ZEROS)
            return
        with self._slot(group, wait=wait) as (lent, region):
            for i, start, piece in self._pieces(group, lent.view):
                self.memory.gather(i, lent.address + start, region)
                self._hash(i, [piece])
                end = start + len(piece)
                lent.view[end : start + up(len(piece))] = bytes(up(len(piece)) - len(piece))
            yield lent

    def _hash(self, index: int, buffers: Sequence[memoryview]) -> None:
        # Always anew: the memory may have changed since it was hashed for comparison, and a
        # sum that does not match what is written would make the object a miss for ever.
        if self._seeds is not None:
            self.checksums[index] = checksum(buffers, self._seeds[index])

    def landed(self, group: Group, lent: Lent) -> None:  # noqa: ARG002
        """Note what was written."""
        self.moved.update(group.objects)


class Loading(_Moving):
    """Writes the caller's memory with bytes that passed their checksum, or says which did not.

    `good`, `bad`: objects by outcome; `dirty`: objects whose memory may have changed.
    """

    def __init__(
        self,
        memory: BatchMemory,
        bounce: BouncePool,
        check: Callable[[], None],
        expected: Mapping[int, tuple[int, int]],
    ) -> None:
        """Objects without an `expected` (seed, checksum) are believed."""
        super().__init__(memory, bounce, check)
        self._expected = expected
        self.good: set[int] = set()
        self.bad: set[int] = set()
        self.dirty: set[int] = set()

    @contextmanager
    def lend(self, group: Group, *, wait: bool = True) -> Iterator[Lent]:
        """Lend the memory to read into."""
        if not group.bounced:
            self.dirty.update(group.objects)
            yield InPlace(self.memory, group, _JUNK)
            return
        with self._slot(group, wait=wait) as (lent, _region):
            yield lent

    def landed(self, group: Group, lent: Lent) -> None:
        """Verify what was read, and copy it to its place if it came through a bounce buffer."""
        if not isinstance(lent, Bounced):
            for i in group.objects:
                self._judge(i, self.memory.views(i))
            return
        region = Region("bounce", lent.address, len(lent.view))
        for i, start, piece in self._pieces(group, lent.view):
            if self._judge(i, [piece]):
                self.dirty.add(i)
                self.memory.scatter(i, lent.address + start, region)

    def _judge(self, index: int, buffers: Sequence[memoryview]) -> bool:
        seed_and_sum = self._expected.get(index)
        right = seed_and_sum is None or checksum(buffers, seed_and_sum[0]) == seed_and_sum[1]
        (self.good if right else self.bad).add(index)
        return right
