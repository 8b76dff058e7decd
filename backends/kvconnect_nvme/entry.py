"""One object's entry in the index: where its bytes lie and what proves that they are right.

An entry carries a check over itself and its key. LMDB pages have no checksum, so a flipped
byte in the index file would otherwise point at another object's bytes.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvconnect_nvme import keys
from kvconnect_nvme.options import up

PINNED, HASHED = 1, 2
"""Flags: eviction skips the object; `checksum` was computed when it was stored."""

_BODY = struct.Struct("<QQQQQQI")
_CHECK = struct.Struct("<I")
NBYTES = _BODY.size + _CHECK.size

DTYPE = np.dtype([
    ("address", "<u8"), ("nbytes", "<u8"), ("checksum", "<u8"), ("identity", "<u8"),
    ("seq", "<u8"), ("expiry", "<u8"), ("flags", "<u4"), ("check", "<u4"),
])  # fmt: skip


class Entry(NamedTuple):
    """Decoded entry; `address` in the store's linear space, `expiry` in ms since 1970 or 0."""

    address: int
    nbytes: int
    checksum: int
    identity: int
    seq: int
    expiry: int
    flags: int

    @property
    def room(self) -> int:
        """Bytes of its extent: whole blocks."""
        return up(self.nbytes)

    @property
    def pinned(self) -> bool:
        """Whether eviction skips it."""
        return bool(self.flags & PINNED)

    def expired(self, now: int) -> bool:
        """Tell whether its time has passed at `now` (ms)."""
        return 0 < self.expiry <= now

    def pack(self, key: bytes) -> bytes:
        """Encode with the check over entry and packed key."""
        body = _BODY.pack(*self)
        return body + _CHECK.pack(xxhash.xxh32_intdigest(key + body))


def unpack(key: bytes, value: bytes) -> Entry | None:
    """Decode; None where the entry was damaged or does not belong to the key."""
    if len(value) != NBYTES:
        return None
    body = value[: _BODY.size]
    if _CHECK.unpack_from(value, _BODY.size)[0] != xxhash.xxh32_intdigest(key + body):
        return None
    return Entry(*_BODY.unpack(body))


def trusted(value: bytes) -> Entry:
    """Decode without looking at the check."""
    return Entry(*_BODY.unpack_from(value))


def misplaced(key: bytes, value: bytes) -> bool:
    """Tell whether a damaged entry is whole but another key's."""
    return len(value) == NBYTES and trusted(value).identity != keys.identity(key)


def table(values: list[bytes]) -> NDArray[np.void]:
    """Decode many entries at once, without their checks: (entries,) of `DTYPE`."""
    whole = [value for value in values if len(value) == NBYTES]
    return np.frombuffer(b"".join(whole), dtype=DTYPE)


def rows(entries: Sequence[Entry]) -> NDArray[np.void]:
    """Return entries as a table: (entries,) of `DTYPE`, without their checks."""
    return np.array([(*entry, 0) for entry in entries], dtype=DTYPE)


def pack_all(keys: Sequence[bytes], entries: NDArray[np.void]) -> list[bytes]:
    """Encode a table, each entry with the check over itself and its packed key."""
    packed, body = entries.tobytes(), _BODY.size
    starts = range(0, len(packed), NBYTES)
    bodies = [packed[at : at + body] for at in starts]
    checks = [xxhash.xxh32_intdigest(k + b) for k, b in zip(keys, bodies, strict=True)]
    return [b + _CHECK.pack(check) for b, check in zip(bodies, checks, strict=True)]


def now_ms() -> int:
    """Return the time that expiries are measured in: ms since 1970, shared by processes."""
    return time.time_ns() // 1_000_000
