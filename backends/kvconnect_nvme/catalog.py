"""What is in the store, by key: presence, listing, removing, records. Touches no payload."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kvconnect.errors import ConfigError
from kvconnect_nvme import entry as codec
from kvconnect_nvme import keys as packing
from kvconnect_nvme.core import Core
from kvconnect_nvme.index import Index
from kvconnect_nvme.tables import Session
from kvconnect_nvme.words import EXPIRES, Words, blocks, words

CHUNK = 2000
"""Keys removed per transaction, so that other writers get their turn."""
MAX_RECORD_BYTES = 64 << 10
_NOTHING = bytes(codec.NBYTES)


def exists(core: Core, keys: Sequence[str], nbytes: Sequence[int]) -> NDArray[np.bool_]:
    """Tell which keys are present with exactly these sizes, by one lookup of all.

    The entries' own checks are left to the load: a damaged one then is a miss.
    """
    if len(keys) != len(nbytes):
        raise ConfigError(f"nvme: exists got {len(keys)} keys and {len(nbytes)} sizes")
    wanted = np.fromiter(nbytes, dtype=np.uint64, count=len(nbytes))
    own = packing.own_bytes(keys)
    packed = packing.pack_all(keys) if own is None else []
    with core.env.read() as session:
        view = core.env.presence.view(session)
        if view is None:
            return _by_entries(core.index(session), packed or packing.pack_all(keys), wanted)
        seed = view.pending.seed
        found = view.find(words(blocks(packed, seed) if own is None else own, wanted, seed))
        out: NDArray[np.bool_] = found > 0
        # What has an expiry is there only until then, which the entry knows.
        ask = np.flatnonzero(found & EXPIRES)
        if len(ask):
            some = packing.pack_all([keys[i] for i in ask.tolist()])
            out[ask] = _by_entries(core.index(session), some, wanted[ask])
    return out


def _by_entries(index: Index, packed: list[bytes], wanted: Words) -> NDArray[np.bool_]:
    raws = index.raw(packed)
    whole = [raw if raw and len(raw) == codec.NBYTES else _NOTHING for raw in raws]
    table = np.frombuffer(b"".join(whole), dtype=codec.DTYPE)
    expired = (table["expiry"] > 0) & (table["expiry"] <= codec.now_ms())
    return np.asarray((table["nbytes"] == wanted) & (wanted > 0) & ~expired)


def remove(core: Core, keys: Sequence[str]) -> NDArray[np.bool_]:
    """Remove keys; True where a live one was there."""
    packed = packing.pack_all(keys)
    removed: list[bool] = []
    for at in range(0, len(packed), CHUNK):
        part = packed[at : at + CHUNK]
        removed += core.env.write(lambda session, part=part: _remove(core, session, part))  # type: ignore[misc]
    return np.array(removed, dtype=np.bool_)


def _remove(core: Core, session: Session, packed: Sequence[bytes]) -> list[bool]:
    index, now, out = core.index(session), codec.now_ms(), list[bool]()
    for key in packed:
        entry = index.find(key)
        live = entry is not None and not entry.expired(now)
        out.append(index.delete(key) and live)
    return out


def list_keys(core: Core, prefix: str) -> list[str]:
    """Return the live keys that begin with `prefix`, sorted."""
    now, out = codec.now_ms(), list[str]()
    with core.env.read() as session:
        index = core.index(session)
        found = index.list_keys(prefix)
        for key, raw in zip(found, index.raw(found), strict=True):
            if raw is not None and len(raw) == codec.NBYTES and not codec.trusted(raw).expired(now):
                out.append(packing.unpack(key))
    return sorted(out)


def clear(core: Core, prefix: str) -> int:
    """Remove all keys that begin with `prefix`, and nothing else; return how many."""
    removed = 0

    def change(session: Session) -> tuple[int, int]:
        cursor = session.cursor(session.tables.entries)
        found = list(islice(packing.with_prefix(cursor, prefix), CHUNK))
        return len(found), sum(_remove(core, session, found))

    while (done := core.env.write(change))[0]:
        removed += done[1]
    return removed


def put_record(core: Core, name: str, value: bytes) -> None:
    """Store or replace a record."""
    key = name.encode()
    if not 1 <= len(key) <= packing.MAX_PACKED:
        raise ConfigError(
            f"nvme: record name of {len(key)} B; it must have 1 to {packing.MAX_PACKED} B"
        )
    if len(value) > MAX_RECORD_BYTES:
        raise ConfigError(
            f"nvme: record {name!r} has {len(value)} B; at most {MAX_RECORD_BYTES} B are kept"
        )
    core.env.write(lambda session: session.txn.put(key, value, db=session.tables.records))


def records(core: Core) -> dict[str, bytes]:
    """Return all records."""
    with core.env.read() as session:
        cursor = session.cursor(session.tables.records)
        return {bytes(key).decode(): bytes(value) for key, value in cursor}
