"""Copying many short runs between registered regions, in few operations.

Runs that follow one another at equal steps on both sides, as those of pages do, are one strided
copy. For others each region is seen as a table of windows: window i is the run that starts at
unit i. Selecting windows by an index array lets numpy copy run by run in C; a Python loop, or an
index per element, would cost more than the copy.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvconnect.errors import LayoutError
from kvconnect.region import Region, RegionTable

U64 = NDArray[np.uint64]

_CHUNK_BYTES = 16 << 20
"""Bytes moved at once: numpy holds a chunk in a temporary."""
_FEW = 4
"""Fewer runs than this in a stretch, on average, cost less by windows."""


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
    for here in _alike(at_source, at_target, nbytes.astype(np.intp)):
        first = here[0]
        _copy_equal(
            sources.regions[at_source[first]],
            source[here],
            targets.regions[at_target[first]],
            target[here],
            int(nbytes[first]),
        )


def _alike(*columns: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
    """Yield the numbers of the runs for which all columns are the same, kind by kind."""
    code, *more = columns
    for column in more:
        code = code * (column.max(initial=0) + 1) + column
    # Few kinds, each in long streaks: sorting all runs would cost more than copying them.
    streaks = np.flatnonzero(np.diff(code, prepend=-1))
    for kind in np.unique(code[streaks]):
        yield np.flatnonzero(code == kind)


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
    if (starts := _stretches(begin, end)) is not None:
        for first, last in zip(starts, [*starts[1:], len(begin)], strict=True):
            there = _strided(target_region, end[first:last], run, unit)
            there[...] = _strided(source_region, begin[first:last], run, unit)
        return
    windows = _windows(source_region, run, unit), _windows(target_region, run, unit)
    begin, end = begin // np.uint64(unit), end // np.uint64(unit)
    step = max(_CHUNK_BYTES // run, 1)
    for at in range(0, len(begin), step):
        part = slice(at, at + step)
        windows[1][end[part].astype(np.intp)] = windows[0][begin[part].astype(np.intp)]


def _stretches(begin: U64, end: U64) -> list[int] | None:
    """Return where stretches of runs at equal steps on both sides begin; None if they are short."""
    steps = np.diff(begin), np.diff(end)
    off = (steps[0][1:] != steps[0][:-1]) | (steps[1][1:] != steps[1][:-1])
    breaks = np.flatnonzero(off) + 2
    if len(breaks) * _FEW > len(begin):
        return None
    starts = [0]
    for at in breaks.tolist():
        # A stretch may begin with any step: its second run breaks nothing.
        if at != starts[-1] + 1:
            starts.append(at)
    return starts


def _strided(region: Region, offsets: U64, run: int, unit: int) -> NDArray[Any]:
    """See runs of a region at equal steps: (runs, run / unit)."""
    first = int(offsets[0])
    step = int(offsets[1]) - first if len(offsets) > 1 else run
    shape = (len(offsets), run // unit)
    return np.ndarray(shape, f"u{unit}", _memory(region), first, (step, unit))


def _windows(region: Region, run: int, unit: int) -> NDArray[Any]:
    """See a region as all runs that start at a multiple of `unit`: (starts, run / unit)."""
    flat: NDArray[Any] = np.ndarray([region.nbytes // unit], f"u{unit}", _memory(region))
    return np.lib.stride_tricks.as_strided(
        flat, (len(flat) - run // unit + 1, run // unit), (unit, unit), writeable=True
    )


def _memory(region: Region) -> Any:
    if region.device != "cpu":
        raise LayoutError(f"{region} lies on {region.device}; only host memory can be staged here")
    return (ctypes.c_uint8 * region.nbytes).from_address(region.address)
