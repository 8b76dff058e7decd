"""Copying many short runs between registered regions, all runs of one size in one operation.

Each region is seen as a table of windows: window i is the run that starts at unit i. Selecting
windows by an index array lets numpy copy run by run in C; a Python loop, or an index per
element, would cost more than the copy.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvconnect.errors import LayoutError
from kvconnect.region import Region, RegionTable

U64 = NDArray[np.uint64]

_CHUNK_BYTES = 16 << 20
"""Bytes moved at once: numpy holds a chunk in a temporary."""


def copy_runs(
    source: U64,
    source_regions: Sequence[Region],
    target: U64,
    target_regions: Sequence[Region],
    nbytes: U64,
) -> None:
    """Copy nbytes[i] bytes from source[i] to target[i] (addresses, (runs,) uint64 each).

    Target runs do not overlap. Raises `RegistrationError` if a run lies outside the regions.
    """
    sources, targets = RegionTable(source_regions), RegionTable(target_regions)
    at_source, at_target = sources.locate(source, nbytes), targets.locate(target, nbytes)
    kinds = np.stack([at_source, at_target, nbytes.astype(np.intp)])
    for kind in np.unique(kinds, axis=1).T:
        here = np.flatnonzero((kinds == kind[:, None]).all(axis=0))
        _copy_equal(
            sources.regions[kind[0]],
            source[here],
            targets.regions[kind[1]],
            target[here],
            int(kind[2]),
        )


def _copy_equal(
    source_region: Region, source: U64, target_region: Region, target: U64, run: int
) -> None:
    begin, end = (
        source - np.uint64(source_region.address),
        target - np.uint64(target_region.address),
    )
    unit = math.gcd(
        8,
        run,
        source_region.address,
        target_region.address,
        int(np.gcd.reduce(begin)),
        int(np.gcd.reduce(end)),
    )
    windows = _windows(source_region, run, unit), _windows(target_region, run, unit)
    begin, end = begin // np.uint64(unit), end // np.uint64(unit)
    step = max(_CHUNK_BYTES // run, 1)
    for at in range(0, len(begin), step):
        part = slice(at, at + step)
        windows[1][end[part].astype(np.intp)] = windows[0][begin[part].astype(np.intp)]


def _windows(region: Region, run: int, unit: int) -> NDArray[Any]:
    """See a region as all runs that start at a multiple of `unit`: (starts, run / unit)."""
    if region.device != "cpu":
        raise LayoutError(f"{region} lies on {region.device}; only host memory can be staged here")
    buffer: Any = (ctypes.c_uint8 * region.nbytes).from_address(region.address)
    flat: NDArray[Any] = np.ndarray([region.nbytes // unit], dtype=f"u{unit}", buffer=buffer)
    return np.lib.stride_tricks.as_strided(
        flat, (len(flat) - run // unit + 1, run // unit), (unit, unit), writeable=True
    )
