"""Eviction policies, replayed over a trace of keys: how the store's policy was chosen.

Pure and small; the store itself walks its index (`kvconnect_nvme.victims`). Objects count one
each. `docs/design/2026-12-02-eviction.md` has the numbers.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Protocol

Key = Hashable


class Policy(Protocol):
    """A cache of a fixed number of objects."""

    def access(self, key: Key) -> bool:
        """Use `key`, inserting it if it is missing; tell whether it was there."""


class Lru:
    """Least recently used; with `promote` off, first in first out."""

    def __init__(self, size: int, *, promote: bool = True) -> None:
        """`size`: objects."""
        self._size, self._promote = size, promote
        self._kept: OrderedDict[Key, None] = OrderedDict()

    def access(self, key: Key) -> bool:
        """Use `key`."""
        if key in self._kept:
            if self._promote:
                self._kept.move_to_end(key)
            return True
        if len(self._kept) >= self._size:
            self._kept.popitem(last=False)
        self._kept[key] = None
        return False


class Clock:
    """First in first out; an object that was used goes to the end of the queue instead."""

    def __init__(self, size: int) -> None:
        """`size`: objects."""
        self._size = size
        self._used: OrderedDict[Key, bool] = OrderedDict()

    def access(self, key: Key) -> bool:
        """Use `key`."""
        if key in self._used:
            self._used[key] = True
            return True
        while len(self._used) >= self._size:
            oldest, used = self._used.popitem(last=False)
            if used:
                self._used[oldest] = False
        self._used[key] = False
        return False


class Sieve:
    """A hand walks from old to new over a queue that never changes order."""

    def __init__(self, size: int) -> None:
        """`size`: objects."""
        self._size = size
        self._used: dict[Key, bool] = {}
        self._hand: Iterator[Key] = iter(())

    def access(self, key: Key) -> bool:
        """Use `key`."""
        if key in self._used:
            self._used[key] = True
            return True
        if len(self._used) >= self._size:
            self._evict()
        self._used[key] = False
        return False

    def _evict(self) -> None:
        while True:
            # A snapshot of the order per round: what is inserted meanwhile waits for the next.
            key = next(self._hand, None)
            if key is None:
                self._hand = iter(list(self._used))
            elif key in self._used:
                if not self._used[key]:
                    del self._used[key]
                    return
                self._used[key] = False


class S3Fifo:
    """A small queue for newcomers, a main queue for what was used, a ghost of the rest."""

    def __init__(self, size: int) -> None:
        """`size`: objects, a tenth of them in the small queue."""
        self._small_size = max(size // 10, 1)
        self._size = size
        self._small: deque[Key] = deque()
        self._main: deque[Key] = deque()
        self._ghost: OrderedDict[Key, None] = OrderedDict()
        self._uses: dict[Key, int] = {}

    def access(self, key: Key) -> bool:
        """Use `key`."""
        if key in self._uses:
            self._uses[key] = min(self._uses[key] + 1, 3)
            return True
        while len(self._uses) >= self._size:
            self._evict()
        self._uses[key] = 0
        if self._ghost.pop(key, self) is None:
            self._main.append(key)
        else:
            self._small.append(key)
        return False

    def _evict(self) -> None:
        if self._small and (len(self._small) > self._small_size or not self._main):
            key = self._small.popleft()
            if self._uses[key]:
                self._uses[key] = 0
                self._main.append(key)
                return
            self._ghost[key] = None
            if len(self._ghost) > self._size:
                self._ghost.popitem(last=False)
            del self._uses[key]
            return
        key = self._main.popleft()
        if self._uses[key]:
            self._uses[key] -= 1
            self._main.append(key)
        else:
            del self._uses[key]


POLICIES: dict[str, Callable[[int], Policy]] = {
    "lru": Lru,
    "fifo": lambda size: Lru(size, promote=False),
    "clock": Clock,
    "sieve": Sieve,
    "s3fifo": S3Fifo,
}


def hit_rate(policy: Policy, trace: Iterable[Key]) -> float:
    """Return the fraction of accesses that were hits.

    >>> hit_rate(Sieve(2), "abab")
    0.5
    """
    hits = [policy.access(key) for key in trace]
    return sum(hits) / max(len(hits), 1)


def chat_trace(accesses: int, *, scans: bool, seed: int = 7) -> Iterator[Key]:
    """Yield page keys of conversations that grow by turns, and of one-off long documents.

    A turn reads every page of its conversation and adds some; which conversation speaks next
    is skewed to recent ones. All share a system prompt. With `scans`, one request in twenty
    is a document of 400 pages that nobody asks for again.
    """
    rng, made, number = random.Random(seed), 0, 0  # noqa: S311 - a trace, not a secret
    talks: list[tuple[int, int]] = []
    while made < accesses:
        if scans and rng.random() < 0.05:
            number += 1
            pages: list[Key] = [("scan", number, page) for page in range(400)]
        else:
            pages = list(_turn(rng, talks))
        yield from pages[: accesses - made]
        made += len(pages)


def _turn(rng: random.Random, talks: list[tuple[int, int]]) -> Iterator[Key]:
    if not talks or rng.random() < 0.2:
        talks.append((len(talks), 0))
    # Recent conversations go on more often: geometric in their age.
    at = max(len(talks) - 1 - int(rng.expovariate(1 / 25)), 0)
    name, length = talks.pop(at)
    length += rng.randint(2, 12)
    talks.append((name, length))
    yield from (("system", 0, page) for page in range(16))
    yield from (("talk", name, page) for page in range(length))
