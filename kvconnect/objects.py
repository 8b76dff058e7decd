"""Objects: how the part of a page that one key names lies in the store.

The stored byte order is itself a layout. ``native`` keeps the pool's own order (zero-copy,
readers of the same order); ``canonical`` is component, head, slot, layer, dim: the split-heads
order, which readers of any pool layout can take, scattered or staged.

The grid: one object per (page, layer chunk, head group), holding all components as segments.
Cells are global ranges, so writers and readers of any TP and PP size that share a grid share
objects.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvconnect.errors import ConfigError, LayoutError
from kvconnect.identity import Cell
from kvconnect.layout import Layout
from kvconnect.placement import Placement, Span
from kvconnect.pool import Plane, Pool, narrow_heads

CANONICAL_ORDER = ("component", "head", "slot", "layer", "dim")


@dataclass(frozen=True, slots=True)
class Segment:
    """Some components of one plane inside an object.

    `source` is the plane's layout narrowed to the cell (with its page axis, relative to the
    region), `target` the packed layout inside the object (offset = where the segment starts).
    """

    name: str
    plane: int
    source: Layout
    target: Layout


@dataclass(frozen=True, slots=True)
class ObjectShape:
    """One object of a page: which cell it is, and its segments in stored order."""

    cell: Cell
    segments: tuple[Segment, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the object; exactly this many are stored and loaded."""
        return sum(segment.target.nbytes for segment in self.segments)


def head_group_of(
    *, total_heads: int, tp_sizes: Sequence[int] = (), head_group: int | None = None
) -> int | None:
    """Return heads per object for a fleet, or None where nothing asks for a cut.

    `tp_sizes` are the TP sizes that share pages: the group is total heads / lcm, at least one
    head. Raises `ConfigError` where a size neither divides the heads nor is a multiple.
    """
    if head_group is not None:
        if type(head_group) is not int or head_group < 1 or total_heads % head_group:
            raise ConfigError(
                f"head_group {head_group!r} must be an int >= 1 that divides the {total_heads} "
                f"KV heads of the model"
            )
        return head_group
    if not tp_sizes:
        return None
    for size in tp_sizes:
        if type(size) is not int or size < 1 or (total_heads % size and size % total_heads):
            raise ConfigError(
                f"tp_sizes contains {size!r}; with {total_heads} KV heads it must be an int "
                f"that divides them or is a multiple of them"
            )
    lcm = math.lcm(*(min(size, total_heads) for size in tp_sizes))
    if total_heads % lcm:
        raise ConfigError(
            f"tp_sizes {list(tp_sizes)} have lcm {lcm}, which does not divide {total_heads} KV "
            f"heads: no common head group exists; give head_group"
        )
    return total_heads // lcm


def cells_of(
    placement: Placement, head_group: int | None, layer_chunk: int | None = None
) -> list[Cell]:
    """Return the cells a rank holds, layer chunk by layer chunk, head group by head group.

    Raises `ConfigError` where the rank's ranges are not whole cells of the global grid.
    """
    heads = list(_parts(placement.heads, head_group, "head", "head_group"))
    layers = list(_parts(placement.layers, layer_chunk, "layer", "layer_chunk"))
    return [Cell(layer, head, placement.shards) for layer in layers for head in heads]


def _parts(held: Span, size: int | None, axis: str, option: str) -> Iterator[Span]:
    if size is None:
        yield held
        return
    if type(size) is not int or size < 1:
        raise ConfigError(f"{option} is {size!r}; it must be an int >= 1")
    for edge in (held.start, held.stop):
        if edge % size and edge != held.total:
            raise ConfigError(
                f"{axis} range {held} is not made of whole groups of {size}: {edge} is no "
                f"multiple; choose a {option} that divides every rank's range"
            )
    for start in range(held.start, held.stop, size):
        yield Span(start, min(start + size, held.stop), held.total)


def object_shapes(
    pool: Pool, placement: Placement, cells: Sequence[Cell], object_layout: str
) -> list[ObjectShape]:
    """Lay out every cell's object; `object_layout` is ``native`` or ``canonical``.

    Raises `LayoutError` where the pool does not hold the placement, or heads would be cut in a
    plane that has no head axis.
    """
    _check_held(pool, placement)
    return [
        ObjectShape(cell, tuple(_segments(pool, placement, cell, object_layout))) for cell in cells
    ]


def _check_held(pool: Pool, placement: Placement) -> None:
    for axis, have, span in (
        ("layer", pool.layers, placement.layers),
        ("head", pool.heads, placement.heads),
    ):
        if have != span.extent:
            raise LayoutError(
                f"the pool has {have} local {axis}s, the placement {span} holds {span.extent}"
            )


def _segments(
    pool: Pool, placement: Placement, cell: Cell, object_layout: str
) -> Iterator[Segment]:
    at = 0
    for number, plane in enumerate(pool.planes):
        for name, layout in _parts_of(plane, object_layout):
            source = _narrow(layout, placement, cell)
            order = byte_order(source, object_layout)
            extents = [(axis, source.axis(axis).extent) for axis in order]
            target = Layout.packed(extents, source.itemsize, offset=at, form=source.form)
            yield Segment(name, number, source, target)
            at += target.nbytes


def _parts_of(plane: Plane, object_layout: str) -> Iterator[tuple[str, Layout]]:
    """Yield a plane as separate components, or whole where components interleave natively."""
    outermost = byte_order(plane.layout, "native")[:1] == ["component"]
    if object_layout == "canonical" or outermost or "component" not in plane.layout:
        for component in plane.components:
            yield component, plane.select(component)
    else:
        yield "+".join(plane.components), plane.layout


def _narrow(layout: Layout, placement: Placement, cell: Cell) -> Layout:
    if "layer" in layout:
        start = cell.layers.start - placement.layers.start
        layout = layout.narrow("layer", start, start + cell.layers.extent)
    elif cell.layers.extent != placement.layers.extent:
        raise LayoutError("a plane without a layer axis cannot be cut into layer chunks")
    if "head" in layout:
        start = cell.heads.start - placement.heads.start
        return _drop_single_block(narrow_heads(layout, start, start + cell.heads.extent))
    if cell.heads.extent != placement.heads.extent:
        raise LayoutError(
            f"a plane without a head axis cannot be cut into groups of {cell.heads.extent} of "
            f"{placement.heads.extent} heads; leave head_group and tp_sizes out"
        )
    return layout


def _drop_single_block(layout: Layout) -> Layout:
    if "head_block" in layout and layout.axis("head_block").extent == 1:
        return layout.select("head_block", 0)
    return layout


def byte_order(layout: Layout, object_layout: str) -> list[str]:
    """Return the axes of an object outermost first.

    Native order is by stride; axes of one step count too (ties keep the stored order), so that
    the order does not depend on how many heads or layers a rank happens to hold.
    """
    names = [name for name in layout.names if name != "page"]
    if object_layout == "canonical":
        known = ("component", "head_block", *CANONICAL_ORDER[1:])
        if strange := [name for name in names if name not in known]:
            raise LayoutError(
                f"object_layout=canonical has no place for the axes {strange}; store this pool "
                f"with object_layout=native"
            )
        return sorted(names, key=known.index)
    return sorted(names, key=lambda name: -layout.axis(name).stride)


def signature(shape: ObjectShape) -> str:
    """Name the byte order of an object: what two pools must share to exchange bytes.

    ``k:head.slot.layer.dim|v:head.slot.layer.dim`` is the canonical order; a ``head_block``
    carries its block size, because it is part of the order.
    """
    words = []
    for segment in shape.segments:
        names = list(segment.target.names)
        if "head_block" in names:
            names = _name_blocks(names, segment.target.axis("head").extent)
        form = "" if segment.target.form == "axes" else f"[{segment.target.form}]"
        words.append(f"{segment.name}:{'.'.join(names)}{form}")
    return "|".join(words)


def _name_blocks(names: list[str], block: int) -> list[str]:
    """Blocks right around their heads are plain heads; elsewhere the block size matters."""
    at = names.index("head_block")
    merged = names[at + 1 : at + 2] == ["head"]
    return names[:at] + ([] if merged else [f"head_block{block}"]) + names[at + 1 :]
