"""The record in the index that goes with the presence table: which file, and what it lacks.

A write transaction must not touch the table before it is committed. It leaves what it changed
here instead, and the next one, under the writer lock, brings the table up to date first.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from kvconnect_nvme.words import EXPIRES, Words, blocks, lookup, words

NAME = "presence"
_HEAD = struct.Struct("<QQQQQ")
_SUM = struct.Struct("<Q")

Changed = Mapping[tuple[bytes, int], bool | None]
"""By packed key and object size: gone (None), or there without (False) or with an expiry."""


def _none() -> Words:
    return np.empty(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Pending:
    """What one transaction left.

    `txn`: its number; `generation`: the table's file; `live`: whether there is a table; `seed`:
    of the words; `gone`, `there`: sorted words, no object in both.
    """

    txn: int = 0
    generation: int = 0
    live: bool = False
    seed: int = 0
    gone: Words = field(default_factory=_none)
    there: Words = field(default_factory=_none)

    def pack(self) -> bytes:
        """Encode."""
        head = _HEAD.pack(self.txn, self.generation, self.live, self.seed, len(self.gone))
        body = head + self.gone.tobytes() + self.there.tobytes()
        return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def unpack(cls, value: bytes | None) -> Pending:
        """Decode; nothing and no table where there is none or a byte has changed."""
        if value is None or len(value) < _HEAD.size + _SUM.size:
            return cls()
        body = value[: -_SUM.size]
        if _SUM.unpack_from(value, len(body))[0] != xxhash.xxh3_64_intdigest(body):
            return cls()
        txn, generation, live, seed, gone = _HEAD.unpack_from(body)
        both = np.frombuffer(body, dtype=np.uint64, offset=_HEAD.size)
        return cls(txn, generation, bool(live), seed, both[:gone], both[gone:])

    def words(self, packed: Sequence[bytes], nbytes: Sequence[int] | Words) -> Words:
        """Return the words of objects, as without an expiry."""
        return words(blocks(packed, self.seed), np.array(nbytes, dtype=np.uint64), self.seed)

    def changes(self, changed: Changed) -> tuple[Words, Words]:
        """Return what a transaction changed as (gone, there)."""
        if not changed:
            return _none(), _none()
        found = self.words([key for key, _ in changed], [size for _, size in changed])
        how = np.array([2 if one is None else one for one in changed.values()], dtype=np.uint64)
        there = how <= EXPIRES
        return np.sort(found[~there]), np.sort(found[there] | how[there])

    def over(self, found: Words, asked: Words) -> Words:
        """Bring what the table said about the words `asked` up to this transaction."""
        if len(self.gone):
            found = np.where(lookup(self.gone, asked) == 0, found, np.uint64(0))
        if len(self.there):
            there = lookup(self.there, asked)
            found = np.where(there == 0, found, there)
        return found
