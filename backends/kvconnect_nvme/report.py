"""What a store says about itself."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from kvconnect_nvme.core import Core
from kvconnect_nvme.tables import Counters

log = logging.getLogger("kvconnect.nvme")


def counters(core: Core) -> Counters:
    """Return the store's counters as of now."""
    with core.env.read() as session:
        return session.counters


def stats(core: Core) -> dict[str, int | float | str]:
    """Return sizes (bytes) and counts; `moved` figures are this process's own."""
    with core.env.read() as session:
        now, (presence, presence_bytes) = session.counters, core.env.presence.state(session)
    with core.lock:
        own = {f"moved.{name}": number for name, number in core.counts.items()}
    return {
        "capacity_bytes": core.space.capacity,
        "total_bytes": now.total,
        "used_bytes": now.used,
        "free_bytes": now.free,
        "held_bytes": now.held,
        "index_bytes": core.env.nbytes(),
        "index_file_bytes": core.env.file_bytes(),
        "presence": presence,
        "presence_bytes": presence_bytes,
        "bounce_bytes": core.bounce.touched,
        "slab_bytes": core.slabs.slab_bytes,
        "objects": now.objects,
        "pinned": now.pinned,
        "evicted": now.evicted,
        "expired": now.expired,
        "healed": now.healed,
        "direct": "on" if core.slabs.direct else "off",
        "alignment": core.slabs.alignment,
        "durability": core.options.durability,
        **core.engine.stats(),
        **own,
    }


def describe(core: Core, path: Path) -> str:
    """Return one line that says what and how full it is."""
    now = counters(core)
    direct = "O_DIRECT" if core.slabs.direct else "page cache"
    return (
        f"NvmeBackend({path}, {now.objects} objects, {now.used} of {core.space.capacity} B, "
        f"{direct}, io={core.engine.name}, durability={core.options.durability})"
    )


def announce(core: Core, path: Path, *, device: bool) -> None:
    """Log what was opened and what it may come to take, before anything is allocated."""
    log.info("nvme: %s, up to %d B of bounce buffers", describe(core, path), core.bounce.limit)
    room = os.statvfs(path)
    free, more = room.f_bavail * room.f_frsize, core.space.capacity - counters(core).total
    if not device and more > free:
        log.warning(
            "nvme: capacity=%d B needs %d B more at %s, where %d B are free; puts will evict "
            "within what there is",
            core.space.capacity,
            more,
            path,
            free,
        )
