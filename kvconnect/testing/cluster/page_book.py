"""The pages of a worker's pool: what lies in each, and whether it still does.

A free page is never empty: it is painted with a pattern of its own, as if somebody else used
it. So a byte that arrives after its page was handed out again is seen: at the next look, or when
the page is taken for the next call. What a call brought is compared with
`kvconnect.testing.cluster.content`, which knows nothing of plans, strides or ranks.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvconnect.errors import CapacityError
from kvconnect.hostpool import HostPool
from kvconnect.placement import Placement
from kvconnect.testing.cluster.content import Content

_STEP = 0x9E3779B1

Pages = NDArray[np.int64]
"""Page ids of this pool, (pages,)."""


class PageBook:
    """Hands out the pages of one pool, and takes them back painted.

    Used by one thread. `numbers` are content numbers; `ratio` of them lie in one page.
    """

    def __init__(self, pool: HostPool, placement: Placement, content: Content) -> None:
        """Paint all pages. They are handed out in an order of this rank's own."""
        layers, heads = placement.layers, placement.heads
        self._held = range(layers.start, layers.stop), range(heads.start, heads.stop)
        self._content, self._size = content, pool.page_size
        self.ratio = pool.page_size // content.page_size
        # An MLA pool has one component, which the content calls "k".
        self._arrays = [(name[0], pool.array(name)) for name in pool.components]
        self.page_nbytes = content.page_nbytes(*self._held) * self.ratio
        self._paints = np.zeros(pool.pages, dtype=np.uint32)
        self._painted = 0
        self._former: dict[int, tuple[int, ...]] = {}
        order = list(range(pool.pages))
        random.Random(f"{content.seed} {placement}").shuffle(order)  # noqa: S311 - no secret
        self._free: deque[int] = deque()
        self.give(np.array(order, dtype=np.int64), ())

    @property
    def free(self) -> int:
        """How many pages are free."""
        return len(self._free)

    def take(self, numbers: Sequence[int]) -> Pages:
        """Return free pages for these numbers, the longest free ones; `CapacityError` if few."""
        count = -(-len(numbers) // self.ratio)
        if count > len(self._free):
            raise CapacityError(
                f"{len(numbers)} numbers need {count} pages, {len(self._free)} are free of "
                f"{len(self._paints)}; let requests end, or give the pool more pages"
            )
        return np.array([self._free.popleft() for _ in range(count)], dtype=np.int64)

    def give(self, pages: Pages, numbers: Sequence[int]) -> None:
        """Use pages for something else from now on: nothing may reach them any more."""
        for at, page in enumerate(pages.tolist()):
            self._former[page] = tuple(numbers[at * self.ratio : (at + 1) * self.ratio])
        self._paint(pages)
        self._free.extend(pages.tolist())

    def fill(self, pages: Pages, numbers: Sequence[int], layers: range) -> None:
        """Write the content of some global layers, which this rank holds."""
        cut = slice(layers.start - self._held[0].start, layers.stop - self._held[0].start)
        for name, array in self._arrays:
            for ids, part in self._groups(pages, numbers):
                words = self._content.pages(part, name, layers, self._held[1])
                slots = len(part) * self._content.page_size // len(ids)
                page_wise = words.reshape(len(ids), slots, *words.shape[2:]).transpose(
                    0, 2, 1, 3, 4
                )
                target = array[ids, cut, :slots]
                array[ids, cut, :slots] = page_wise.reshape(target.shape)

    def wrong(self, pages: Pages, numbers: Sequence[int]) -> list[int]:
        """Return those of the numbers of which any byte is not as it must be."""
        bad = np.zeros(len(numbers), dtype=np.int64)
        for name, array in self._arrays:
            got = array[pages]
            got = got.reshape(*got.shape[:3], -1, got.shape[-1]).transpose(0, 2, 1, 3, 4)
            got = got.reshape(-1, self._content.page_size, *got.shape[2:])[: len(numbers)]
            bad += self._content.wrong(numbers, name, *self._held, got)
        return [number for number, count in zip(numbers, bad.tolist(), strict=True) if count]

    def spilled(self, pages: Pages, numbers: Sequence[int]) -> list[int]:
        """Return the last number where slots behind it, which belong to nobody, have changed."""
        slots = len(numbers) * self._content.page_size - (len(pages) - 1) * self._size
        last = pages[-1:]
        intact = all(
            (a[last][:, :, slots:] == self._patterns(a, last)).all() for _, a in self._arrays
        )
        return [] if intact else [numbers[-1]]

    def changed(self) -> list[int]:
        """Return the former numbers of free pages whose paint is not whole; tells each once.

        A page that never held any is told as -1.
        """
        ids = np.array(self._free, dtype=np.int64)
        intact = np.ones(len(ids), dtype=np.bool_)
        for _, array in self._arrays:
            same = array[ids] == self._patterns(array, ids)
            intact &= same.all(axis=tuple(range(1, same.ndim)))
        found = ids[~intact]
        self._paint(found)
        return [number for page in found.tolist() for number in self._former[page] or (-1,)]

    def _groups(
        self, pages: Pages, numbers: Sequence[int]
    ) -> Iterator[tuple[Pages, Sequence[int]]]:
        """Yield the full pages, then the last one if it is not full."""
        full = len(numbers) // self.ratio
        if full:
            yield pages[:full], numbers[: full * self.ratio]
        if full < len(pages):
            yield pages[full:], numbers[full * self.ratio :]

    def _paint(self, pages: Pages) -> None:
        first = self._painted + 1
        self._painted += len(pages)
        counts = np.arange(first, first + len(pages), dtype=np.uint64)
        self._paints[pages] = (counts * np.uint64(_STEP)) >> np.uint64(8)
        for _, array in self._arrays:
            array[pages] = self._patterns(array, pages)

    def _patterns(self, array: NDArray[Any], pages: Pages) -> NDArray[Any]:
        """Return what the elements of pages are painted with, to be broadcast."""
        values = self._paints[pages].astype(array.dtype)
        return values.reshape(-1, *(1,) * (array.ndim - 1))
