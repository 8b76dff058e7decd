"""What is checked and prepared before a connector attaches a pool to a backend."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvconnect.backend import Registration
from kvconnect.errors import ConfigError, RegionTooLargeError
from kvconnect.identity import Identity
from kvconnect.layout import Layout
from kvconnect.placement import Placement
from kvconnect.pool import Pool
from kvconnect.region import Region, chunks, granularity
from kvconnect.staging import StagingBuffer


def check_identity(identity: Identity, pool: Pool, placement: Placement) -> None:
    """Check that identity, pool and placement agree; `ConfigError` names both values."""
    pairs = (
        ("dtype", identity.dtype, pool.dtype),
        ("page_size", identity.page_size, pool.page_size),
        ("head_dim", identity.head_dim, pool.head_dim),
        ("v_head_dim", identity.v_head_dim, pool.v_head_dim),
        ("scale_scheme", identity.scale_scheme, pool.scale_scheme),
        ("layers", identity.layers, placement.layers.total),
        ("heads", identity.heads, placement.heads.total),
    )
    for name, said, is_ in pairs:
        if said != is_:
            raise ConfigError(f"identity says {name}={said!r}, pool and placement have {is_!r}")


def as_pool(pool: Any) -> Pool:
    """Return a pool as it is, or read an engine's host pool with `kvconnect.wrap`."""
    if isinstance(pool, Pool):
        return pool
    from kvconnect.foreign import wrap  # noqa: PLC0415 - foreign pools only

    return wrap(pool)


def register_pool(
    register: Callable[[Sequence[Region]], Registration],
    pool: Pool,
    staging: StagingBuffer | None,
    max_bytes: int | None,
) -> Registration:
    """Register what `registration_chunks` gives, in smaller chunks where `register` asks for it.

    `max_bytes` is what is known of the limit; a card may have a lower one that nobody told us.
    """
    while True:
        try:
            return register(registration_chunks(pool, staging, max_bytes))
        except RegionTooLargeError as error:
            if max_bytes is not None and error.max_region_bytes >= max_bytes:
                raise
            max_bytes = error.max_region_bytes


def registration_chunks(
    pool: Pool, staging: StagingBuffer | None, max_bytes: int | None
) -> list[Region]:
    """Return what to register, cut so that no page lies across two chunks.

    Staged plans let the backend touch the bounce buffer only, never the pool.
    """
    if staging is not None:
        return chunks(staging.region, staging.slot_nbytes, max_bytes)
    out: list[Region] = []
    for region in pool.regions:
        layouts = [plane.layout for plane in pool.planes if plane.region == region]
        if max_bytes is None or region.nbytes <= max_bytes:
            out.append(region)
            continue
        for part, start, inside in _parts(region, layouts):
            step = int(np.lcm.reduce([granularity(layout) for layout in inside]))
            out += chunks(part, step, max_bytes, inside[0].offset - start)
    return out


def _parts(region: Region, layouts: list[Layout]) -> Iterator[tuple[Region, int, list[Layout]]]:
    """Yield (part, its start, its layouts), cut between planes that do not interleave.

    K and V one after another in one allocation have steps and offsets of their own: no multiple
    of one need be a page boundary of the other.
    """
    groups: list[list[Layout]] = []
    for layout in sorted(layouts, key=lambda layout: layout.offset):
        if groups and layout.offset < max(before.end for before in groups[-1]):
            groups[-1].append(layout)
        else:
            groups.append([layout])
    if len(groups) == 1:
        yield region, 0, groups[0]
        return
    bounds = [0, *(group[0].offset for group in groups[1:]), region.nbytes]
    for number, (low, high) in enumerate(itertools.pairwise(bounds)):
        name = f"{region.name}.{number}"
        yield Region(name, region.address + low, high - low, region.device), low, groups[number]
