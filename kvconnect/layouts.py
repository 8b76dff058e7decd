"""Named pool layouts: the one table from a name to an axis order.

Engines name their pool shapes. Here a name stands for an order of axes, outermost first, and
for nothing else: every stride follows from the order and the extents, and no other module asks
for a name.

``component`` is K and V. Where their head dimensions differ there is no such axis (its steps
would have two sizes): K and V become two planes of the same order, each with its own strides,
and the axes outside ``component`` step over both. Without V (``v_head_dim=0``: MLA, whose
latent row is K and V at once) the one component is called ``kv`` and has one head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvconnect.errors import LayoutError
from kvconnect.layout import Axis, Layout

ORDERS: Mapping[str, tuple[str, ...]] = {
    "layer_first": ("component", "layer", "page", "slot", "head", "dim"),
    "page_first": ("component", "page", "slot", "layer", "head", "dim"),
    "page_first_direct": ("component", "page", "layer", "slot", "head", "dim"),
    "page_head": ("component", "page", "head", "slot", "layer", "dim"),
    "page_unified": ("page", "head_block", "layer", "component", "slot", "head", "dim"),
}

ITEMSIZES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
}
"""Bytes of an element by the torch name of its dtype."""

ALIGNMENT = 4096
"""Components that do not interleave start at multiples of this many bytes."""


def order_of(layout: str) -> tuple[str, ...]:
    """Return the axes of a named layout, outermost first; `LayoutError` lists the names."""
    if layout not in ORDERS:
        raise LayoutError(f"layout {layout!r} is not one of: {', '.join(ORDERS)}")
    return ORDERS[layout]


def itemsize_of(dtype: str) -> int:
    """Return the bytes of one element; `LayoutError` lists the dtypes."""
    if dtype not in ITEMSIZES:
        raise LayoutError(f"dtype {dtype!r} is not one of: {', '.join(ITEMSIZES)}")
    return ITEMSIZES[dtype]


def without(order: Sequence[str], *names: str) -> tuple[str, ...]:
    """Return `order` less some axes."""
    return tuple(name for name in order if name not in names)


@dataclass(frozen=True, slots=True)
class Part:
    """Some components, the layout they share, and the bytes [start, start + nbytes) they fill.

    `start` is relative to the pool's memory; the layout's offset is relative to `start`.
    Components that interleave fill the same bytes; others have bytes of their own, so that
    each can be registered in whole pages.
    """

    components: tuple[str, ...]
    layout: Layout
    dtype: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """A named layout and the extents that make it a shape; checked at construction.

    `v_head_dim` None means as `head_dim`, 0 means no V (MLA). `head_blocks` groups the heads
    where the layout has a ``head_block`` axis. `components` are further opaque rows, such as
    scales or an index: name -> bytes per page and layer.

    >>> Geometry("page_head", 4, 16, 2, 8, 64).nbytes == 2 * 4 * 16 * 2 * 8 * 64 * 2
    True
    """

    layout: str
    pages: int
    page_size: int
    layers: int
    heads: int
    head_dim: int
    v_head_dim: int | None = None
    dtype: str = "bfloat16"
    head_blocks: int | None = None
    components: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check every field, naming the one that cannot be."""
        order = order_of(self.layout)
        itemsize_of(self.dtype)
        for name in ("pages", "page_size", "layers", "heads", "head_dim"):
            _require_count(name, getattr(self, name))
        if self.v_head_dim is not None:
            _require_count("v_head_dim", self.v_head_dim, least=0)
        if self.v_head_dim == 0 and self.heads != 1:
            raise LayoutError(
                f"heads is {self.heads} with v_head_dim 0; a latent (MLA) pool has one head"
            )
        self._check_blocks(order)
        for name, nbytes in self.components.items():
            _require_count(f"components[{name!r}]", nbytes)
            if name in {"k", "v", "kv"}:
                raise LayoutError(f"components: {name!r} is the name of a KV component")

    def _check_blocks(self, order: Sequence[str]) -> None:
        if self.head_blocks is None:
            return
        _require_count("head_blocks", self.head_blocks)
        if "head_block" not in order:
            raise LayoutError(f"head_blocks: layout {self.layout!r} has no axis 'head_block'")
        if self.heads % self.head_blocks:
            raise LayoutError(
                f"head_blocks is {self.head_blocks}; it must divide the {self.heads} heads"
            )

    @property
    def dims(self) -> dict[str, int]:
        """Elements per head of each KV component."""
        v_dim = self.head_dim if self.v_head_dim is None else self.v_head_dim
        return {"k": self.head_dim, "v": v_dim} if v_dim else {"kv": self.head_dim}

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page over all components."""
        per_slot = self.heads * sum(self.dims.values()) * itemsize_of(self.dtype)
        return self.layers * (self.page_size * per_slot + sum(self.components.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of memory the pool takes, padding between components included."""
        return max(part.start + part.nbytes for part in self.parts())

    def parts(self) -> list[Part]:
        """Lay all components out, one after another or interleaved as the order says."""
        parts = self._kv_parts()
        order = [name for name in order_of(self.layout) if name in {"page", "layer"}]
        for name, nbytes in self.components.items():
            extents = [(axis, self._extents()[axis]) for axis in order]
            layout = Layout.packed([*extents, ("dim", nbytes)], 1, form=f"opaque:{name}")
            start = _aligned(parts[-1].start + parts[-1].nbytes)
            parts.append(Part((name,), layout, "uint8", start, layout.nbytes))
        return parts

    def _extents(self) -> dict[str, int]:
        blocks = self.head_blocks or 1
        return {
            "page": self.pages,
            "slot": self.page_size,
            "layer": self.layers,
            "head_block": blocks,
            "head": self.heads // blocks,
        }

    def _kv_parts(self) -> list[Part]:
        order, dims = order_of(self.layout), self.dims
        if len(dims) == 1:
            order = without(order, "head_block")
        if len(dims) == 1 or order[0] == "component":
            return self._apart(without(order, "component"))
        at = order.index("component")
        outer, inner = order[:at], [self._packed(order[at + 1 :], dim) for dim in dims.values()]
        block = sum(layout.nbytes for layout in inner)
        total = block * math.prod(self._extents()[name] for name in outer)
        if len(set(dims.values())) == 1:
            axes = (*self._outer(outer, block), Axis("component", len(inner), inner[0].nbytes))
            layout = Layout((*axes, *inner[0].axes), inner[0].itemsize)
            return [Part(tuple(dims), layout, self.dtype, 0, total)]
        parts, offset = [], 0
        for name, each in zip(dims, inner, strict=True):
            axes = (*self._outer(outer, block), *each.axes)
            layout = Layout(axes, each.itemsize, offset)
            parts.append(Part((name,), layout, self.dtype, 0, total))
            offset += each.nbytes
        return parts

    def _apart(self, order: Sequence[str]) -> list[Part]:
        parts, start = [], 0
        for name, dim in self.dims.items():
            layout = self._packed(order, dim)
            parts.append(Part((name,), layout, self.dtype, start, layout.nbytes))
            start = _aligned(start + layout.nbytes)
        return parts

    def _packed(self, order: Sequence[str], dim: int) -> Layout:
        extents = self._extents() | {"dim": dim}
        return Layout.packed([(name, extents[name]) for name in order], itemsize_of(self.dtype))

    def _outer(self, names: Sequence[str], block: int) -> tuple[Axis, ...]:
        extents, axes = self._extents(), list[Axis]()
        for at, name in enumerate(names):
            inside = math.prod(extents[n] for n in names[at + 1 :])
            axes.append(Axis(name, extents[name], block * inside))
        return tuple(axes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _require_count(name: str, value: object, least: int = 1) -> None:
    if type(value) is not int or value < least:
        raise LayoutError(f"{name} is {value!r}; it must be an int of at least {least}")
