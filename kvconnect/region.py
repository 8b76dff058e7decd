"""Regions: registered allocations, and the check that every descriptor lies inside one.

Why the check is ours: TCP transports accept addresses that were never registered and hide a
bug that RDMA turns into a dead queue pair. kvconnect refuses such a descriptor before any
backend sees it, whatever the transport would have done.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvconnect.cover import cover
from kvconnect.errors import RegistrationError
from kvconnect.layout import Layout


@dataclass(frozen=True, slots=True)
class Region:
    """One allocation [address, address + nbytes) on `device`, named for messages."""

    name: str
    address: int
    nbytes: int
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Refuse empty regions, the null address, and wrap-around."""
        if self.nbytes < 1:
            raise RegistrationError(
                f"region {self.name!r}: {self.nbytes} bytes; nothing to register"
            )
        if self.address < 1 or self.address + self.nbytes >= 1 << 64:
            raise RegistrationError(
                f"region {self.name!r}: address {self.address:#x} with {self.nbytes} bytes is "
                f"outside the 64-bit address space"
            )

    @property
    def end(self) -> int:
        """First address after the region."""
        return self.address + self.nbytes

    def __str__(self) -> str:
        return f"{self.name} [{self.address:#x}, +{self.nbytes} B)"


class RegionTable:
    """A sorted set of disjoint regions that answers, for arrays, "which region is this in?"."""

    __slots__ = ("_ends", "_starts", "regions")

    def __init__(self, regions: Iterable[Region]) -> None:
        """Sort the regions; `RegistrationError` if two overlap."""
        self.regions = tuple(sorted(regions, key=lambda r: r.address))
        for low, high in itertools.pairwise(self.regions):
            if low.end > high.address:
                raise RegistrationError(f"regions overlap: {low} and {high}")
        self._starts = np.array([r.address for r in self.regions], dtype=np.uint64)
        self._ends = np.array([r.end for r in self.regions], dtype=np.uint64)

    def locate(self, address: NDArray[np.uint64], nbytes: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Return the region index of each descriptor; both arguments are (runs,) uint64.

        Raises `RegistrationError` naming the first descriptor outside every region.
        """
        if not len(address):
            return np.zeros(0, dtype=np.intp)
        if not self.regions:
            raise RegistrationError(f"{len(address)} descriptors, but no region is registered")
        if len(self.regions) == 1:
            return self._locate_in_one(address, nbytes)
        at = np.searchsorted(self._starts, address, side="right").astype(np.intp) - 1
        room = self._ends[at] - address
        bad = (at < 0) | (address >= self._ends[at]) | (nbytes > room)
        if bad.any():
            self._refuse(int(np.flatnonzero(bad)[0]), address, nbytes)
        return at

    def _locate_in_one(
        self, address: NDArray[np.uint64], nbytes: NDArray[np.uint64]
    ) -> NDArray[np.intp]:
        start, end = self._starts[0], self._ends[0]
        # min and max first: two passes without temporaries decide nearly every call.
        most = np.uint64(nbytes.max())
        if address.min() < start or address.max() >= end or most > end - np.uint64(address.max()):
            bad = (address < start) | (address >= end) | (nbytes > end - address)
            if bad.any():
                self._refuse(int(np.flatnonzero(bad)[0]), address, nbytes)
        return np.zeros(len(address), dtype=np.intp)

    def _refuse(self, index: int, address: NDArray[np.uint64], nbytes: NDArray[np.uint64]) -> None:
        known = ", ".join(str(r) for r in self.regions[:4])
        raise RegistrationError(
            f"descriptor {index} ({int(address[index]):#x}, {int(nbytes[index])} B) is outside "
            f"every registered region: {known}{' ...' if len(self.regions) > 4 else ''}"
        )


def granularity(layout: Layout) -> int:
    """Return the bytes at whose multiples (from the layout's offset) no page's run is cut.

    The greatest common step of all run starts; a page-multiple chunk is a multiple of it.
    Where padding makes that shorter than a run, the step of the outer axes alone, whose blocks
    then stay whole.
    """
    paged = cover(layout, {"page"})
    steps = [(axis.stride, axis.extent) for axis in paged.cut if axis.extent > 1]
    steps = sorted(steps + [(loop.stride, loop.extent) for loop in paged.loops])
    block = paged.run
    for i, (stride, extent) in enumerate(steps):
        step = math.gcd(*(outer for outer, _ in steps[i:]))
        if step >= block:
            return step
        block += stride * (extent - 1)
    return block


def chunks(region: Region, step: int, max_bytes: int | None, origin: int = 0) -> list[Region]:
    """Split a region for registration into chunks of at most `max_bytes`.

    Chunks end at `origin` + multiples of `step` bytes (relative to the region), so that no
    page lies across two. Raises `RegistrationError` if one step is already too large.
    """
    if max_bytes is None or region.nbytes <= max_bytes:
        return [region]
    if step > max_bytes:
        raise RegistrationError(
            f"region {region.name!r}: pages stay whole only in steps of {step} B, but at most "
            f"{max_bytes} B can be registered at once; raise max_region_bytes or use a smaller "
            f"page_size"
        )
    size = max_bytes // step * step
    first = origin % step or size
    bounds = [0, *range(first, region.nbytes, size), region.nbytes]
    return [
        Region(f"{region.name}#{i}", region.address + lo, hi - lo, region.device)
        for i, (lo, hi) in enumerate(itertools.pairwise(bounds))
    ]


def register_all(
    regions: Sequence[Region],
    register: Callable[[Region], None],
    unregister: Callable[[Region], None],
) -> None:
    """Register every region or none: on failure the ones done are released in reverse.

    The raised `RegistrationError` names the chunk, its bytes and the usual causes; a failing
    release never hides the first error.
    """
    done: list[Region] = []
    for region in regions:
        try:
            register(region)
        except BaseException as error:
            notes = _roll_back(done, unregister)
            if not isinstance(error, Exception):
                raise  # an interrupt rolls back too, and stays one
            raise RegistrationError(
                f"registering {region} failed after {len(done)} of {len(regions)} chunks: "
                f"{error}. Check the memlock limit (ulimit -l), the device's max_mr_size and "
                f"max_region_bytes{notes}"
            ) from error
        done.append(region)


def _roll_back(done: Sequence[Region], unregister: Callable[[Region], None]) -> str:
    notes = ""
    for region in reversed(done):
        try:
            unregister(region)
        except Exception as error:  # noqa: BLE001 - the first error is the one to report
            notes += f"; releasing {region.name} failed too: {error}"
    return notes
