"""Which objects are moved together: neighbours in the file become one large read or write."""

from __future__ import annotations

from collections.abc import Mapping

from kvconnect.batch_memory import BatchMemory
from kvconnect_nvme.engine import Group
from kvconnect_nvme.options import NvmeOptions, up
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
    total = sum(up(int(memory.sizes[i])) for i in places)
    limit = min(max(total // options.io_threads, SMALLEST), largest)
    # No more than the bounce buffers hold: neighbours must not fail where each alone would fit.
    limits = {False: limit, True: min(limit, BOUNCED, options.bounce)}
    groups: list[Group] = []
    run: list[int] = []
    end = start = 0
    for i in sorted(places, key=places.__getitem__):
        address, room = places[i], up(int(memory.sizes[i]))
        joins = (
            run
            and address == end
            and address % slabs.slab_bytes
            and _bounced(memory, i) == _bounced(memory, run[0])
            and address + room - start <= limits[_bounced(memory, i)]
        )
        if not joins:
            if run:
                groups.append(_make(run, places, end, memory, slabs))
            run, start = [], address
        run.append(i)
        end = address + room
    if run:
        groups.append(_make(run, places, end, memory, slabs))
    return groups


def _bounced(memory: BatchMemory, index: int) -> bool:
    return bool(memory.short[index] or not memory.aligned[index])


def _make(
    run: list[int], places: Mapping[int, int], end: int, memory: BatchMemory, slabs: Slabs
) -> Group:
    start = places[run[0]]
    fd, offset = slabs.locate(start)
    return Group(
        slab=start // slabs.slab_bytes,
        fd=fd,
        offset=offset,
        nbytes=end - start,
        objects=tuple(run),
        starts=tuple(places[i] - start for i in run),
        bounced=_bounced(memory, run[0]),
    )
