"""Memory that is registered in chunks: what is granted whole, and runs that end where chunks do.

Cards take regions up to a size; larger allocations are registered in chunks of whole pages (and
of whole staging slots). A page lies in one chunk, but runs of pages that follow one another are
joined when a plan is expanded, and may lie in two.
"""

from __future__ import annotations

import itertools

import numpy as np

from kvconnect.backend import Registration
from kvconnect.disagg.ring import Ring
from kvconnect.disagg.transport import Peer, PeerTransport, Runs
from kvconnect.errors import ConfigError, RegionTooLargeError
from kvconnect.page_index import U64
from kvconnect.region import Region, RegionTable, chunks


def register_ring(transport: PeerTransport, ring: Ring) -> Registration:
    """Register a ring in as large chunks of whole slots as the transport takes."""
    most = transport.capabilities.max_region_bytes
    while True:
        try:
            return transport.register(chunks(ring.region, ring.slot_bytes, most))
        except RegionTooLargeError as error:
            if most is not None and error.max_region_bytes >= most:
                raise
            most = error.max_region_bytes


def check_granted(link: Peer, region: Region) -> None:
    """Raise `ConfigError` unless grants that follow one another cover all of a peer's region."""
    at = region.address
    for grant in link.grants.regions:
        if grant.address <= at < grant.end:
            at = grant.end
    if at < region.end:
        raise ConfigError(
            f"the peer's pool lies in {region.name!r} ({region.nbytes} B at "
            f"{region.address:#x}), which its transport does not grant"
        )


def cut_runs(runs: Runs, local: RegionTable, remote: RegionTable) -> Runs:
    """Cut runs where one region follows another on either side: each lies in one on both."""
    runs = _cut(runs, runs.local, local)
    return _cut(runs, runs.remote, remote)


def _cut(runs: Runs, address: U64, table: RegionTable) -> Runs:
    pairs = itertools.pairwise(table.regions)
    edges = [high.address for low, high in pairs if low.end == high.address]
    if not edges:
        return runs  # a run that leaves a region here is one that no transport takes
    starts = np.array(edges, dtype=np.uint64)
    end = address + runs.nbytes
    first = np.searchsorted(starts, address, side="right")
    extra = np.searchsorted(starts, end, side="left") - first
    if (extra <= 0).all():
        return runs
    counts = np.maximum(extra, 0) + 1
    run = np.repeat(np.arange(len(runs)), counts)
    number = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    # A part begins where the run does or where a region does, and ends with the next one.
    bounds = np.append(starts, np.uint64(0))
    begin = np.where(number == 0, address[run], bounds[first[run] + number - 1])
    stop = np.where(number == counts[run] - 1, end[run], bounds[first[run] + number])
    moved = begin - address[run]
    return Runs(runs.local[run] + moved, runs.remote[run] + moved, stop - begin)
