"""Filling an index with objects that were never written, to measure what size does to it.

The index is real, the payload is missing: `exists`, listing and opening behave as in a store
of that many objects, loads are misses by checksum or by a read past the end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from kvconnect_nvme import entry as codec
from kvconnect_nvme import keys
from kvconnect_nvme.core import Core
from kvconnect_nvme.entry import Entry
from kvconnect_nvme.options import BLOCK, up
from kvconnect_nvme.store import open_store
from kvconnect_nvme.tables import Session

CHUNK = 100_000
"""Objects per transaction."""


def simulated_key(number: int) -> str:
    """Return the key of simulated object `number`: 64 hex digits, one namespace."""
    return "00" * 8 + hashlib.blake2b(number.to_bytes(8, "big"), digest_size=24).hexdigest()


def fill(location: str, objects: int, nbytes: int = BLOCK) -> float:
    """Create a store at `location` with so many objects of `nbytes`; return index B per object.

    The keys are `simulated_key(0)` and so on.
    """
    room = up(nbytes)
    options = {"capacity": str(2 * objects * room + (1 << 20)), "durability": "none"}
    with open_store(location, options) as store:
        core = store.core
        for start in range(0, objects, CHUNK):
            part = range(start, min(start + CHUNK, objects))
            core.env.write(lambda session, part=part: _publish(core, session, part, nbytes))  # type: ignore[misc]
        return core.env.nbytes() / objects


def _publish(core: Core, session: Session, part: range, nbytes: int) -> None:
    packed, entries = [], []
    for number, address in zip(part, _places(core, part, up(nbytes)), strict=True):
        slab = address // core.slabs.slab_bytes
        core.slabs.file(slab).touch(mode=0o600)
        session.set_slab(slab, address % core.slabs.slab_bytes + up(nbytes))
        key = keys.pack(simulated_key(number))
        identity = keys.identity(key)
        packed.append(key)
        entries.append(Entry(address, nbytes, number, identity, 0, 0, codec.HASHED))
    core.index(session).publish(packed, codec.rows(entries))


def _places(core: Core, part: range, room: int) -> Iterator[int]:
    per_slab = core.slabs.slab_bytes // room
    for number in part:
        slab, at = divmod(number, per_slab)
        yield slab * core.slabs.slab_bytes + at * room
