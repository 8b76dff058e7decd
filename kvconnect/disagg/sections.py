"""A section: some layers of one pool. What is sent, checked and confirmed as one.

A request is over when its sections, from every rank, are all that the placements say. The KV
anchor is a pool like the others here, so nothing counts it apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

KV = "kv"
"""The name of the anchor pool in requests and messages; every other name is a side pool's."""

Layers = tuple[int, int]


class Section(NamedTuple):
    """The global layers [start, stop) of the pool named `pool`.

    >>> Section("mamba", 0, 2).meets(Section("mamba", 1, 3))
    True
    """

    pool: str
    start: int
    stop: int

    @property
    def layers(self) -> Layers:
        """The range as a pair, as it stands in messages."""
        return (self.start, self.stop)

    @property
    def extent(self) -> int:
        """How many layers."""
        return self.stop - self.start

    def meets(self, other: Section) -> bool:
        """Tell whether two sections share a layer."""
        return self.pool == other.pool and self.start < other.stop and other.start < self.stop

    def __str__(self) -> str:
        where = "" if self.pool == KV else f" of pool {self.pool!r}"
        return f"layers {self.layers}{where}"


def extent_of(sections: Iterable[Section]) -> int:
    """Return the layers of sections that do not meet, over all pools."""
    return sum(section.extent for section in sections)
