"""Tensors to planes: region, layout and dtype from what a tensor itself says.

Axis names are those of `kvconnect.pool`, and two more: ``token`` is ``page`` and ``slot`` in
one dimension, ``1`` a dimension of one step that means nothing. A last name ``dim`` takes all
remaining dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvconnect.errors import LayoutError
from kvconnect.layout import Axis, Layout
from kvconnect.pool import Plane, Pool
from kvconnect.region import Region


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor, the names of its dimensions, and the components it holds.

    `field` is what messages call it. `pages` keeps the first so many pages of a buffer that has
    more. `dense` refuses gaps between elements: engines compute addresses without them.
    """

    components: tuple[str, ...]
    tensor: Any
    names: Sequence[str]
    field: str
    form: str = "axes"
    pages: int | None = None
    dense: bool = True


def pool_from_tensors(
    tensors: Mapping[str, Any],
    names: Sequence[str] | Mapping[str, Sequence[str]],
    *,
    page_size: int,
    label: str = "pool",
    scale_scheme: str | None = None,
    forms: Mapping[str, str] | None = None,
    owner: Any = None,
) -> Pool:
    """Describe memory that lies in torch tensors or numpy arrays, without an engine's pool.

    `tensors`: component name -> tensor; ``"k+v"`` names a tensor with a ``component`` axis.
    `names`: the dimensions of each, outermost first, for all or by the same keys; a name
    ``token`` stands for pages of `page_size` slots in one dimension. Strides are taken as they
    are, gaps included. `forms` tags byte orders that are no axis order. Raises `LayoutError`
    naming the tensor where shapes, names and each other do not agree.

    >>> kv = np.zeros((2, 8, 3, 4, 16), np.uint16)
    >>> axes = ("component", "token", "layer", "head", "dim")
    >>> pool_from_tensors({"k+v": kv}, axes, page_size=4).page_nbytes
    3072
    """
    buffers = []
    for key, tensor in tensors.items():
        axes = names[key] if isinstance(names, Mapping) else names
        form = (forms or {}).get(key, "axes")
        buffers.append(Buffer(tuple(key.split("+")), tensor, axes, key, form, dense=False))
    planes = planes_of(buffers, page_size, label)
    dims = {name: plane for plane in planes for name in plane.components}
    first = planes[0]
    return Pool(
        planes,
        page_size=page_size,
        layers=_extent(planes, "layer"),
        heads=next((n for plane in planes if (n := plane.heads()) is not None), 1),
        head_dim=_dim(dims.get("k", first)),
        v_head_dim=_dim(dims["v"]) if "v" in dims else 0,
        dtype=dtype_name(buffers[0].tensor),
        label=label,
        scale_scheme=scale_scheme,
        owner=tuple(tensors.values()) if owner is None else owner,
    )


def _extent(planes: Sequence[Plane], axis: str) -> int:
    return next((p.layout.axis(axis).extent for p in planes if axis in p.layout), 1)


def _dim(plane: Plane) -> int:
    return plane.layout.axis("dim").extent if "dim" in plane.layout else 1


def planes_of(buffers: Sequence[Buffer], page_size: int, label: str) -> tuple[Plane, ...]:
    """Turn buffers into planes; buffers in one allocation share its region."""
    if type(page_size) is not int or page_size < 1:
        raise LayoutError(f"page_size is {page_size!r}; it must be an int of at least 1")
    regions: dict[int, Region] = {}
    return tuple(_plane(buffer, page_size, label, regions) for buffer in buffers)


def _plane(buffer: Buffer, page_size: int, label: str, regions: dict[int, Region]) -> Plane:
    tensor, field = buffer.tensor, buffer.field
    if tensor is None:
        raise LayoutError(f"pool {label!r}: {field} is None; the pool has no buffer to describe")
    if not hasattr(tensor, "shape") or math.prod(tensor.shape) == 0:
        raise LayoutError(f"pool {label!r}: {field} has no elements: {_shape(tensor)}")
    start, nbytes, device = _allocation(tensor)
    name = f"{label}.{field}"
    region = regions.setdefault(start, Region(name, start, nbytes, device))
    layout = _layout(buffer, _address(tensor) - start, name)
    if "token" in layout:
        layout = _split_tokens(layout, page_size, name)
    if buffer.pages is not None:
        layout = _first_pages(layout, buffer.pages, name)
    return Plane(region, layout, buffer.components, dtype_name(tensor))


def _layout(buffer: Buffer, offset: int, name: str) -> Layout:
    shape, strides, itemsize = _facts(buffer.tensor)
    names = list(buffer.names)
    if names and names[-1] == "dim" and len(shape) > len(names):
        shape, strides = _flatten(shape, strides, len(names) - 1, name)
    if len(names) != len(shape):
        raise LayoutError(
            f"{name} has {len(shape)} dimensions {shape}, not one for each of {names}"
        )
    steps = zip(names, shape, strides, strict=True)
    widest = max((n * s for n, s in zip(shape, strides, strict=True) if n > 1), default=itemsize)
    axes = list[Axis]()
    for axis, extent, stride in steps:
        if axis == "1":
            if extent != 1:
                raise LayoutError(f"{name}: a dimension of {extent} steps where 1 was expected")
            continue
        # A dimension of one step may claim any stride; keep it where it can be one.
        axes.append(Axis(axis, extent, stride if stride >= itemsize else widest))
    layout = Layout(tuple(axes), itemsize, offset, buffer.form)
    if buffer.dense and layout.end - layout.offset != layout.nbytes:
        raise LayoutError(
            f"{name}: elements span {layout.end - layout.offset} B but are {layout.nbytes} B; "
            f"rows are wider than {shape} says"
        )
    return layout


def _flatten(
    shape: tuple[int, ...], strides: tuple[int, ...], keep: int, name: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    inner = strides[-1]
    for at in range(len(shape) - 2, keep - 1, -1):
        if strides[at] != strides[at + 1] * shape[at + 1]:
            raise LayoutError(f"{name}: dimensions {keep}.. of {shape} are not one row")
    return (*shape[:keep], math.prod(shape[keep:])), (*strides[:keep], inner)


def _split_tokens(layout: Layout, page_size: int, name: str) -> Layout:
    tokens = layout.axis("token").extent
    if tokens % page_size:
        raise LayoutError(
            f"{name}: {tokens} token slots are not whole pages of page_size {page_size}"
        )
    return layout.split("token", page_size, "page", "slot")


def _first_pages(layout: Layout, pages: int, name: str) -> Layout:
    have = layout.axis("page").extent
    if pages < 1 or pages > have:
        raise LayoutError(f"{name} has {have} pages, page_num says {pages}")
    return layout.narrow("page", 0, pages)


def dtype_name(tensor: Any) -> str:
    """Return the torch name of a tensor's dtype, or numpy's."""
    return str(tensor.dtype).removeprefix("torch.")


def _facts(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return shape, strides in bytes and itemsize."""
    shape = tuple(int(n) for n in tensor.shape)
    if hasattr(tensor, "untyped_storage"):
        itemsize = int(tensor.element_size())
        return shape, tuple(int(s) * itemsize for s in tensor.stride()), itemsize
    return shape, tuple(int(s) for s in tensor.strides), int(tensor.itemsize)


def _address(tensor: Any) -> int:
    return int(tensor.data_ptr() if hasattr(tensor, "data_ptr") else tensor.ctypes.data)


def _allocation(tensor: Any) -> tuple[int, int, str]:
    """Return address, bytes and device of the whole allocation a tensor lies in."""
    if hasattr(tensor, "untyped_storage"):
        storage = tensor.untyped_storage()
        return int(storage.data_ptr()), int(storage.nbytes()), str(tensor.device)
    base = tensor
    while isinstance(base.base, np.ndarray):
        base = base.base
    low, high = np.lib.array_utils.byte_bounds(base)
    return low, high - low, "cpu"


def _shape(tensor: Any) -> str:
    return f"shape {tuple(tensor.shape)}" if hasattr(tensor, "shape") else type(tensor).__name__
