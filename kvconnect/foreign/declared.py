"""What a foreign pool declares, and the check that its buffers say the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from kvconnect.errors import LayoutError
from kvconnect.foreign.tensors import Buffer, dtype_name
from kvconnect.layouts import order_of, without
from kvconnect.pool import Plane


def kind_of(pool: Any) -> str:
    """Return the name of a foreign pool's class, for messages."""
    return type(pool).__name__


def number(pool: Any, field: str) -> int:
    """Return an int attribute of at least 1; `LayoutError` names it otherwise."""
    value = getattr(pool, field, None)
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise LayoutError(f"{kind_of(pool)}: {field} is {value!r}; it must be an int of at least 1")
    return int(value)


def axis_names(pool: Any, tensor: Any, *drop: str) -> tuple[str, ...]:
    """Return the names of a buffer's dimensions from the pool's layout name.

    `page` and `slot` are one dimension ``token`` where the buffer has one fewer and the two are
    neighbours in the order.
    """
    layout = getattr(pool, "layout", None)
    order = without(order_of(str(layout)), *drop)
    dims = len(getattr(tensor, "shape", ()))
    at = order.index("page")
    if dims == len(order) - 1 and order[at + 1 : at + 2] == ("slot",):
        return (*order[:at], "token", *order[at + 2 :])
    return order


def check_axes(pool: Any, plane: Plane, buffer: Buffer, said: Mapping[str, str]) -> None:
    """Compare a plane's extents with attributes: `said` maps axis -> attribute name."""
    for axis, field in said.items():
        if axis not in plane.layout:
            continue
        have = plane.heads() if axis == "head" else plane.layout.axis(axis).extent
        if have != number(pool, field):
            raise LayoutError(
                f"{kind_of(pool)}: {buffer.field} {tuple(buffer.tensor.shape)} has {have} steps "
                f"of {axis!r}, {field} says {number(pool, field)}"
            )


def check_dtype(pool: Any, buffers: Sequence[Buffer]) -> str:
    """Return the pool's dtype; `LayoutError` if a buffer has another one."""
    said = str(getattr(pool, "dtype", None)).removeprefix("torch.")
    for buffer in buffers:
        have = dtype_name(buffer.tensor)
        if have != said:
            raise LayoutError(f"{kind_of(pool)}: {buffer.field} is {have}, dtype says {said}")
    return said


def check_size(pool: Any, planes: Sequence[Plane]) -> None:
    """Compare pages, tokens and bytes with `page_num`, `size` and `size_per_token`."""
    pages = planes[0].layout.axis("page").extent
    tokens = pages * number(pool, "page_size")
    for field, have in (("page_num", pages), ("size", tokens)):
        if hasattr(pool, field) and number(pool, field) != have:
            raise LayoutError(
                f"{kind_of(pool)}: the buffers hold {have} ({pages} pages), {field} says "
                f"{number(pool, field)}"
            )
    if hasattr(pool, "size_per_token"):
        have = sum(plane.layout.nbytes for plane in planes)
        said = number(pool, "size_per_token") * tokens
        if have != said:
            raise LayoutError(
                f"{kind_of(pool)}: the buffers hold {have} B, size_per_token "
                f"{pool.size_per_token} B times {tokens} tokens is {said} B"
            )
