"""What a client says about itself."""

from __future__ import annotations

from collections.abc import Sequence

from kvconnect.registering import Memory
from kvconnect_mooncake import transport
from kvconnect_mooncake.core import Core
from kvconnect_mooncake.job import Job
from kvconnect_mooncake.trailer import SLOT


def stats(core: Core, memory: Memory, jobs: Sequence[Job]) -> dict[str, int | float | str]:
    """Return sizes (bytes), counts and states; all of this client, not of the whole store."""
    with core.lock:
        counts = dict(core.counts)
    return {
        "transport_asked": core.options.protocol,
        "transport_in_use": transport.in_use(),
        "host": core.client.host,
        "segment_bytes": core.options.segment,
        "registered_bytes": memory.nbytes,
        "side_bytes": core.slots.region.nbytes,
        "side_used_bytes": core.slots.used * SLOT,
        "entries": core.budget.total,
        "entries_used": core.budget.used,
        "transfers": sum(not job.done() for job in jobs),
        "quarantine_chunks": len(core.keeper),
        "quarantine_bytes": core.keeper.nbytes,
        "puts_open": core.claims.held,
        "breakers_open": ", ".join(core.breakers.open()) or "none",
        "breaker_trips": core.breakers.trips,
        **counts,
    }


def describe(core: Core) -> str:
    """Return a few words that say what it is."""
    proof = "checksum" if core.options.checksum else "no checksum"
    return (
        f"{transport.in_use()}, segment {core.options.segment} B, {core.options.replicas} "
        f"replicas, {proof}"
    )
