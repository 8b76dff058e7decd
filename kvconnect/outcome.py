"""Page-level results: what the objects of a page say together, and joint prefixes.

A page is a hit only when every object of it is OK; prefix lengths over several ranks or pools
are the largest length legal for all of them, never the minimum of each one's maximum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Outcome, Status


@dataclass(frozen=True, slots=True)
class Hits:
    """Which pages are present: `pages` is (pages,) bool, in the order asked.

    >>> Hits(np.array([True, True, False, True])).prefix
    2
    """

    pages: NDArray[np.bool_]

    @property
    def prefix(self) -> int:
        """How many leading pages are present."""
        missing = np.flatnonzero(~self.pages)
        return int(missing[0]) if len(missing) else len(self.pages)

    def __len__(self) -> int:
        return len(self.pages)

    def __repr__(self) -> str:
        return f"Hits({int(self.pages.sum())} of {len(self.pages)}, prefix {self.prefix})"


def page_status(objects: NDArray[np.uint8], per_page: int) -> NDArray[np.uint8]:
    """Reduce (pages * per_page,) object statuses to (pages,) page statuses.

    All OK is OK; all the same is that; a mix of OK and ABSENT is PARTIAL; in any other mix the
    highest status that is neither OK nor ABSENT stands for the page.
    """
    rows = objects.reshape(-1, per_page)
    worst = rows.max(axis=1)
    mixed = (worst == Status.ABSENT) & (rows != Status.ABSENT).any(axis=1)
    return np.where(mixed, np.uint8(Status.PARTIAL), worst).astype(np.uint8)


def page_outcome(
    objects: NDArray[np.uint8],
    causes: dict[int, str],
    per_page: int,
    page_nbytes: int,
    dirty: NDArray[np.bool_] | None,
) -> Outcome:
    """Build the page-level outcome from object statuses, causes by object and dirty flags.

    `dirty`: (objects,) bool, where a load may have changed the object's destination, also a
    good one: a page that did not come whole is dirty as soon as any byte of it changed.
    """
    status = page_status(objects, per_page)
    words: dict[int, str] = {}
    for at, cause in sorted(causes.items()):
        if objects[at] != Status.OK:
            words.setdefault(at // per_page, cause)
    for page in np.flatnonzero(status == Status.PARTIAL):
        row = objects[page * per_page : (page + 1) * per_page]
        missing = int((row != Status.OK).sum())
        words.setdefault(int(page), f"{missing} of {per_page} objects are absent")
    page_dirty = None
    if dirty is not None:
        page_dirty = dirty.reshape(-1, per_page).any(axis=1) & (status != Status.OK)
    good = int((status == Status.OK).sum())
    return Outcome(status, good * page_nbytes, words, page_dirty)


def spread(moved: Outcome, mine: NDArray[np.bool_]) -> Outcome:
    """Place the outcome of the elected pages among all pages asked for."""
    if mine.all():
        return moved
    status = np.full(len(mine), Status.NOT_WRITER, dtype=np.uint8)
    status[mine] = moved.status
    at = np.flatnonzero(mine)
    return Outcome(status, moved.nbytes, {int(at[i]): c for i, c in moved.causes.items()})


def joint_prefix(hits: Sequence[NDArray[np.bool_]]) -> int:
    """Return the prefix that every rank or pool can serve; 0 for none given.

    `hits` are (pages,) bool arrays over the same pages, one per rank or ALL_PAGES pool.
    """
    if not hits:
        return 0
    return Hits(np.logical_and.reduce(np.stack(list(hits)))).prefix


def joint_length(legal: Iterable[Iterable[int]]) -> int:
    """Return the largest prefix length that is legal for all pools; 0 if there is none.

    Pools that need only trailing pages (SWA, Mamba) can restore at some lengths and not at
    others, so each gives the set of lengths it can restore; the minimum of their maxima would
    not be legal for all (sglang#39147).

    >>> joint_length([{1, 2, 3}, {1, 3, 5}, {1, 2}])
    1
    """
    sets = [set(lengths) for lengths in legal]
    return max(set.intersection(*sets), default=0) if sets else 0
