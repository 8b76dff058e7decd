"""In which order a flat page holds the bytes of its pool, read off the pool's own view.

``get_data_page(0, flat=False)`` is a view onto page 0, and a flat page is that view written
out in its own axis order. Where its steps are those of the pool's axes from the outermost in,
the order is proved, not assumed, and flat pages can be stored as the same objects as pages that
move in place. Where it is not (several buffers, a copy, another order) a page stays opaque.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvconnect.layout import Axis, Layout
from kvconnect.objects import byte_order
from kvconnect.pool import Plane, Pool
from kvconnect.region import Region


def ordered_plane(
    host_pool: Any, pool: Pool, nbytes: int, region: Region, stride: int
) -> Plane | None:
    """Describe a buffer of flat pages of `nbytes` each, axis by axis.

    They begin at every `stride` bytes of `region`. None where their order cannot be proved.
    """
    names = _flat_order(host_pool, pool)
    if names is None:
        return None
    (plane,) = pool.planes
    inside = [(name, plane.layout.axis(name).extent) for name in names]
    packed = Layout.packed(inside, plane.layout.itemsize, form=plane.layout.form)
    if packed.nbytes != nbytes:
        return None
    page = Axis("page", region.nbytes // stride, stride)
    return Plane(region, replace(packed, axes=(page, *packed.axes)), plane.components, plane.dtype)


def opaque_plane(nbytes: int, region: Region, stride: int) -> Plane:
    """Describe a buffer of flat pages of `nbytes` each as rows of bytes."""
    axes = (Axis("page", region.nbytes // stride, stride), Axis("dim", nbytes, 1))
    return Plane(region, Layout(axes, 1), ("flat",), "uint8")


def _flat_order(host_pool: Any, pool: Pool) -> list[str] | None:
    if len(pool.planes) != 1:
        return None
    layout = pool.planes[0].layout
    view = host_pool.get_data_page(0, flat=False)
    if view.data_ptr() != pool.planes[0].address:
        return None
    # Axes of one step stay where native order has them: they make no difference to the bytes.
    order = byte_order(layout, "native")
    inside = [layout.axis(name) for name in order]
    steps = [(axis.extent, axis.stride) for axis in inside if axis.extent > 1]
    shown = zip(view.shape, view.stride(), strict=True)
    if steps != [(n, step * view.element_size()) for n, step in shown if n > 1]:
        return None
    return order
