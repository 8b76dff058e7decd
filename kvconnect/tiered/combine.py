"""What a plan may do so that every tier can take it: the intersection of capabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvconnect.backend import Capabilities
from kvconnect.errors import ConfigError
from kvconnect.tiered.options import TieredOptions


def combined(tiers: Sequence[Capabilities], options: TieredOptions) -> Capabilities:
    """Return what all tiers can take; `ConfigError` if no memory is common to them."""
    devices = tuple(one for one in tiers[0].devices if all(one in t.devices for t in tiers[1:]))
    if "cpu" not in devices:
        raise ConfigError(
            f"tiered: the tiers take memory on {[t.devices for t in tiers]}; all of them must "
            f"take host memory (cpu), through which copies between tiers go"
        )
    regions = [t.max_region_bytes for t in tiers if t.max_region_bytes is not None]
    leases = [t.lease_seconds for t in tiers if t.lease_seconds is not None]
    # Only require=all promises that the durable tier has it: else another may have taken it.
    durable = any if options.require == "all" else all
    return Capabilities(
        scatter_gather=all(t.scatter_gather for t in tiers),
        max_runs_per_object=min(t.max_runs_per_object for t in tiers),
        min_run_bytes=max(t.min_run_bytes for t in tiers),
        alignment=math.lcm(*(t.alignment for t in tiers)),
        devices=devices,
        atomic_store=all(t.atomic_store for t in tiers),
        durable=durable(t.durable for t in tiers),
        range_read=all(t.range_read for t in tiers),
        max_region_bytes=min(regions, default=None),
        lease_seconds=min(leases, default=None),
    )
