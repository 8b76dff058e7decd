"""Keys as the index holds them: hex packed to half its length, everything else as UTF-8.

kvconnect's keys are 64 hex digits; at ten million objects the packing halves the index. Two
tags keep the forms apart, so that no two keys ever pack to the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import lmdb
import xxhash

from kvconnect.errors import ConfigError

MAX_CHARACTERS = 256
MAX_PACKED = 500
"""Bytes; LMDB takes keys up to 511."""

OWN_BYTES = 32
"""Of a key shaped like kvconnect's own: a digest, in hex."""
_OWN_CHARACTERS = 2 * OWN_BYTES
_HEX, _TEXT = b"\x01", b"\x02"
_LOWER_HEX = re.compile(r"[0-9a-f]*\Z")
_IDENTITY_SEED = 0x6B76_6964_656E_7469


def pack(key: str) -> bytes:
    r"""Pack one key; `ConfigError` if it is empty or too long.

    >>> pack("ab12"), pack("abc")
    (b'\x01\xab\x12', b'\x02abc')
    """
    try:
        packed = bytes.fromhex(key)
        # fromhex also takes capitals and blanks, which must not fold onto another key.
        if packed and packed.hex() == key and len(key) <= MAX_CHARACTERS:
            return _HEX + packed
    except ValueError:
        pass
    return _pack_text(key)


def _pack_text(key: str) -> bytes:
    try:
        packed = _TEXT + key.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"nvme: key {key!r} is not valid Unicode") from None
    if not key or len(key) > MAX_CHARACTERS or len(packed) > MAX_PACKED:
        raise ConfigError(
            f"nvme: key of {len(key)} characters, {len(packed)} B; it must have 1 to "
            f"{MAX_CHARACTERS} characters and at most {MAX_PACKED} B as UTF-8"
        )
    return packed


def pack_all(keys: Sequence[str]) -> list[bytes]:
    """Pack many keys; those shaped like kvconnect's own, 64 hex digits each, all at once."""
    packed = own_bytes(keys)
    if packed is None:
        return [pack(key) for key in keys]
    return [_HEX + packed[at : at + OWN_BYTES] for at in range(0, len(packed), OWN_BYTES)]


def own_bytes(keys: Sequence[str]) -> bytes | None:
    """Return the bytes of keys that all have 64 hex digits, 32 B each; None if one has not."""
    joined = "".join(keys)
    if len(joined) == _OWN_CHARACTERS * len(keys) and set(map(len, keys)) == {_OWN_CHARACTERS}:
        with suppress(ValueError):
            packed = bytes.fromhex(joined)
            # As in `pack`; blanks would also make it shorter.
            if len(packed) == OWN_BYTES * len(keys) and joined.lower() == joined:
                return packed
    return None


def is_own(packed: bytes) -> bool:
    """Tell whether a packed key is one of 64 hex digits."""
    return len(packed) == 1 + OWN_BYTES and packed[:1] == _HEX


def unpack(packed: bytes) -> str:
    """Return the key that was packed."""
    return packed[1:].hex() if packed[:1] == _HEX else packed[1:].decode()


def identity(packed: bytes) -> int:
    """Return the 64-bit digest that an entry carries to prove whose it is."""
    return int(xxhash.xxh3_64_intdigest(packed, seed=_IDENTITY_SEED))


def seed(packed: bytes) -> int:
    """Return the seed of a key's checksums: equal bytes under two keys differ in it."""
    return int(xxhash.xxh3_64_intdigest(packed))


def with_prefix(cursor: lmdb.Cursor, prefix: str) -> Iterator[bytes]:
    """Yield the packed keys, in the cursor's table, of keys that begin with `prefix`."""
    if _LOWER_HEX.match(prefix):
        odd = len(prefix) % 2
        start = _HEX + bytes.fromhex(prefix + "0" * odd)
        yield from _from(cursor, start, lambda key: key[:1] == _HEX and _fits(key, prefix))
    try:
        start = _TEXT + prefix.encode()
    except UnicodeEncodeError:
        return
    yield from _from(cursor, start, lambda key: key.startswith(start))


def _fits(key: bytes, prefix: str) -> bool:
    return key[1 : 2 + len(prefix) // 2].hex().startswith(prefix)


def _from(cursor: lmdb.Cursor, start: bytes, fits: Callable[[bytes], bool]) -> Iterator[bytes]:
    found = cursor.set_range(start)
    while found and fits(key := bytes(cursor.key())):
        yield key
        found = cursor.next()
