"""Hit policies: from which pages are present to the prefix lengths that can be restored.

Why sets of lengths: a window that ends on a page (Mamba states, sliding attention) may be
complete at 512 and 1024 and not at 768. The engine intersects the lengths of all its ranks;
the minimum of each one's maximum would be legal for none of them. All functions are pure and
vectorised; `present` is (pages,) bool in prefix order, a *mask* of lengths is (pages + 1,)
bool with index L saying whether the first L pages can be restored. Length 0 always can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvconnect.errors import ConfigError
from kvconnect.outcome import Hits

Bools = NDArray[np.bool_]

ALL_PAGES, TRAILING_PAGES, BLOCK_GROUPS = "all_pages", "trailing_pages", "block_groups"


def all_pages(present: Bools) -> Bools:
    """Return the mask of a pool that is needed for every page of a prefix.

    >>> all_pages(np.array([True, True, False, True])).tolist()
    [True, True, True, False, False]
    """
    return np.arange(len(present) + 1) <= Hits(present).prefix


def trailing_pages(present: Bools, window: int) -> Bools:
    """Return the mask of a pool that is needed for the last `window` pages of a prefix.

    A prefix shorter than the window needs all of its pages.

    >>> trailing_pages(np.array([True, False, True, True]), 2).tolist()
    [True, True, False, False, True]
    """
    lengths = np.arange(len(present) + 1)
    missing = np.concatenate(([0], np.cumsum(~present)))
    first = np.maximum(lengths - window, 0)
    return np.asarray(missing[lengths] == missing[first])


def block_groups(present: Bools, block_pages: int, group_pages: int) -> int:
    """Return how many leading pages are covered by complete groups, a multiple of a block.

    A block is `block_pages` pages counted from the first; its group has the keys of its last
    `group_pages` pages. Not its first: a page hash fixes what comes before it, so only the keys
    that end at the block's boundary fix the whole block. Pages of a block that is not whole
    have no group.

    >>> block_groups(np.array([False, True, False, True, False]), 2, 1)
    4
    """
    whole = len(present) // block_pages
    blocks = present[: whole * block_pages].reshape(whole, block_pages)
    complete = np.asarray(blocks[:, block_pages - group_pages :].all(axis=1))
    return block_pages * Hits(complete).prefix


@dataclass(frozen=True, slots=True)
class Side:
    """What one side pool has of the pages that are asked for, and how it is needed.

    `present`: (pages,) bool, at least over the pages that KV has. `window` is for
    TRAILING_PAGES, `block_pages` and `group_pages` are for BLOCK_GROUPS.
    """

    pool: str
    policy: str
    present: Bools
    window: int = 1
    block_pages: int = 0
    group_pages: int = 0

    def __post_init__(self) -> None:
        """Refuse a policy or geometry that cannot be; `ConfigError` names pool and numbers."""
        if self.policy not in {ALL_PAGES, TRAILING_PAGES, BLOCK_GROUPS}:
            raise ConfigError(f"pool {self.pool}: hit policy {self.policy!r} is not known")
        if self.window < 1:
            raise ConfigError(f"pool {self.pool}: a window of {self.window} pages")
        if self.policy == BLOCK_GROUPS and not 1 <= self.group_pages <= self.block_pages:
            raise ConfigError(
                f"pool {self.pool}: groups of {self.group_pages} keys in blocks of "
                f"{self.block_pages} pages; a group has 1 key at least and a block's at most"
            )

    @property
    def gates(self) -> bool:
        """Whether a prefix cannot be restored without this pool."""
        return self.policy != BLOCK_GROUPS

    def mask(self, pages: int) -> Bools:
        """Return which lengths of at most `pages` this pool allows: (pages + 1,) bool."""
        if not self.gates:
            return np.ones(pages + 1, dtype=np.bool_)
        if len(self.present) < pages:
            raise ConfigError(
                f"pool {self.pool}: presence of {len(self.present)} pages, KV has {pages}"
            )
        present = self.present[:pages]
        if self.policy == ALL_PAGES:
            return all_pages(present)
        return trailing_pages(present, self.window)

    def verdict(self, mask: Bools) -> int:
        """Return the pool's own boundary in pages, given its `mask`."""
        if self.gates:
            return int(np.flatnonzero(mask)[-1])
        return block_groups(self.present, self.block_pages, self.group_pages)


@dataclass(frozen=True, slots=True)
class Joint:
    """What KV and all side pools can do together.

    `kv_hit_pages` is the largest of `lengths`, 0 if there is none; `lengths` are all lengths
    above 0 that are legal for KV and every gating pool, rising; `pools` is each pool's own
    verdict, whatever the others have: the largest length it allows within what KV has, or the
    pages its groups cover.
    """

    kv_hit_pages: int
    lengths: list[int]
    pools: dict[str, int]


def joint(kv: Bools, sides: Sequence[Side]) -> Joint:
    """Put the anchor's presence and those of its side pools together.

    Raises `ConfigError` where a gating pool's presence is shorter than what KV has.
    """
    pages = Hits(kv).prefix
    legal, pools = np.ones(pages + 1, dtype=np.bool_), dict[str, int]()
    for side in sides:
        mask = side.mask(pages)
        legal &= mask
        pools[side.pool] = side.verdict(mask)
    lengths: list[int] = (np.flatnonzero(legal[1:]) + 1).tolist()
    return Joint(lengths[-1] if lengths else 0, lengths, pools)
