"""One checksum over the bytes of many runs, in their order, wherever the runs begin and end.

Both sides of a transfer expand the same plan, so they see the same bytes in the same order,
also when their layouts and TP sizes differ and their runs are joined differently.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvconnect.region import Region
from kvconnect.run_copy import copy_runs

_CHUNK_BYTES = 8 << 20
_LONG_RUN = 16 << 10
"""From here on hashing run by run costs less than gathering them first."""


def checksum(
    address: NDArray[np.uint64], nbytes: NDArray[np.uint64], regions: Sequence[Region]
) -> bytes:
    """Return 16 bytes of xxh3 over the runs; all of them lie inside `regions`, on the host."""
    state = xxhash.xxh3_128()
    if not len(nbytes):
        return state.digest()
    if int(nbytes.min()) >= _LONG_RUN:
        for at, size in zip(address.tolist(), nbytes.tolist(), strict=True):
            state.update(memoryview((ctypes.c_uint8 * size).from_address(at)))
        return state.digest()
    ends = np.cumsum(nbytes)
    buffer = np.empty(_CHUNK_BYTES + int(nbytes.max()), dtype=np.uint8)
    target = Region("checksum", buffer.ctypes.data, buffer.nbytes)
    start = 0
    while start < len(nbytes):
        done = ends[start] - nbytes[start]
        stop = max(int(np.searchsorted(ends, done + np.uint64(_CHUNK_BYTES), "right")), start + 1)
        part = slice(start, stop)
        places = ends[part] - nbytes[part] - done + np.uint64(target.address)
        copy_runs(address[part], regions, places, [target], nbytes[part])
        state.update(buffer[: int(ends[stop - 1] - done)].data)
        start = stop
    return state.digest()
