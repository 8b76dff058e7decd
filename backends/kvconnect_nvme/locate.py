"""Where an object's bytes lie and whether they are what was stored: for people, not transfers."""

from __future__ import annotations

from collections.abc import Sequence

from kvconnect.backend import Location
from kvconnect_nvme import entry as codec
from kvconnect_nvme import keys as packing
from kvconnect_nvme.core import Core
from kvconnect_nvme.entry import Entry
from kvconnect_nvme.maintenance import digest
from kvconnect_nvme.slabs import DEVICE_BASE


def locate(core: Core, keys: Sequence[str]) -> list[Location | None]:
    """Return one location for each key; None where it is absent, expired or not readable.

    Every object is read. One that is replaced meanwhile is None: what was read is not its own.
    """
    return [_locate(core, key) for key in packing.pack_all(keys)]


def _locate(core: Core, key: bytes) -> Location | None:
    raw = _look_up(core, key)
    entry = None if raw is None else codec.unpack(key, raw)
    if entry is None or entry.identity != packing.identity(key) or entry.expired(codec.now_ms()):
        return None
    read = digest(core, key, entry)
    if _look_up(core, key) != raw:
        return None
    number, offset = divmod(entry.address, core.slabs.slab_bytes)
    return Location(
        path=str(core.slabs.file(number)),
        offset=entry.address + DEVICE_BASE if core.slabs.device else offset,
        nbytes=entry.nbytes,
        intact=_verdict(entry, read),
        pinned=entry.pinned,
        expires=entry.expiry / 1000 if entry.expiry else None,
    )


def _verdict(entry: Entry, read: int | None) -> bool | None:
    if read is None:
        return False
    return read == entry.checksum if entry.flags & codec.HASHED else None


def _look_up(core: Core, key: bytes) -> bytes | None:
    with core.env.read() as session:
        return core.index(session).raw([key])[0]
