"""The trailer: what follows the bytes of every object and proves that they are right.

Mooncake may answer success with other bytes than were stored (an unfinished put, space that
was given to another object), and a put of a key that exists with success without storing. So
every object ends with its length, a checksum over bytes and key, and whose it is. An object
with an expiry has a longer trailer: its size in the store alone says that there is one.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Iterable
from typing import NamedTuple

import xxhash

from kvconnect.backend import Status

SLOT = 64
"""Bytes of the side buffer for one trailer."""
PLAIN, EXPIRING = 40, 53
"""Bytes. Apart by an odd number: no two objects of whole elements differ by it."""
PINNED = 1

_BODY = struct.Struct("<4sIQQQ")
_CHECK = struct.Struct("<Q")
_EXPIRY = struct.Struct("<Q5x")
_MAGIC = b"kvc1"
_IDENTITY_SEED = 0x6B76_6D6F_6F6E_6964


class Trailer(NamedTuple):
    """Decoded trailer; `expiry` in ms since 1970, 0 for never."""

    nbytes: int
    checksum: int
    flags: int
    expiry: int

    def expired(self) -> bool:
        """Tell whether its time has passed."""
        return 0 < self.expiry <= now_ms()

    def serves(self, wanted: Trailer) -> bool:
        """Tell whether an object with this trailer need not be stored again as `wanted`."""
        lasts = self.expiry == 0 or (wanted.expiry != 0 and self.expiry >= wanted.expiry)
        pinned = self.flags & wanted.flags & PINNED == wanted.flags & PINNED
        return self[:2] == wanted[:2] and lasts and pinned and not self.expired()


def nbytes_for(ttl: float | None) -> int:
    """Return the bytes of a trailer."""
    return PLAIN if ttl is None else EXPIRING


def pack(key: str, trailer: Trailer, *, expiring: bool) -> bytes:
    """Encode, with a check over trailer and key."""
    body = _BODY.pack(_MAGIC, trailer.flags, trailer.nbytes, trailer.checksum, _identity(key))
    tail = _EXPIRY.pack(trailer.expiry) if expiring else b""
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body + tail)) + tail


def unpack(key: str, data: bytes) -> Trailer | Status:
    """Decode; CHECKSUM where it is no trailer, IDENTITY where it is another key's."""
    if len(data) not in {PLAIN, EXPIRING}:
        return Status.CHECKSUM
    body, tail = data[: _BODY.size], data[PLAIN:]
    magic, flags, nbytes, checksum, identity = _BODY.unpack(body)
    right = _CHECK.unpack_from(data, _BODY.size)[0] == xxhash.xxh3_64_intdigest(body + tail)
    if magic != _MAGIC or not right:
        return Status.CHECKSUM
    if identity != _identity(key):
        return Status.IDENTITY
    return Trailer(nbytes, checksum, flags, _EXPIRY.unpack(tail)[0] if tail else 0)


def checksum(key: str, runs: Iterable[tuple[int, int]]) -> int:
    """Return xxh3_64 over runs of memory, (address, nbytes) each, seeded by the key."""
    state = xxhash.xxh3_64(seed=xxhash.xxh3_64_intdigest(key.encode()))
    for address, nbytes in runs:
        state.update((ctypes.c_ubyte * nbytes).from_address(address))
    return int(state.intdigest())


def expiry(ttl: float | None) -> int:
    """Return when `ttl` seconds from now will be; 0 for never."""
    return 0 if ttl is None else now_ms() + max(int(ttl * 1000), 1)


def now_ms() -> int:
    """Return the time that expiries are measured in: ms since 1970, shared by hosts."""
    return time.time_ns() // 1_000_000


def _identity(key: str) -> int:
    return int(xxhash.xxh3_64_intdigest(key.encode(), seed=_IDENTITY_SEED))
