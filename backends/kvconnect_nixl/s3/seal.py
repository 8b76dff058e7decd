"""The trailer of every object: what proves that the bytes before it are the key's, all of them.

Why in the object: an S3 server replaces an object as a whole, so payload and proof are of one
version without an index to keep in step. Why at the end: the payload stays at offset 0, and a
truncated object loses its proof. NIXL reports nothing about a read that came short, so the place
where the trailer will land is cleared beforehand and followed by a random mark: what comes back
whole, with the mark untouched, ended exactly there.
"""

from __future__ import annotations

import os
import struct
import time
from typing import NamedTuple

import xxhash

from kvconnect.backend import Status

_MAGIC = b"kvc-s3\x00\x01"
_BODY = struct.Struct("<8sQQQ32s")
_CHECK = struct.Struct("<Q")
NBYTES = _BODY.size + _CHECK.size
"""Bytes of a trailer."""
MARK = 16
"""Random bytes after it while it is read."""


class Seal(NamedTuple):
    """A trailer: payload bytes, expiry in ms since 1970 (0: none), payload checksum, key."""

    nbytes: int
    expiry: int
    checksum: int
    key: bytes

    def pack(self) -> bytes:
        """Encode, with a check over itself."""
        body = _BODY.pack(_MAGIC, *self)
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def unpack(tail: bytes) -> Seal | None:
    """Decode; None where this is no whole trailer."""
    if len(tail) != NBYTES or tail[: len(_MAGIC)] != _MAGIC:
        return None
    body = tail[: _BODY.size]
    if _CHECK.unpack_from(tail, _BODY.size)[0] != xxhash.xxh3_64_intdigest(body):
        return None
    return Seal(*_BODY.unpack(body)[1:])


def checksum(key: bytes, payload: bytes | memoryview) -> int:
    """Return xxh3_64 of the payload seeded by its key: equal bytes under two keys differ in it."""
    return int(xxhash.xxh3_64_intdigest(payload, seed=xxhash.xxh3_64_intdigest(key)))


def sealed(key: bytes, payload: bytes | memoryview, expiry: int = 0) -> Seal:
    """Make the trailer of a payload."""
    return Seal(len(payload), expiry, checksum(key, payload), key)


def verdict(size: int | None, tail: bytes, key: bytes, nbytes: int, now: int) -> tuple[Status, str]:
    """Judge an object by its size (None: there is none) and its last bytes.

    OK says that it is the key's, `nbytes` long and not expired at `now` (ms); the payload has
    not been looked at.
    """
    if size is None:
        return Status.ABSENT, ""
    seal = unpack(tail)
    if seal is None:
        return _unsealed(size, tail, nbytes)
    if seal.key != key:
        return Status.IDENTITY, "the object was stored under another key"
    if size != nbytes + NBYTES or seal.nbytes != nbytes:
        return Status.SIZE_MISMATCH, f"{seal.nbytes} B stored, {nbytes} B asked for"
    return (Status.ABSENT, "expired") if 0 < seal.expiry <= now else (Status.OK, "")


def _unsealed(size: int, tail: bytes, nbytes: int) -> tuple[Status, str]:
    if size != nbytes + NBYTES:
        return Status.SIZE_MISMATCH, (
            f"an object of {size} B without a whole trailer, {nbytes} B and {NBYTES} B of trailer "
            f"expected"
        )
    if tail[: len(_MAGIC)] == _MAGIC:
        return Status.CHECKSUM, "its trailer is damaged"
    return Status.IDENTITY, f"an object of {size} B that has no trailer of kvconnect's"


def clear_tail(view: memoryview) -> bytes:
    """Clear the place of a trailer and set a mark behind it; `view` holds both."""
    mark = os.urandom(MARK)
    view[:NBYTES] = bytes(NBYTES)
    view[NBYTES : NBYTES + MARK] = mark
    return mark


def now_ms() -> int:
    """Return the time that expiries are measured in: ms since 1970, shared by hosts."""
    return time.time_ns() // 1_000_000
