"""Pools of opaque rows: Mamba states, DSA index, packed page rows of several kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvconnect.errors import LayoutError
from kvconnect.foreign.declared import check_axes, check_size, kind_of, number
from kvconnect.foreign.tensors import Buffer, dtype_name, planes_of
from kvconnect.pool import Plane, Pool


def read_mamba(pool: Any, label: str) -> Pool:
    """Read recurrent states: a page is one state slot, each state a component."""
    states = [("temporal", pool.temporal_buffer, "temporal_buffer")]
    states += [(f"conv_{i}", t, f"conv_buffer[{i}]") for i, t in enumerate(pool.conv_buffer)]
    names = _state_axes(pool)
    buffers = [
        Buffer((component,), tensor, names, field)
        for component, tensor, field in states
        if tensor is not None and tensor.numel() > 0  # models without an SSM state keep it empty
    ]
    buffers += [
        Buffer((f"state_{i}",), tensor, ("page", "dim"), f"slot_state_buffers[{i}]")
        for i, tensor in enumerate(getattr(pool, "slot_state_buffers", ()))
    ]
    if not buffers:
        raise LayoutError(f"{kind_of(pool)}: temporal_buffer and conv_buffer are empty")
    planes = planes_of(buffers, 1, label)
    for plane, buffer in zip(planes, buffers, strict=True):
        check_axes(pool, plane, buffer, {"page": "page_num", "layer": "num_mamba_layers"})
    check_size(pool, planes)
    return _pool(pool, label, planes, buffers, number(pool, "num_mamba_layers"))


def _state_axes(pool: Any) -> tuple[str, ...]:
    orders = {
        "page_first": ("page", "layer", "1", "dim"),
        "page_first_direct": ("page", "layer", "1", "dim"),
        "layer_first": ("layer", "page", "dim"),
    }
    if pool.layout not in orders:
        raise LayoutError(f"{kind_of(pool)}: layout {pool.layout!r} is not one of {list(orders)}")
    return orders[pool.layout]


def read_indexer(pool: Any, label: str) -> Pool:
    """Read packed index rows with their scales, one per page and layer."""
    tensor, field = pool.index_k_with_scale_buffer, "index_k_with_scale_buffer"
    names = _row_axes(pool, tensor, field)
    buffers = [Buffer(("index",), tensor, names, field, pages=number(pool, "page_num"))]
    planes = planes_of(buffers, number(pool, "page_size"), label)
    said = {"layer": "layer_num", "dim": "indexer_page_stride_size"}
    check_axes(pool, planes[0], buffers[0], said)
    check_size(pool, planes)
    return _pool(pool, label, planes, buffers, number(pool, "layer_num"))


def read_page_rows(pool: Any, label: str) -> Pool:
    """Read packed rows of `row_bytes`, one per page and layer.

    An engine that stores a page as several objects cuts it by layers; each is a component.
    """
    names = _row_axes(pool, pool.kv_buffer, "kv_buffer")
    buffer = Buffer(("rows",), pool.kv_buffer, names, "kv_buffer")
    planes = planes_of([buffer], number(pool, "page_size"), label)
    check_axes(
        pool, planes[0], buffer, {"page": "page_num", "layer": "layer_num", "dim": "row_bytes"}
    )
    objects = int(getattr(pool, "storage_objects_per_page", 1))
    if objects > 1 and names[0] == "page":
        planes = _by_layers(planes[0], objects)
    return _pool(pool, label, planes, [buffer], number(pool, "layer_num"))


def _by_layers(plane: Plane, objects: int) -> tuple[Plane, ...]:
    layout, at, parts = plane.layout, 0, list[Plane]()
    for number_, layers in enumerate(
        np.array_split(np.arange(layout.axis("layer").extent), objects)
    ):
        part = layout.narrow("layer", at, at + len(layers))
        # Its layers are not those of the pool, so the axis has a name of its own.
        part = part.rename({"layer": "row_layer"})
        parts.append(Plane(plane.region, part, (f"rows_{number_}",), plane.dtype))
        at += len(layers)
    return tuple(parts)


def read_paged_rows(pool: Any, label: str) -> Pool:
    """Read rows of `item_bytes` or `state_page_bytes`: a buffer per layer, or one for all."""
    kv, width = pool.kv_buffer, _row_width(pool)
    if isinstance(kv, (list, tuple)):
        buffers = [
            Buffer((f"layer_{i}",), tensor, ("page", "dim"), f"kv_buffer[{i}]")
            for i, tensor in enumerate(kv)
        ]
    else:
        buffers = [Buffer(("rows",), kv, _row_axes(pool, kv, "kv_buffer"), "kv_buffer")]
    if not buffers:
        raise LayoutError(f"{kind_of(pool)}: kv_buffer is an empty list; the pool has no layers")
    planes = planes_of(buffers, number(pool, "page_size"), label)
    said = {"page": "num_host_pages", "layer": "layer_num", "dim": width}
    for plane, buffer in zip(planes, buffers, strict=True):
        check_axes(pool, plane, buffer, said)
    layers = len(buffers) if isinstance(kv, (list, tuple)) else number(pool, "layer_num")
    if layers != number(pool, "layer_num"):
        raise LayoutError(
            f"{kind_of(pool)}: kv_buffer has {layers} layers, layer_num says {pool.layer_num}"
        )
    return _pool(pool, label, planes, buffers, layers)


def _row_width(pool: Any) -> str:
    return "item_bytes" if hasattr(pool, "item_bytes") else "state_page_bytes"


def _row_axes(pool: Any, tensor: Any, field: str) -> tuple[str, ...]:
    dims = len(getattr(tensor, "shape", ()))
    orders = {
        ("layer_first", 3): ("layer", "page", "dim"),
        ("page_first", 3): ("page", "layer", "dim"),
        ("page_first", 4): ("page", "layer", "1", "dim"),
        ("page_first_direct", 4): ("page", "layer", "1", "dim"),
    }
    if (pool.layout, dims) not in orders:
        raise LayoutError(
            f"{kind_of(pool)}: {field} of {dims} dimensions in layout {pool.layout!r} is none of "
            f"{', '.join(f'{name} of {n}' for name, n in orders)}"
        )
    return orders[pool.layout, dims]


def _pool(
    pool: Any, label: str, planes: Sequence[Plane], buffers: Sequence[Buffer], layers: int
) -> Pool:
    kinds = dict.fromkeys(dtype_name(buffer.tensor) for buffer in buffers)
    return Pool(
        tuple(planes),
        page_size=number(pool, "page_size"),
        layers=layers,
        heads=1,
        head_dim=planes[0].layout.axis("dim").extent,
        v_head_dim=0,
        dtype="+".join(kinds),
        label=label,
        owner=pool,
    )
