"""What every page of a cluster test must contain: the oracle that all workers share.

Each word (one element's raw bits) is a pure function of the seed, the page's number, the
component and the *global* layer, head, slot and dim, so that any rank of any fleet can make and
check its own part without having seen another's. Nothing of kvconnect is imported here: an
oracle that shared code with what it judges would share its mistakes.

The function is a counter hash: fully mixed numbers for the row (page, component, slot, layer,
head) and for the place in it are joined by one multiply-and-fold. One 64-bit result gives 2 to
8 words, four passes of numpy make it: making content must not be what a test measures.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[Any]
"""Raw bits as uint8, uint16 or uint32: (page, slot, layer, head, dim)."""

_U64 = NDArray[np.uint64]
_COMPONENTS = {"k": 0, "v": 1}
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_FOLD = np.uint64(32)
_BLOCK_BYTES = 256 << 10  # what is made at once: it and its shifted copy stay in the L2 cache


def page_hash(seed: int, number: int) -> bytes:
    """Return the hash under which page `number` is stored: 16 bytes.

    >>> page_hash(1, 2) == page_hash(1, 2), page_hash(1, 2) == page_hash(2, 1)
    (True, False)
    """
    text = f"kvconnect cluster page/{seed}/{number}".encode()
    return hashlib.blake2b(text, digest_size=16).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The whole model's KV of any number of pages, made on demand.

    `itemsize` is the bytes of one element: 1, 2 or 4. `v_head_dim` 0 has no values (MLA).

    >>> c = Content(seed=1, page_size=4, head_dim=8, v_head_dim=8, itemsize=2)
    >>> c.pages([7], "k", range(0, 2), range(3, 4)).shape
    (1, 4, 2, 1, 8)
    """

    seed: int
    page_size: int
    head_dim: int
    v_head_dim: int
    itemsize: int

    def __post_init__(self) -> None:
        """Refuse what has no words."""
        if self.itemsize not in {1, 2, 4}:
            raise ValueError(f"content: itemsize is {self.itemsize}; it must be 1, 2 or 4")
        if sys.byteorder != "little":
            raise ValueError("content: words are cut from 64-bit numbers, little-endian only")

    @property
    def components(self) -> tuple[str, ...]:
        """Components with at least one element."""
        return tuple(name for name in _COMPONENTS if self.dim(name))

    def dim(self, component: str) -> int:
        """Return the elements of one head of `component` ("k" or "v")."""
        return {"k": self.head_dim, "v": self.v_head_dim}[component]

    def page_nbytes(self, layers: range, heads: range) -> int:
        """Return the bytes of one page of these global layers and heads."""
        rows = self.page_size * len(layers) * len(heads)
        return rows * (self.head_dim + self.v_head_dim) * self.itemsize

    def pages(self, numbers: Sequence[int], component: str, layers: range, heads: range) -> Words:
        """Make `component` of pages `numbers`: (page, slot, layer, head, dim) raw words."""
        dim = self.dim(component)
        per = 8 // self.itemsize
        wide = -(-dim // per)
        shape = (len(numbers), self.page_size, len(layers), len(heads))
        rows = self._rows(numbers, component, layers, heads).reshape(-1, 1)
        made = np.empty((len(rows), wide), dtype=np.uint64)
        self._fill(made, rows, _mix(np.arange(wide, dtype=np.uint64) + np.uint64(1)))
        words = made.view(f"<u{self.itemsize}").reshape(*shape, wide * per)
        return words[..., :dim]

    def wrong(
        self, numbers: Sequence[int], component: str, layers: range, heads: range, got: Words
    ) -> NDArray[np.int64]:
        """Count the words of `got` that are not as they must be: (pages,) int64.

        `got`: (page, slot, layer, head, dim) of the same pages; any strides.
        """
        counts = [
            np.count_nonzero(got[at] != self.pages([number], component, layers, heads)[0])
            for at, number in enumerate(numbers)
        ]
        return np.array(counts, dtype=np.int64)

    def _rows(self, numbers: Sequence[int], component: str, layers: range, heads: range) -> _U64:
        """Mix everything but the dim, one axis after the other: (page, slot, layer, head)."""
        start = f"{self.seed}/{_COMPONENTS[component]}".encode()
        digest = hashlib.blake2b(start, digest_size=8).digest()
        rows: _U64 = np.frombuffer(digest, dtype=np.uint64)
        for steps in (numbers, range(self.page_size), layers, heads):
            index = np.asarray(steps, dtype=np.uint64) + np.uint64(1)
            rows = _mix(rows[..., None] + index * _STEP)
        first: _U64 = rows[0]
        return first

    @staticmethod
    def _fill(made: _U64, rows: _U64, places: _U64) -> None:
        at_once = max(1, _BLOCK_BYTES // (8 * made.shape[1]))
        shifted = np.empty((min(at_once, len(made)), made.shape[1]), dtype=np.uint64)
        for start in range(0, len(made), at_once):
            block = made[start : start + at_once]
            np.bitwise_xor(rows[start : start + at_once], places, out=block)
            block *= _SECOND
            np.right_shift(block, _FOLD, out=shifted[: len(block)])
            block ^= shifted[: len(block)]


def _mix(values: _U64) -> _U64:
    """Mix 64-bit numbers so that every input bit moves every output bit (splitmix64)."""
    mixed = (values ^ (values >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    return mixed ^ (mixed >> np.uint64(31))
