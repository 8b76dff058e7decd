"""Caller memory as buffers: views over registered regions, cut by descriptor.

Every descriptor was checked against the registered regions at submit. The batch keeps its own
views, made then, so that nothing depends on what is registered later.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Batch
from kvconnect.region import Region, RegionTable
from kvconnect.run_copy import copy_runs

GATHER_BELOW = 16 << 10
"""Mean bytes per run below which runs are copied by numpy, many at once."""


class BatchMemory:
    """The runs of a batch as memory.

    `aligned`: (keys,) bool, whether every run of an object starts and ends at multiples of
    the alignment; `short`: (keys,) bool, whether its runs are better gathered than listed.
    """

    def __init__(self, batch: Batch, regions: tuple[Region, ...], alignment: int | None) -> None:
        """Locate every run; `RegistrationError` if one is outside `regions`.

        `alignment`: None takes nothing for aligned, so that all of it is bounced.
        """
        self.batch = batch
        self._at = RegionTable(regions).locate(batch.address, batch.nbytes)
        self._regions = regions
        self._views = [_view(region) for region in regions]
        self.sizes = batch.object_nbytes().astype(np.int64)
        counts = np.diff(batch.first)
        if len(batch):
            self.aligned = np.zeros(len(batch), dtype=np.bool_)
            if alignment is not None:
                odd = ((batch.address | batch.nbytes) % np.uint64(alignment)).astype(np.int64)
                self.aligned = np.add.reduceat(odd, batch.first[:-1]) == 0
            self.short = (counts > 1) & (self.sizes < counts * GATHER_BELOW)
        else:
            self.aligned = self.short = np.zeros(0, dtype=np.bool_)

    def rows(self, index: int) -> slice:
        """Return the runs of object `index` as a slice."""
        return slice(int(self.batch.first[index]), int(self.batch.first[index + 1]))

    def views(self, index: int) -> list[memoryview]:
        """Return the runs of object `index`, empty ones left out."""
        rows = self.rows(index)
        out = []
        for region, address, nbytes in zip(
            self._at[rows].tolist(),
            self.batch.address[rows].tolist(),
            self.batch.nbytes[rows].tolist(),
            strict=True,
        ):
            if nbytes:
                offset = address - self._regions[region].address
                out.append(self._views[region][offset : offset + nbytes])
        return out

    def table(self, objects: NDArray[np.int64], starts: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the runs of `objects` as (n, 3) rows: address, nbytes, offset.

        `starts`: (objects,) where each begins; its runs follow one another from there. Empty
        runs are left out.
        """
        counts = np.diff(self.batch.first)[objects]
        ends = np.cumsum(counts)
        # Row numbers: each object's own first, plus 0, 1, 2 ... that restarts at every object.
        rows = np.repeat(self.batch.first[:-1][objects] - (ends - counts), counts)
        rows += np.arange(len(rows))
        nbytes = self.batch.nbytes[rows]
        before = np.cumsum(nbytes) - nbytes
        offset = before + np.repeat(starts - before[ends - counts], counts)
        table = np.stack([self.batch.address[rows], nbytes, offset], axis=1)
        return np.ascontiguousarray(table[nbytes > 0])

    def gather(self, index: int, target: int, region: Region) -> None:
        """Copy the runs of object `index` one after the other to address `target`."""
        rows = self.rows(index)
        nbytes = self.batch.nbytes[rows]
        targets = np.uint64(target) + np.cumsum(nbytes) - nbytes
        self._copy(self.batch.address[rows], targets, nbytes, region, store=True)

    def scatter(self, index: int, source: int, region: Region) -> None:
        """Copy bytes from address `source` to the runs of object `index`."""
        rows = self.rows(index)
        nbytes = self.batch.nbytes[rows]
        sources = np.uint64(source) + np.cumsum(nbytes) - nbytes
        self._copy(sources, self.batch.address[rows], nbytes, region, store=False)

    def _copy(
        self,
        source: NDArray[np.uint64],
        target: NDArray[np.uint64],
        nbytes: NDArray[np.uint64],
        bounce: Region,
        *,
        store: bool,
    ) -> None:
        if len(nbytes) > 32 and int(nbytes.sum()) < len(nbytes) * GATHER_BELOW:
            ours, theirs = [bounce], self._regions
            some = np.flatnonzero(nbytes)
            copy_runs(
                source[some], theirs if store else ours,
                target[some], ours if store else theirs, nbytes[some],
            )  # fmt: skip
            return
        for start, end, length in zip(
            source.tolist(), target.tolist(), nbytes.tolist(), strict=True
        ):
            ctypes.memmove(end, start, length)


def _view(region: Region) -> memoryview:
    return memoryview((ctypes.c_ubyte * region.nbytes).from_address(region.address)).cast("B")
