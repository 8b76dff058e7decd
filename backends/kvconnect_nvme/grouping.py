"""Which objects are moved together: neighbours in the file become one large read or write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from kvconnect.batch_memory import BatchMemory
from kvconnect_nvme.engine import Group
from kvconnect_nvme.options import NvmeOptions, up_all
from kvconnect_nvme.slabs import Slabs

SMALLEST = 1 << 20
"""Bytes per group at least, where neighbours allow it: below, calls cost more than they move."""
BOUNCED = 4 << 20
"""Bytes per group at most that passes through a bounce buffer: copying one of them overlaps with
moving others."""


def group(
    places: Mapping[int, int],
    memory: BatchMemory,
    slabs: Slabs,
    options: NvmeOptions,
    largest: int,
) -> list[Group]:
    """Group the objects at `places` (index in the batch to store address) by file neighbourhood.

    `largest`: bytes of a group that is moved in place, unless one object is larger.
    """
    if not places:
        return []
    return list(_Sorted(places, memory, slabs).groups(options, largest))


class _Sorted:
    """Objects by address, as columns: index in the batch, start, end, whether bounced."""

    def __init__(self, places: Mapping[int, int], memory: BatchMemory, slabs: Slabs) -> None:
        self._slabs = slabs
        self._objects = sorted(places, key=places.__getitem__)
        self._start = np.array([places[i] for i in self._objects], dtype=np.int64)
        self._room = up_all(memory.sizes[self._objects])
        self._end = self._start + self._room
        self._bounced = memory.short[self._objects] | ~memory.aligned[self._objects]

    def groups(self, options: NvmeOptions, largest: int) -> Iterator[Group]:
        limit = min(max(int(self._room.sum()) // options.io_threads, SMALLEST), largest)
        # No more than the bounce buffers hold: neighbours must not fail where each alone would
        # fit.
        limits = np.where(self._bounced, min(limit, BOUNCED, options.bounce), limit)
        first = 0
        for end in self._chains():
            while first < end:
                # As many as fit below the limit, one at least.
                most = self._start[first] + limits[first]
                fit = int(np.searchsorted(self._end[first:end], most, side="right"))
                yield self._group(slice(first, first + max(fit, 1)))
                first += max(fit, 1)

    def _chains(self) -> list[int]:
        """Return where each chain of neighbours of one slab and kind ends."""
        start, bounced = self._start[1:], self._bounced[1:]
        joins = (start == self._end[:-1]) & (start % self._slabs.slab_bytes != 0)
        joins &= bounced == self._bounced[:-1]
        return [*(np.flatnonzero(~joins) + 1).tolist(), len(self._objects)]

    def _group(self, part: slice) -> Group:
        start = int(self._start[part.start])
        fd, offset = self._slabs.locate(start)
        return Group(
            slab=start // self._slabs.slab_bytes,
            fd=fd,
            offset=offset,
            nbytes=int(self._end[part.stop - 1]) - start,
            objects=tuple(self._objects[part]),
            starts=tuple((self._start[part] - start).tolist()),
            bounced=bool(self._bounced[part.start]),
        )
