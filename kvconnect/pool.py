"""A pool: planes that share page ids. The one type that everything else plans with.

A plane is one buffer of the pool: a region, a layout inside it, and which components it
holds. `kvconnect.hostpool` allocates pools, `kvconnect.foreign` reads those of an engine; both
give this type, and nothing after it knows which engine or named layout it was.

Axis names: ``page layer slot head dim`` and ``component`` where one buffer holds several.
A head axis that lies in memory as blocks of heads is the pair ``head_block`` (outer) and
``head`` (inner). A plane without a ``head`` axis is one opaque row per page and layer, which
no head group owns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvconnect.cover import cover
from kvconnect.errors import LayoutError
from kvconnect.layout import Layout
from kvconnect.page_index import I64, U64, as_index_array, check_page_ids, token_pages
from kvconnect.page_rows import ObjectRows, PageRows, engine_rows, object_rows
from kvconnect.page_select import BufferMeta, select
from kvconnect.region import Region, RegionTable
from kvconnect.views import array_view, tensor_view

__all__ = [
    "U64",
    "BufferMeta",
    "PageRows",
    "Plane",
    "Pool",
    "as_index_array",
    "engine_rows",
    "narrow_heads",
]


@dataclass(frozen=True, slots=True)
class Plane:
    """One buffer: `region`, `layout` (offset relative to the region) and its `components`.

    Invariants: the layout has a ``page`` axis and ends inside the region; ``component`` is an
    axis iff there is more than one component, with one step for each. `dtype` is the torch name
    of its elements where they differ from the pool's.
    """

    region: Region
    layout: Layout
    components: tuple[str, ...]
    dtype: str | None = None

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


@dataclass(frozen=True, repr=False)
class Pool:
    """Planes that share page ids; also the geometry they were cross-checked against.

    `pages` pages of `page_size` slots; `heads` local KV heads, `layers` local layers;
    `head_dim`, `v_head_dim` in elements (0 where a component does not exist); `dtype` by its
    torch name. `owner` keeps the memory alive; kvconnect never frees what it wraps.

    Where an engine's token indices are not page_id * page_size + slot: `index_step` tokens of
    its index space make a page (None: `page_size`), and `translate` turns the resulting page
    numbers into page ids, (n,) int64 both, raising `PageIndexError` for those not here.
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
    owner: Any = field(default=None, compare=False)
    index_step: int | None = None
    translate: Callable[[I64], I64] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Check that there is memory, and that all planes agree on pages and slots."""
        if not self.planes:
            raise LayoutError(f"pool {self.label!r} has no planes: nothing to describe")
        for name in ("page_size", "layers", "heads", "head_dim"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise LayoutError(f"pool {self.label!r}: {name} is {value!r}; it must be >= 1")
        if len(set(self.components)) != len(self.components):
            raise LayoutError(f"pool {self.label!r}: components {self.components} repeat a name")
        for plane in self.planes:
            self._check_plane(plane)

    def _check_plane(self, plane: Plane) -> None:
        name = "+".join(plane.components)
        wanted = {"page": self.pages, "slot": self.page_size, "layer": self.layers}
        for axis, extent in wanted.items():
            if axis in plane.layout and plane.layout.axis(axis).extent != extent:
                raise LayoutError(
                    f"pool {self.label!r}: plane {name} has {plane.layout.axis(axis).extent} "
                    f"steps of {axis!r}, the pool says {extent}"
                )
        if plane.heads() not in {None, self.heads}:
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

    def plane_of(self, component: str) -> Plane:
        """Return the plane that holds `component`; `LayoutError` names the ones there are."""
        for plane in self.planes:
            if component in plane.components:
                return plane
        raise LayoutError(
            f"pool {self.label!r} has no component {component!r}; it has {list(self.components)}"
        )

    def component(self, name: str) -> Any:
        """Return one component as a torch tensor onto the pool's memory, no copy.

        Axes (page, layer, slot, head, dim), less those the plane does not have. Heads in blocks
        that do not follow one another give two axes (head_block, head) in place of head.
        """
        return tensor_view(self, name)

    def array(self, name: str) -> Any:
        """Return one component's raw bits as unsigned ints in numpy; axes as `component`."""
        return array_view(self, name)

    def page_ids(self, token_indices: Any) -> U64:
        """Turn an engine's token indices into page ids: (pages,) uint64.

        `token_indices` (tensor, array or sequence of int64) must be whole, aligned, contiguous
        pages inside the pool, each page once; `PageIndexError` names the first that is not,
        before any descriptor exists. Empty is a no-op.
        """
        ids = token_pages(token_indices, self.index_step or self.page_size)
        if self.translate is not None:
            ids = self.translate(ids)
        return check_page_ids(ids, self.pages)

    def check_page_ids(self, page_ids: Any) -> U64:
        """Check page ids (distinct, inside the pool) and return them as (pages,) uint64."""
        return check_page_ids(as_index_array(page_ids), self.pages)

    def page_buffer_meta(self, token_indices: Any) -> tuple[U64, U64]:
        """Return (addresses, nbytes), each (runs,) uint64, in the engine's own order.

        One run per page and component where the layout allows, else one per layer too: page
        by page, then layer, then component. Components that interleave inside a page share its
        runs. Raises `PageIndexError` on bad indices. `nbytes` may be read-only.
        """
        page_ids = self.page_ids(token_indices)
        return self._page_rows.expand(page_ids)

    def split_heads_page_buffer_meta(
        self, token_indices: Any, split_factor: int
    ) -> tuple[U64, U64]:
        """Return (addresses, nbytes) with each page cut into `split_factor` head groups.

        Page by page, head group by head group, then component: each (runs,) uint64. Raises
        `LayoutError` where `split_factor` does not divide the heads, or where a group is not
        one run per component (use `select_buffer_meta` for the next best).
        """
        objects = self.object_rows(self.head_group(split_factor))
        if not objects.one_run:
            raise LayoutError(self.why_not_split(split_factor))
        return objects.rows.expand(self.page_ids(token_indices))

    def select_buffer_meta(
        self,
        token_indices: Any,
        split_factor: int | None = None,
        *,
        min_run_bytes: int = 1,
        max_runs: int | None = None,
        staging: Region | None = None,
        fallback: str | None = None,
        join: bool = False,
    ) -> BufferMeta:
        """Choose per page, split heads, scatter-gather or staged by what the layout can do.

        See `kvconnect.page_select.select`, which says what is chosen when.
        """
        return select(
            self,
            token_indices,
            split_factor,
            min_run_bytes=min_run_bytes,
            max_runs=max_runs,
            staging=staging,
            fallback=fallback,
            join=join,
        )

    def head_group(self, split_factor: int) -> int:
        """Return heads per group; `LayoutError` unless `split_factor` divides the heads."""
        if type(split_factor) is not int or split_factor < 1 or self.heads % split_factor:
            raise LayoutError(
                f"split_factor {split_factor!r} must be an int >= 1 that divides the "
                f"{self.heads} local heads"
            )
        return self.heads // split_factor

    def why_not_split(self, split_factor: int) -> str:
        """Say which axis keeps a head group (or a page, for 1) from being one run each."""
        group = self.head_group(split_factor)
        for plane in self.planes:
            for component in plane.components:
                reason = _why_not_one_run(plane.select(component), self.heads, group)
                if reason:
                    return (
                        f"{component} ({plane.layout.order()}) cannot be split at head="
                        f"{self.heads} into {split_factor} groups in one run: {reason}"
                    )
        return f"{split_factor} head groups are one run per component"

    @cached_property
    def _page_rows(self) -> PageRows:
        return engine_rows(self)

    def object_rows(self, head_group: int | None, *, join: bool = False) -> ObjectRows:
        """Return a page's runs by object (cached): see `kvconnect.page_rows.object_rows`."""
        cache: dict[Any, ObjectRows] = self.__dict__.setdefault("_object_rows", {})
        found = cache.get((head_group, join))
        if found is None:
            found = cache[head_group, join] = object_rows(self, head_group, join=join)
        return found

    def _keep_alive(self) -> Any:
        """Return what a view must hold on to."""
        return self.owner

    def __repr__(self) -> str:
        shapes = " | ".join(f"{'+'.join(p.components)}: {p.layout.order()}" for p in self.planes)
        return (
            f"{type(self).__name__}({self.label!r}, {self.pages} pages x {self.page_size} slots, "
            f"{self.layers} layers, {self.heads} heads, dims {self.head_dim}/{self.v_head_dim}, "
            f"{self.dtype}, {self.page_nbytes} B a page, {shapes})"
        )


def _why_not_one_run(layout: Layout, heads: int, group: int) -> str | None:
    for start in range(0, heads, group):
        try:
            cell = narrow_heads(layout, start, start + group)
        except LayoutError as error:
            return str(error)
        page = layout.axis("page").stride
        for axis in cell.by_stride():
            if axis.stride >= page and axis.name != "page":
                return f"{axis.name} stride {axis.stride} B, a page ends at {page} B"
        if reason := cover(cell, {"page"}).why_not_one_run():
            return reason
    return None
