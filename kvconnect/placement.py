"""A placement: which part of the model a rank holds, in half-open ranges of global axes.

Why it exists: a rank number says nothing about bytes. Two fleets of different TP and PP that
hold the same global heads and layers hold the same bytes, so everything that names bytes
(keys, resharding plans) is derived from global ranges and never from ranks.

Replication (GQA with more ranks than KV heads, MLA) is a placement too: `replicas` ranks hold
the same ranges, and each page has exactly one elected writer among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvconnect.errors import ConfigError, LayoutError


@dataclass(frozen=True, slots=True)
class Span:
    """The half-open range [start, stop) of a global axis of `total` steps.

    >>> Span(2, 4, 8).extent
    2
    """

    start: int
    stop: int
    total: int

    def __post_init__(self) -> None:
        """Check 0 <= start < stop <= total."""
        if any(type(v) is not int for v in (self.start, self.stop, self.total)):
            raise LayoutError(f"range {self!r} must be ints")
        if not 0 <= self.start < self.stop <= self.total:
            raise LayoutError(f"range [{self.start}, {self.stop}) is not inside [0, {self.total})")

    @property
    def extent(self) -> int:
        """Steps held."""
        return self.stop - self.start

    def meet(self, other: Span) -> Span | None:
        """Return the common range, or None; `LayoutError` if the totals differ."""
        if self.total != other.total:
            raise LayoutError(f"global extents differ: {self.total} here, {other.total} there")
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Span(start, stop, self.total) if start < stop else None

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop}) of {self.total}"


@dataclass(frozen=True, slots=True)
class Placement:
    """What one rank holds: global `layers` and KV `heads`, and its place among replicas.

    `replicas` ranks hold exactly these ranges; `replica` counts this one among them.
    `shards` holds further global axes that are cut between ranks and fix the bytes without
    being an axis of the pool, as (name, range): context-parallel slot ranges, for example.

    >>> Placement.tensor_parallel(layers=4, heads=8, rank=1, size=4).heads
    Span(start=2, stop=4, total=8)
    """

    layers: Span
    heads: Span
    replica: int = 0
    replicas: int = 1
    shards: tuple[tuple[str, Span], ...] = ()

    def __post_init__(self) -> None:
        """Check that `replica` counts within `replicas`; bring the shards into one order."""
        if not 0 <= self.replica < self.replicas:
            raise ConfigError(f"replica {self.replica} is not inside [0, {self.replicas})")
        shards = tuple(sorted(self.shards, key=lambda shard: shard[0]))
        if len(dict(shards)) != len(shards):
            raise ConfigError(f"shard names repeat: {[name for name, _ in shards]}")
        object.__setattr__(self, "shards", shards)

    @classmethod
    def whole(cls, *, layers: int, heads: int) -> Placement:
        """One rank that holds everything."""
        return cls(Span(0, layers, layers), Span(0, heads, heads))

    @classmethod
    def tensor_parallel(
        cls,
        *,
        layers: int | Span,
        heads: int,
        rank: int,
        size: int,
        shards: Iterable[tuple[str, Span]] = (),
    ) -> Placement:
        """Place rank `rank` of `size` over `heads` KV heads of the whole model.

        With more ranks than heads each head is held by size // heads consecutive ranks, which
        is how the engines replicate GQA heads and MLA. `ConfigError` unless one of `heads`
        and `size` divides the other.
        """
        if size < 1 or not 0 <= rank < size:
            raise ConfigError(f"tp rank {rank} is not inside [0, {size})")
        if heads < 1 or (heads % size and size % heads):
            raise ConfigError(
                f"tp size {size} and total KV heads {heads}: one must divide the other"
            )
        span = layers if isinstance(layers, Span) else Span(0, layers, layers)
        each, replicas = max(heads // size, 1), max(size // heads, 1)
        first = (rank // replicas) * each
        held = Span(first, first + each, heads)
        return cls(span, held, rank % replicas, replicas, tuple(shards))

    def writes(self, page_digests: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Tell for which pages this rank is the elected writer: (pages,) bool.

        `page_digests` are 64 bits of each page's identity, (pages,) uint64: the same on every
        replica, so all agree without talking, and the duty rotates by page.
        """
        if self.replicas == 1:
            return np.ones(len(page_digests), dtype=np.bool_)
        turn = np.asarray(page_digests, dtype=np.uint64) % np.uint64(self.replicas)
        return np.asarray(turn == np.uint64(self.replica))

    def meet(self, other: Placement) -> Placement | None:
        """Return the ranges both hold (replication dropped), or None where they share nothing.

        Shards are no axis of a pool and cannot be narrowed: `LayoutError` where they overlap
        without being equal, since None would mean that there is nothing to copy.
        """
        layers, heads = self.layers.meet(other.layers), self.heads.meet(other.heads)
        mine, theirs = dict(self.shards), dict(other.shards)
        both = [(mine[name], theirs[name]) for name in mine.keys() & theirs.keys()]
        if layers is None or heads is None or any(a.meet(b) is None for a, b in both):
            return None
        if mine != theirs:
            raise LayoutError(
                f"shards overlap but differ: {self._shard_text()} here, {other._shard_text()} there"
            )
        return Placement(layers, heads, shards=self.shards)

    def _shard_text(self) -> str:
        return ", ".join(f"{name} {span}" for name, span in self.shards) or "none"


def check_tiling(placements: Sequence[Placement]) -> None:
    """Check that the elected writers cover every (layer, head) of the model exactly once.

    Raises `LayoutError` naming the first cell that is missing or written twice. A group of
    replicas must be complete: r ranks with distinct `replica` numbers.
    """
    if not placements:
        raise LayoutError("no placements: at least one rank must hold the model")
    first = placements[0]
    shape = (first.layers.total, first.heads.total)
    for shards in {p.shards for p in placements}:
        count = np.zeros(shape, dtype=np.int64)
        groups: dict[tuple[Span, Span, int], set[int]] = {}
        for placement in placements:
            if placement.shards == shards:
                _count_writer(placement, shape, count, groups)
        _require_once(count, groups)


def _count_writer(
    placement: Placement,
    shape: tuple[int, int],
    count: NDArray[np.int64],
    groups: dict[tuple[Span, Span, int], set[int]],
) -> None:
    if (placement.layers.total, placement.heads.total) != shape:
        raise LayoutError(
            f"placements disagree on the model: {shape} and "
            f"{(placement.layers.total, placement.heads.total)} (layers, heads)"
        )
    group = groups.setdefault((placement.layers, placement.heads, placement.replicas), set())
    if placement.replica in group:
        raise LayoutError(
            f"replica {placement.replica} of layers {placement.layers}, heads "
            f"{placement.heads} appears twice"
        )
    if not group:
        cells = np.s_[
            placement.layers.start : placement.layers.stop,
            placement.heads.start : placement.heads.stop,
        ]
        count[cells] += 1
    group.add(placement.replica)


def _require_once(count: NDArray[np.int64], groups: dict[tuple[Span, Span, int], set[int]]) -> None:
    wrong = np.argwhere(count != 1)
    if len(wrong):
        layer, head = (int(v) for v in wrong[0])
        raise LayoutError(
            f"layer {layer}, head {head} has {int(count[layer, head])} writers; it must have one"
        )
    for (layers, heads, replicas), group in groups.items():
        if len(group) != replicas:
            missing = sorted(set(range(replicas)) - group)
            raise LayoutError(
                f"replicas {missing} of layers {layers}, heads {heads} are missing: their "
                f"pages would have no writer"
            )
