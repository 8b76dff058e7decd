"""A pool: planes that share page ids. The one type that everything else plans with.

A plane is one buffer of the pool: a region, a layout inside it, and which components it
holds. `kvconnect.hostpool` allocates pools, `kvconnect.wrap` reads those of an engine; both
give this type, and nothing after it knows which engine or named layout it was.

Axis names: ``page layer slot head dim`` and ``component`` where one buffer holds several.
A head axis that lies in memory as blocks of heads is the pair ``head_block`` (outer) and
``head`` (inner). A plane without a ``head`` axis is one opaque row per page and layer: it goes
with every head group unless it is cut by none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvconnect.cover import cover
from kvconnect.errors import LayoutError, PageIndexError
from kvconnect.layout import Layout
from kvconnect.region import Region, RegionTable

U64 = NDArray[np.uint64]

_ENGINE_ORDER = ("head_block", "head_group", "layer", "slot", "head")
"""How engines enumerate the runs of a page, outermost first; components come last."""


@dataclass(frozen=True, slots=True)
class Plane:
    """One buffer: `region`, `layout` (offset relative to the region) and its `components`.

    Invariants: the layout has a ``page`` axis and ends inside the region; ``component`` is an
    axis iff there is more than one component, with one step for each.
    """

    region: Region
    layout: Layout
    components: tuple[str, ...]

    def __post_init__(self) -> None:
        """Check the invariants of the class."""
        name = "+".join(self.components) or "?"
        if "page" not in self.layout:
            raise LayoutError(f"plane {name}: no 'page' axis in {list(self.layout.names)}")
        if self.layout.end > self.region.nbytes:
            raise LayoutError(
                f"plane {name}: the layout ends at byte {self.layout.end}, its region "
                f"{self.region} has {self.region.nbytes} B"
            )
        axes = self.layout.axis("component").extent if "component" in self.layout else 1
        if axes != len(self.components) or not self.components:
            raise LayoutError(
                f"plane {name}: {len(self.components)} components, the axis has {axes} steps"
            )

    @property
    def address(self) -> int:
        """Absolute address of page 0."""
        return self.region.address + self.layout.offset

    def heads(self) -> int | None:
        """Return the local heads, None for a plane without a head axis."""
        if "head" not in self.layout:
            return None
        outer = self.layout.axis("head_block").extent if "head_block" in self.layout else 1
        return outer * self.layout.axis("head").extent

    def select(self, component: str) -> Layout:
        """Return the layout of one component."""
        if "component" not in self.layout:
            return self.layout
        return self.layout.select("component", self.components.index(component))


def narrow_heads(layout: Layout, start: int, stop: int) -> Layout:
    """Keep local heads [start, stop), across ``head_block`` where the heads lie in blocks.

    Raises `LayoutError` when the range cuts through more than one block unevenly.
    """
    if "head" not in layout:
        return layout
    if "head_block" not in layout:
        return layout.narrow("head", start, stop)
    block = layout.axis("head").extent
    first, last = start // block, (stop - 1) // block
    if first == last:
        inside = layout.narrow("head_block", first, first + 1)
        return inside.narrow("head", start - first * block, stop - first * block)
    if start % block or stop % block:
        raise LayoutError(
            f"heads [{start}, {stop}) cut through blocks of {block}: not one strided range"
        )
    return layout.narrow("head_block", first, last + 1)


@dataclass(frozen=True)
class Pool:
    """Planes that share page ids; also the geometry they were cross-checked against.

    `pages` pages of `page_size` slots; `heads` local KV heads, `layers` local layers;
    `head_dim`, `v_head_dim` in elements (0 where a component does not exist); `dtype` by its
    torch name. `owner` keeps the memory alive; kvconnect never frees what it wraps.
    """

    planes: tuple[Plane, ...]
    page_size: int
    layers: int
    heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    label: str = "pool"
    scale_scheme: str | None = None
    owner: Any = None

    def __post_init__(self) -> None:
        """Check that there is memory, and that all planes agree on pages and slots."""
        if not self.planes:
            raise LayoutError(f"pool {self.label!r} has no planes: nothing to describe")
        for field in ("page_size", "layers", "heads", "head_dim"):
            value = getattr(self, field)
            if type(value) is not int or value < 1:
                raise LayoutError(f"pool {self.label!r}: {field} is {value!r}; it must be >= 1")
        for plane in self.planes:
            self._check_plane(plane)

    def _check_plane(self, plane: Plane) -> None:
        name = "+".join(plane.components)
        wanted = {
            "page": self.pages,
            "slot": self.page_size,
            "layer": self.layers,
        }
        for axis, extent in wanted.items():
            if axis in plane.layout and plane.layout.axis(axis).extent != extent:
                raise LayoutError(
                    f"pool {self.label!r}: plane {name} has {plane.layout.axis(axis).extent} "
                    f"steps of {axis!r}, the pool says {extent}"
                )
        if plane.heads() not in (None, self.heads):
            raise LayoutError(
                f"pool {self.label!r}: plane {name} has {plane.heads()} heads, the pool says "
                f"{self.heads}"
            )

    @property
    def pages(self) -> int:
        """Pages of the pool."""
        return self.planes[0].layout.axis("page").extent

    @property
    def components(self) -> tuple[str, ...]:
        """All components, in plane order."""
        return tuple(c for plane in self.planes for c in plane.components)

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page over all planes, without padding."""
        return sum(p.layout.nbytes for p in self.planes) // self.pages

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The distinct allocations behind the planes."""
        return tuple(dict.fromkeys(plane.region for plane in self.planes))

    @cached_property
    def table(self) -> RegionTable:
        """Bounds table over `regions`."""
        return RegionTable(self.regions)

    def page_ids(self, token_indices: Any) -> U64:
        """Turn an engine's token indices into page ids: (pages,) uint64.

        `token_indices` (tensor, array or sequence of ints) must be whole, aligned, contiguous
        pages inside the pool, each page once; `PageIndexError` names the first that is not,
        before any descriptor exists. Empty is a no-op.
        """
        index = as_index_array(token_indices)
        size = self.page_size
        if len(index) % size:
            raise PageIndexError(
                f"{len(index)} token indices are not whole pages of {size}; pad or drop the "
                f"last {len(index) % size}"
            )
        rows = index.reshape(-1, size)
        first = rows[:, 0]
        self._check_rows(rows, first)
        return self.check_page_ids(first // size)

    def _check_rows(self, rows: NDArray[np.int64], first: NDArray[np.int64]) -> None:
        bad = np.flatnonzero(first % self.page_size)
        if len(bad):
            at = int(bad[0])
            raise PageIndexError(
                f"page {at} starts at token index {int(first[at])}, which is no multiple of "
                f"page_size {self.page_size}"
            )
        steps = rows != first[:, None] + np.arange(self.page_size)
        if steps.any():
            at = int(np.flatnonzero(steps.any(axis=1))[0])
            raise PageIndexError(
                f"page {at} (token index {int(first[at])}) is not {self.page_size} consecutive "
                f"tokens: {rows[at][:8].tolist()} ..."
            )

    def check_page_ids(self, page_ids: Any) -> U64:
        """Check page ids (distinct, inside the pool) and return them as (pages,) uint64."""
        ids = as_index_array(page_ids)
        if not len(ids):
            return ids.astype(np.uint64)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.pages:
            wrong = low if low < 0 else high
            raise PageIndexError(f"page {wrong} is outside the pool of {self.pages} pages")
        if len(ids) > 1 and int(np.bincount(ids - low).max()) > 1:
            values, counts = np.unique(ids, return_counts=True)
            raise PageIndexError(f"page {int(values[counts > 1][0])} appears twice in one call")
        return ids.astype(np.uint64)

    def page_buffer_meta(self, token_indices: Any) -> tuple[U64, U64]:
        """Return (addresses, nbytes), each (runs,) uint64, in the engine's own order.

        One run per page and component where the layout allows, else one per layer too: page
        by page, then layer, then component. Raises `PageIndexError` on bad indices.
        """
        return self._rows(None).expand(self.page_ids(token_indices))

    def split_heads_page_buffer_meta(
        self, token_indices: Any, split_factor: int
    ) -> tuple[U64, U64]:
        """Return (addresses, nbytes) with each page cut into `split_factor` head groups.

        Page by page, head group by head group, then component: each (runs,) uint64. Raises
        `LayoutError` where `split_factor` does not divide the heads, or where a group is not
        one run per component (use `select_buffer_meta` for the next best).
        """
        rows = self._rows(self.head_group(split_factor))
        wanted = split_factor * len(self.components)
        if len(rows.address) > wanted:
            raise LayoutError(self.why_not_split(split_factor))
        return rows.expand(self.page_ids(token_indices))

    def head_group(self, split_factor: int) -> int:
        """Return heads per group; `LayoutError` unless `split_factor` divides the heads."""
        if type(split_factor) is not int or split_factor < 1 or self.heads % split_factor:
            raise LayoutError(
                f"split_factor {split_factor!r} must be an int >= 1 that divides the "
                f"{self.heads} local heads"
            )
        return self.heads // split_factor

    def why_not_split(self, split_factor: int) -> str:
        """Say which axis keeps a head group from being one run per component."""
        group = self.head_group(split_factor)
        for plane in self.planes:
            for component in plane.components:
                cell = narrow_heads(plane.select(component), 0, group)
                reason = cover(cell, {"page"}).why_not_one_run()
                if reason:
                    return (
                        f"{component} ({plane.layout.order()}) cannot be split at head="
                        f"{self.heads} into {split_factor} groups in one run: {reason}"
                    )
        return f"{split_factor} head groups are one run per component"

    def _rows(self, head_group: int | None) -> PageRows:
        cache: dict[int | None, PageRows] = self.__dict__.setdefault("_row_cache", {})
        if head_group not in cache:
            cache[head_group] = engine_rows(self, head_group)
        return cache[head_group]

    def __repr__(self) -> str:
        shapes = " | ".join(f"{'+'.join(p.components)}: {p.layout.order()}" for p in self.planes)
        return (
            f"Pool({self.label!r}, {self.pages} pages x {self.page_size} slots, {self.layers} "
            f"layers, {self.heads} heads, dims {self.head_dim}/{self.v_head_dim}, {self.dtype}, "
            f"{self.page_nbytes} B a page, {shapes})"
        )


@dataclass(frozen=True, slots=True)
class PageRows:
    """The runs of page 0 and how each moves with the page id: three (runs,) uint64 arrays."""

    address: U64
    page_stride: U64
    nbytes: U64

    def expand(self, page_ids: U64) -> tuple[U64, U64]:
        """Return the runs of all pages, page-major: (addresses, nbytes), (pages * runs,)."""
        address = page_ids[:, None] * self.page_stride[None, :]
        address += self.address
        return address.reshape(-1), np.tile(self.nbytes, len(page_ids))


def engine_rows(pool: Pool, head_group: int | None) -> PageRows:
    """Enumerate a page's runs in the order engines use: page, head group, layer, component."""
    columns, address, stride, nbytes = [], [], [], []
    for number, plane in enumerate(pool.planes):
        layout = _grouped(plane, head_group)
        cut = {"page"} | ({"head_group", "head_block"} & set(layout.names) if head_group else set())
        cut |= {name for loop in cover(layout, cut).loops for name in loop.axes}
        found = cover(layout, cut)
        loops = [axis for axis in found.cut if axis.name != "page"]
        index = np.indices([axis.extent for axis in loops]).reshape(len(loops), -1)
        steps = np.array([axis.stride for axis in loops], dtype=np.uint64)
        offsets = (index.astype(np.uint64) * steps[:, None]).sum(axis=0, dtype=np.uint64)
        address.append(offsets + np.uint64(plane.address))
        by_name = {axis.name: index[i] for i, axis in enumerate(loops)}
        zero = np.zeros(len(offsets), dtype=np.intp)
        order = [by_name.get(name, zero) for name in _ENGINE_ORDER]
        columns.append(np.stack([*order, zero + number, by_name.get("component", zero)]))
        stride.append(np.full(len(offsets), layout.axis("page").stride, dtype=np.uint64))
        nbytes.append(np.full(len(offsets), found.run, dtype=np.uint64))
    rank = np.lexsort(np.concatenate(columns, axis=1)[::-1])
    return PageRows(
        np.concatenate(address)[rank], np.concatenate(stride)[rank], np.concatenate(nbytes)[rank]
    )


def _grouped(plane: Plane, head_group: int | None) -> Layout:
    layout = plane.layout
    if head_group is None or "head" not in layout:
        return layout
    inner = layout.axis("head").extent
    if head_group <= inner:
        return layout.split("head", head_group, "head_group", "head")
    return layout.split("head_block", head_group // inner, "head_group", "head_block")


def as_index_array(values: Any) -> NDArray[np.int64]:
    """Read integers from a tensor, an array or a sequence as (n,) int64.

    Raises `PageIndexError` for other kinds of numbers and other shapes.
    """
    if hasattr(values, "numpy") and hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    array = np.asarray(values if isinstance(values, np.ndarray) else _as_list(values))
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise PageIndexError(
            f"indices must be one dimension of integers, not {array.ndim} of {array.dtype}"
        )
    return array.astype(np.int64, copy=False)


def _as_list(values: Iterable[int]) -> list[int]:
    return list(values)
