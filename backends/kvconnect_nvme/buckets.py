"""A hash set of words over an array that readers look at while one writer changes it.

Buckets of eight words are one cache line each. A word lies in one of two buckets, chosen by
itself; the emptier one takes it. It never moves afterwards, or a reader could look for it in
one bucket before and in the other after: a full pair of buckets means a larger table, not a
shuffle. Every change is one aligned store of eight bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvconnect_nvme.words import EXPIRES, Words, same

WIDTH = 8
"""Words per bucket."""
BUCKET_BYTES = 8 * WIDTH
_CHUNK = 1 << 15
"""Buckets looked at at once, to bound memory: 2 MiB."""
_ASKED = 2048
"""Words looked for at once: their buckets stay in the processor's cache until compared."""
_OTHER = np.uint64(0xD6E8FEB86659FD93)


class Buckets:
    """The set; `rows`: (buckets, 8) uint64, a power of two of them.

    Invariants: a word is in one place at most, and that is in one of its two buckets; 0 is a
    free place.
    """

    __slots__ = ("_bits", "_flat", "rows")

    def __init__(self, rows: Words) -> None:
        """Work on `rows`, all zero or what an earlier set left there."""
        self.rows, self._flat = rows, rows.reshape(-1)
        self._bits = len(rows).bit_length() - 1

    def _choices(self, words: Words) -> NDArray[np.intp]:
        """Return the two buckets of each word: (2, words)."""
        return _bucket(np.array((words, _second(words))), self._bits)

    def find(self, words: Words) -> Words:
        """Return for each word the one of the same object in the set, with its bit, or 0."""
        out = np.empty_like(words)
        for at in range(0, len(words), _ASKED):
            out[at : at + _ASKED] = self._find(words[at : at + _ASKED])
        return out

    def _find(self, words: Words) -> Words:
        first, second = self._choices(words)
        found = _in_rows(self.rows, first, words)
        rest = np.flatnonzero(found == 0)
        found[rest] = _in_rows(self.rows, second[rest], words[rest])
        return found

    def add(self, words: Words) -> bool:
        """Put words in, in place of those of the same objects; False if the set is too small.

        Then some are in and some are not; adding all of them to a larger set is right.
        """
        if not len(words):
            return True
        at = self._places(words)
        known = at >= 0
        if known.any():
            self._flat[at[known]] = words[known]
            words = words[~known]
        return self._place(_distinct(words))

    def _place(self, words: Words) -> bool:
        while len(words):
            both = self._choices(words)
            used = (self.rows[both] != 0).sum(axis=2)
            if (used.min(axis=0) == WIDTH).any():
                return False
            bucket = np.where(used[1] < used[0], both[1], both[0])
            if len(words) == 1:
                self._put(bucket, words)
                break
            # One word per bucket and round, as the next one's place depends on it.
            bucket, turn = np.unique(bucket, return_index=True)
            self._put(bucket, words[turn])
            words = np.delete(words, turn)
        return True

    def _put(self, bucket: NDArray[np.intp], words: Words) -> None:
        self.rows[bucket, (self.rows[bucket] == 0).argmax(axis=1)] = words

    def remove(self, words: Words) -> None:
        """Take words out, those that are there."""
        if len(words):
            at = self._places(words)
            self._flat[at[at >= 0]] = 0

    def _places(self, words: Words) -> NDArray[np.intp]:
        """Return where each word lies in `_flat`, or -1."""
        out = np.full(len(words), -1, dtype=np.intp)
        both = self._choices(words)
        side, which, slot = same(self.rows[both], words[:, None]).nonzero()
        out[which] = both[side, which] * WIDTH + slot
        return out

    def count(self) -> int:
        """Return the number of words."""
        parts = range(0, len(self.rows), _CHUNK)
        return sum(int(np.count_nonzero(self.rows[at : at + _CHUNK])) for at in parts)

    def doubled(self) -> Iterator[Words]:
        """Yield the rows of a set twice as large with the same words, some at a time.

        Bucket i becomes 2i and 2i+1, by the next bit of the choice that had put the word there;
        so no bucket overflows, and no word has to be looked for.
        """
        for start in range(0, len(self.rows), _CHUNK):
            rows = self.rows[start : start + _CHUNK]
            here = np.arange(start, start + len(rows))[:, None]
            by_first = _bucket(rows, self._bits) == here
            chosen = np.where(by_first, rows, _second(rows))
            odd = _bucket(chosen, self._bits + 1) & 1 == 1
            out = np.zeros((len(rows), 2, WIDTH), dtype=np.uint64)
            out[:, 0][~odd] = rows[~odd]
            out[:, 1][odd] = rows[odd]
            yield out.reshape(-1, WIDTH)


def _bucket(hashes: Words, bits: int) -> NDArray[np.intp]:
    # Shifted twice, as a shift by all 64 bits (of a single bucket) is not defined.
    return (hashes >> np.uint64(63 - bits) >> np.uint64(1)).astype(np.intp)


def _second(words: Words) -> Words:
    # The expiry bit is no part of the choice.
    return (words & ~EXPIRES) * _OTHER


def _in_rows(rows: Words, bucket: NDArray[np.intp], words: Words) -> Words:
    lines = rows[bucket]
    hits = same(lines, words[:, None])
    # Eight flags are one number; comparing that is faster than `any` over a short axis.
    which = np.flatnonzero(hits.view(np.uint64).reshape(-1))
    slot = hits[which].argmax(axis=1)
    out = np.zeros(len(words), dtype=np.uint64)
    out[which] = lines[which, slot]
    return out


def _distinct(words: Words) -> Words:
    """Drop repeated words of one object."""
    if len(words) < 2:
        return words
    _, at = np.unique(words >> np.uint64(1), return_index=True)
    return words[at] if len(at) < len(words) else words
