"""What is checked and prepared before a connector attaches a pool to a backend."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvconnect.errors import ConfigError
from kvconnect.identity import Identity
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
        step = int(np.lcm.reduce([granularity(layout) for layout in layouts]))
        out += chunks(region, step, max_bytes, layouts[0].offset)
    return out
