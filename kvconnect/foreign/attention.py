"""Attention pools: MHA (also K only, K and V apart, MXFP8 scales) and MLA (also split)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvconnect.errors import LayoutError
from kvconnect.foreign.declared import (
    axis_names,
    check_axes,
    check_dtype,
    check_size,
    kind_of,
    number,
)
from kvconnect.foreign.tensors import Buffer, planes_of
from kvconnect.layout import Axis, Layout
from kvconnect.pool import Plane, Pool

_SAID = {"page": "page_num", "slot": "page_size", "layer": "layer_num", "head": "head_num"}

MXFP8 = "mxfp8-interleaved"
"""Scale blocks of one page and layer: head by head, then an order of the kernels' own."""


def read_mha(pool: Any, label: str) -> Pool:
    """Read K and V, in one buffer with a component axis or in one each."""
    kv = pool.kv_buffer
    if isinstance(kv, (tuple, list)):
        if len(kv) != 2:
            raise LayoutError(f"{kind_of(pool)}: kv_buffer has {len(kv)} buffers, not K and V")
        names = axis_names(pool, kv[0], "component")
        buffers = [
            Buffer((name,), tensor, names, f"kv_buffer[{at}]")
            for at, (name, tensor) in enumerate(zip("kv", kv, strict=True))
        ]
    else:
        buffers = [Buffer(("k", "v"), kv, axis_names(pool, kv), "kv_buffer")]
    planes = list(planes_of(buffers, number(pool, "page_size"), label))
    dims = {"k": "head_dim", "v": "v_head_dim"}
    for plane, buffer in zip(planes, buffers, strict=True):
        for component in buffer.components:
            check_axes(pool, plane, buffer, _SAID | {"dim": dims[component]})
    dtype, scales = check_dtype(pool, buffers), _scales(pool, label)
    planes += scales
    check_size(pool, planes)
    scheme = MXFP8 if scales else None
    return _pool(pool, label, planes, ("head_dim", "v_head_dim"), dtype, scale_scheme=scheme)


def _scales(pool: Any, label: str) -> list[Plane]:
    """Read the scale blocks beside an MXFP8 payload: (page, layer, bytes) uint8 each."""
    buffers = [
        Buffer((f"{name}_scale",), tensor, ("page", "layer", "dim"), f"{name}_scale_host", MXFP8)
        for name in "kv"
        if (tensor := getattr(pool, f"{name}_scale_host", None)) is not None
    ]
    if not buffers:
        return []
    planes, heads = [], number(pool, "head_num")
    found = planes_of(buffers, number(pool, "page_size"), label)
    for plane, buffer in zip(found, buffers, strict=True):
        check_axes(pool, plane, buffer, _SAID)
        nbytes = plane.layout.axis("dim").extent
        if nbytes % heads:
            raise LayoutError(
                f"{kind_of(pool)}: {buffer.field} has {nbytes} B per page and layer, which "
                f"head_num {heads} does not divide"
            )
        planes.append(
            replace(plane, layout=plane.layout.split("dim", nbytes // heads, "head", "dim"))
        )
    return planes


def read_k_only(pool: Any, label: str) -> Pool:
    """Read a pool of keys without values (a sparse index)."""
    buffers = [
        Buffer(("k",), pool.k_buffer, axis_names(pool, pool.k_buffer, "component"), "k_buffer")
    ]
    planes = planes_of(buffers, number(pool, "page_size"), label)
    check_axes(pool, planes[0], buffers[0], _SAID | {"dim": "head_dim"})
    check_size(pool, planes)
    return _pool(pool, label, planes, ("head_dim",), check_dtype(pool, buffers))


def read_mla(pool: Any, label: str) -> Pool:
    """Read the latent rows of MLA: one component ``kv`` with one head."""
    if hasattr(pool, "index_k_buffer"):
        return _read_mla_split(pool, label)
    names = axis_names(pool, pool.kv_buffer, "component", "head_block")
    dims = len(getattr(pool.kv_buffer, "shape", ()))
    if "token" not in names and dims == len(names) - 1:
        names = tuple(name for name in names if name != "head")
    buffers = [Buffer(("kv",), pool.kv_buffer, names, "kv_buffer")]
    (plane,) = planes_of(buffers, number(pool, "page_size"), label)
    said = {k: v for k, v in _SAID.items() if k != "head"} | {"dim": "kv_cache_dim"}
    check_axes(pool, plane, buffers[0], said)
    planes = [replace(plane, layout=_with_one_head(plane.layout, kind_of(pool)))]
    check_size(pool, planes)
    return _pool(pool, label, planes, ("kv_cache_dim",), check_dtype(pool, buffers), heads=1)


def _with_one_head(layout: Layout, kind: str) -> Layout:
    """Give a latent row its one head, so that all MLA layouts have the same axes."""
    if "head" in layout:
        if layout.axis("head").extent != 1:
            raise LayoutError(f"{kind}: kv_buffer has {layout.axis('head').extent} heads, not 1")
        return layout
    dim = layout.axis("dim")
    axes = (*layout.axes[:-1], Axis("head", 1, dim.extent * dim.stride), dim)
    return replace(layout, axes=axes)


def _read_mla_split(pool: Any, label: str) -> Pool:
    """Read latent and rotary rows kept apart, with the index and its scales where present."""
    layers = number(pool, "layer_num")
    kept = [("k", pool.k_buffer, "k_buffer")]
    # A packed FP8 row holds the rotary part and its scales too: the other buffer is unused.
    if not getattr(pool, "dsa_kv_cache_store_fp8", False):
        kept.append(("v", pool.v_buffer, "v_buffer"))
    for component, field in (
        ("index_k", "index_k_buffer"),
        ("index_scale", "index_k_scale_buffer"),
    ):
        if getattr(pool, field, None) is not None:
            kept.append((component, getattr(pool, field), field))
    buffers = []
    for component, tensor, field in kept:
        shape = getattr(tensor, "shape", (0, 0))
        layer = "layer" if shape[1] == layers else "index_layer"
        buffers.append(Buffer((component,), tensor, ("page", layer, "slot", "head", "dim"), field))
    planes = planes_of(buffers, number(pool, "page_size"), label)
    said = {k: v for k, v in _SAID.items() if k != "head"}
    for plane, buffer in zip(planes, buffers, strict=True):
        check_axes(pool, plane, buffer, said)
    dtype = check_dtype(pool, [b for b in buffers if b.components != ("index_scale",)])
    dims = {name: p.layout.axis("dim").extent for p in planes for name in p.components}
    found = _pool(pool, label, planes, ("kv_lora_rank",), dtype, heads=1)
    return replace(found, head_dim=dims["k"], v_head_dim=dims.get("v", 0))


def _pool(
    pool: Any,
    label: str,
    planes: Sequence[Plane],
    dims: tuple[str, ...],
    dtype: str,
    *,
    heads: int | None = None,
    scale_scheme: str | None = None,
) -> Pool:
    page_size, shards = number(pool, "page_size"), int(getattr(pool, "dcp_size", 1))
    return Pool(
        tuple(planes),
        page_size=page_size,
        layers=number(pool, "layer_num"),
        heads=number(pool, "head_num") if heads is None else heads,
        head_dim=number(pool, dims[0]),
        v_head_dim=number(pool, dims[1]) if len(dims) > 1 else 0,
        dtype=dtype,
        label=label,
        scale_scheme=scale_scheme,
        owner=pool,
        # Under decode context parallelism a page of the index space is wider than the slots of
        # it that this rank holds.
        index_step=page_size * shards if shards > 1 else None,
    )
