"""Words: 64-bit hashes of (packed key, object size) under a secret seed, many at a time.

A word's lowest bit is not hash but says that the object has an expiry; 0 is no word. The seed is
the store's own, so that no one can choose keys whose words are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvconnect_nvme import keys

Words = NDArray[np.uint64]

EXPIRES = np.uint64(1)
_COLUMNS = 5
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_SHIFT = np.uint64(33)


def blocks(packed: Sequence[bytes], seed: int) -> bytes:
    """Return 32 B for each packed key: kvconnect's own as they are, others by their digest."""
    # A keyed 128-bit digest written twice is not an own key but by a chance of 2**-128.
    return b"".join(
        [key[1:] if keys.is_own(key) else xxhash.xxh3_128_digest(key, seed) * 2 for key in packed]
    )


def words(block: bytes, nbytes: Words, seed: int) -> Words:
    """Return a word for each 32 B of `block` with its size: (keys,) uint64, never 0 or odd."""
    if not len(nbytes):
        return np.empty(0, dtype=np.uint64)
    columns = np.empty((_COLUMNS, len(nbytes)), dtype=np.uint64)
    columns[:-1] = np.frombuffer(block, dtype="<u8").reshape(len(nbytes), _COLUMNS - 1).T
    columns[-1] = nbytes
    # Each column is mixed under a seed of its own before they are added: differences that
    # cancel in a plain multiply-and-xor chain, whatever the seed, do not cancel here.
    columns ^= _seeds(seed)
    found = _mixed(_mixed(columns).sum(axis=0, dtype=np.uint64))
    found &= ~EXPIRES
    found[found == 0] = 2
    return found


@lru_cache(maxsize=64)
def _seeds(seed: int) -> Words:
    steps = np.arange(1, _COLUMNS + 1, dtype=np.uint64) * _GOLDEN
    return _mixed(steps + np.uint64(seed)).reshape(_COLUMNS, 1)


def _mixed(x: Words) -> Words:
    """Mix in place: every bit of the result depends on every bit; equal only where equal."""
    x ^= x >> _SHIFT
    x *= _FIRST
    x ^= x >> _SHIFT
    x *= _SECOND
    x ^= x >> _SHIFT
    return x


def same(one: Words, other: Words) -> NDArray[np.bool_]:
    """Tell which words are of the same object, with or without an expiry."""
    return (one ^ other) <= EXPIRES


def lookup(table: Words, asked: Words) -> Words:
    """Return for each word asked for the one of the same object in a sorted table, or 0."""
    if not len(table):
        return np.zeros_like(asked)
    # Found from the even form, whichever of the two the table has.
    at = np.minimum(np.searchsorted(table, asked & ~EXPIRES), len(table) - 1)
    return np.where(same(table[at], asked), table[at], np.uint64(0))
