"""Fleets of ranks over pools of any layout, filled and checked by a formula of global indices.

The oracle knows a token's number, its layer, head, dim and component, and nothing of plans,
strides or placements' code: what must lie where is computed from those five numbers alone.
"""

import ctypes
from dataclasses import dataclass

import numpy as np

from kvconnect.disagg.conform import Side
from kvconnect.hostpool import HostPool
from kvconnect.placement import Placement, Span


@dataclass(frozen=True)
class Fleet:
    """One side: `tp` ranks times the stages whose layer counts are `stages`."""

    layout: str
    tp: int
    page_size: int
    pages: int
    stages: tuple[int, ...]
    heads: int
    dims: tuple[int, int | None]
    head_blocks: int | None = None

    def sides(self):
        total, out, start = sum(self.stages), [], 0
        for layers in self.stages:
            span = Span(start, start + layers, total)
            for rank in range(self.tp):
                place = Placement.tensor_parallel(
                    layers=span, heads=self.heads, rank=rank, size=self.tp
                )
                pool = HostPool.allocate(
                    layout=self.layout,
                    pages=self.pages,
                    page_size=self.page_size,
                    layers=layers,
                    heads=place.heads.extent,
                    head_dim=self.dims[0],
                    v_head_dim=self.dims[1],
                    dtype="int16",
                    head_blocks=self.head_blocks,
                )
                out.append(Side(pool, place))
            start += layers
        return out


def truth(component, tokens, layers, heads, dims):
    """Value of every element: (token, layer, head, dim) -> int16, by plain arithmetic."""
    token, layer, head, dim = np.meshgrid(tokens, layers, heads, np.arange(dims), indexing="ij")
    salt = sum(component.encode())
    mixed = token * 7919 + layer * 611953 + head * 104729 + dim * 31 + salt * 1299709
    return (mixed % 65521).astype(np.uint16).view(np.int16)


def grid(side, component):
    """A rank's component as (page, layer, slot, head, dim), block axes joined."""
    array = side.pool.array(component)
    if array.ndim == 6:
        page, layer, slot, block, head, dim = array.shape
        return array.reshape(page, layer, slot, block * head, dim)
    return array


def expected(side, component, pages, tokens):
    """What `pages` must hold once tokens 0 .. `tokens` lie in them, (token, layer, head, dim)."""
    place, dims = side.placement, grid(side, component).shape[-1]
    return truth(
        component,
        np.arange(tokens),
        np.arange(place.layers.start, place.layers.stop),
        np.arange(place.heads.start, place.heads.stop),
        dims,
    )


def rows_of(side, component, pages):
    """What `pages` do hold, (token, layer, head, dim)."""
    found = grid(side, component)[np.asarray(pages, dtype=np.int64)]
    return found.transpose(0, 2, 1, 3, 4).reshape(-1, *(found.shape[i] for i in (1, 3, 4)))


def fill(side, pages, tokens):
    """Write the truth of tokens 0 .. `tokens` into `pages`; everything else gets noise."""
    rng = np.random.default_rng(len(pages))
    size = side.pool.page_size
    for component in side.pool.components:
        view = side.pool.array(component)
        view[...] = rng.integers(0, 1 << 16, view.shape).astype(view.dtype)
        values = expected(side, component, pages, tokens).view(view.dtype)
        for token in range(tokens):
            target = view[int(pages[token // size]), :, token % size]
            target[...] = values[token].reshape(target.shape)


def move(source, target, nbytes):
    """Copy runs one by one."""
    for a, b, n in zip(source.tolist(), target.tolist(), nbytes.tolist(), strict=True):
        ctypes.memmove(b, a, n)


def u64(values):
    """Return values as page ids or addresses."""
    return np.array(values, dtype=np.uint64)
