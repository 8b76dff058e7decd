"""The index entry of one object: a fixed struct with a check of its own.

An entry carries where the payload lies and what it must hash to, and 32 bits over itself and
its key: a flipped byte in the index, or an entry under another key, is found before any
payload is read.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash
from numpy.typing import NDArray

_FORMAT = struct.Struct("<QQQQIBxxx")
_CHECK = struct.Struct("<I")
ENTRY_NBYTES = _FORMAT.size + _CHECK.size
_COLUMNS = np.dtype(
    {
        "names": ["nbytes", "expiry"],
        "formats": ["<u8", "<u4"],
        "offsets": [8, 32],
        "itemsize": ENTRY_NBYTES,
    }
)

PINNED = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored object.

    `address`: linear store address in bytes; `nbytes`: exact length; `checksum`: xxh3-64 of
    the payload seeded with the key, 0 where checksums were off; `seq`: store-wide number of
    this version; `expiry`: Unix seconds, 0 for never.
    """

    address: int
    nbytes: int
    checksum: int
    seq: int
    expiry: int = 0
    flags: int = 0

    @property
    def pinned(self) -> bool:
        """Eviction skips this object."""
        return bool(self.flags & PINNED)

    def moved(self, address: int, seq: int) -> Entry:
        """Return the same object at another place, as a new version."""
        return replace(self, address=address, seq=seq)

    def pack(self, key: bytes) -> bytes:
        """Encode, with the check over entry and key."""
        body = _FORMAT.pack(
            self.address, self.nbytes, self.checksum, self.seq, self.expiry, self.flags
        )
        return body + _CHECK.pack(xxhash.xxh32_intdigest(body + key))


def unpack(key: bytes, data: bytes) -> Entry | None:
    """Decode; None where the entry is damaged or belongs to another key."""
    if len(data) != ENTRY_NBYTES:
        return None
    body = bytes(data[: _FORMAT.size])
    if _CHECK.unpack_from(data, _FORMAT.size)[0] != xxhash.xxh32_intdigest(body + key):
        return None
    return Entry(*_FORMAT.unpack(body))


def seed_of(key: bytes) -> int:
    """Seed the payload checksum with the key, so that swapped objects do not verify."""
    return xxhash.xxh3_64_intdigest(key)


def pack_key(key: str) -> bytes:
    """Pack a key: lower-case hex of even length in half the bytes, all else as UTF-8."""
    if len(key) % 2 == 0 and key and _is_hex(key):
        return b"h" + bytes.fromhex(key)
    return b"u" + key.encode("utf-8")


def pack_keys(keys: Sequence[str]) -> list[bytes]:
    """Pack many keys; equally long hex keys, the usual case, in one pass over all of them."""
    length = len(keys[0]) if keys else 0
    if length == 0 or length % 2 or any(len(key) != length for key in keys):
        return [pack_key(key) for key in keys]
    joined = "".join(keys)
    if not _is_hex(joined):
        return [pack_key(key) for key in keys]
    raw, step = bytes.fromhex(joined), length // 2
    return [b"h" + raw[at : at + step] for at in range(0, len(raw), step)]


def sizes_and_expiry(entries: Sequence[bytes]) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    """Read size and expiry of many packed entries at once, without checking them."""
    table = np.frombuffer(b"".join(entries), dtype=_COLUMNS)
    return table["nbytes"], table["expiry"]


def unpack_key(data: bytes) -> str:
    """Undo `pack_key`."""
    return data[1:].hex() if data[:1] == b"h" else data[1:].decode("utf-8")


def _is_hex(text: str) -> bool:
    return not text.strip("0123456789abcdef")
