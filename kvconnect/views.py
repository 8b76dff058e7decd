"""Views: a component of a pool as an array or tensor onto the pool's own memory.

They exist for whoever fills or reads a pool (a model, a test); nothing on the transfer path
uses them. A view keeps the memory it looks at alive, also after its pool is closed.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvconnect.errors import LayoutError
from kvconnect.layout import Axis, Layout

if TYPE_CHECKING:
    from kvconnect.pool import Plane, Pool

_AXES = ("page", "layer", "slot", "head_block", "head", "dim")

_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
"""Torch dtypes to look at elements of an unnamed kind."""


def array_view(pool: Pool, component: str) -> NDArray[Any]:
    """Return the raw bits of a component as unsigned ints, axes as in `Pool.component`."""
    plane = pool.plane_of(component)
    layout = _viewed(plane.select(component))
    return np.ndarray(
        [axis.extent for axis in layout.axes],
        dtype=f"u{layout.itemsize}",
        buffer=_buffer(pool, plane),
        offset=layout.offset,
        strides=[axis.stride for axis in layout.axes],
    )


def tensor_view(pool: Pool, component: str) -> Any:
    """Return a component as a torch tensor; see `Pool.component`."""
    import torch  # noqa: PLC0415 - importing kvconnect must not import torch

    plane = pool.plane_of(component)
    layout = _viewed(plane.select(component))
    size = layout.itemsize
    dtype = getattr(torch, plane.dtype or pool.dtype, None)
    if dtype is None or dtype.itemsize != size:
        dtype = getattr(torch, _BITS[size])
    strides = [axis.stride for axis in layout.axes]
    if any(n % size for n in (layout.offset, plane.region.address, *strides)):
        raise LayoutError(
            f"component {component!r}: offset {layout.offset} B and strides {strides} B are not "
            f"all multiples of {size} B; use array({component!r})"
        )
    flat = torch.frombuffer(_buffer(pool, plane), dtype=dtype, count=plane.region.nbytes // size)
    extents = [axis.extent for axis in layout.axes]
    return flat.as_strided(extents, [s // size for s in strides], layout.offset // size)


def _buffer(pool: Pool, plane: Plane) -> Any:
    if plane.region.device != "cpu":
        raise LayoutError(
            f"{plane.region} lies on {plane.region.device}; views are for host memory (use the "
            f"engine's own tensors)"
        )
    buffer: Any = (ctypes.c_uint8 * plane.region.nbytes).from_address(plane.region.address)
    buffer.keep_alive = pool._keep_alive()  # noqa: SLF001 - the other half of the same type
    return buffer


def _viewed(layout: Layout) -> Layout:
    """Put the axes in the order of views and join the heads where they follow one another."""
    if "head_block" in layout:
        outer, inner = layout.axis("head_block"), layout.axis("head")
        if outer.extent == 1 or outer.stride == inner.extent * inner.stride:
            head = Axis("head", outer.extent * inner.extent, inner.stride)
            axes = [head if a.name == "head" else a for a in layout.axes if a.name != "head_block"]
            layout = Layout(tuple(axes), layout.itemsize, layout.offset, layout.form)
    rank = {name: at for at, name in enumerate(_AXES)}
    axes = sorted(layout.axes, key=lambda axis: rank.get(axis.name, 1))
    return Layout(tuple(axes), layout.itemsize, layout.offset, layout.form)
