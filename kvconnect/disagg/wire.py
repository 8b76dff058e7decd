"""What one side tells the other about its pool, as plain data that is checked on arrival.

A peer's description is turned back into a `Side` of the same types that describe a pool of this
process, so every invariant is checked by the same constructors: a layout that overlaps itself,
ends outside its region or has a range outside the model is refused before anything is planned.
Addresses in it are the peer's; nothing here reads memory.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvconnect.disagg.conform import Side
from kvconnect.errors import ConfigError, KVConnectError, LayoutError
from kvconnect.layout import Axis, Layout
from kvconnect.placement import Placement, Span
from kvconnect.pool import Plane, Pool
from kvconnect.region import Region

Text = Annotated[str, msgspec.Meta(max_length=200)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Address = Annotated[int, msgspec.Meta(ge=1, lt=(1 << 63) - 1)]

MAX_PLANES, MAX_REGIONS, MAX_AXES, MAX_SIDE_POOLS = 64, 64, 12, 16


class AxisData(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One axis: name, extent, stride in bytes."""

    name: Text
    extent: Count
    stride: Count


class RegionData(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One registered allocation of the peer."""

    name: Text
    address: Address
    nbytes: Count
    device: Text


class PlaneData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One plane: which region (an index), the layout inside it, and its components."""

    region: Count
    axes: Annotated[tuple[AxisData, ...], msgspec.Meta(max_length=MAX_AXES)]
    itemsize: Count
    offset: Count
    form: Text
    components: Annotated[tuple[Text, ...], msgspec.Meta(min_length=1, max_length=MAX_PLANES)]
    dtype: Text | None


class PlacementData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the rank holds: ranges as (start, stop, total)."""

    layers: tuple[Count, Count, Count]
    heads: tuple[Count, Count, Count]
    replica: Count
    replicas: Count
    shards: Annotated[
        tuple[tuple[Text, tuple[Count, Count, Count]], ...], msgspec.Meta(max_length=8)
    ]


class SideData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's pool and placement."""

    label: Text
    regions: Annotated[tuple[RegionData, ...], msgspec.Meta(min_length=1, max_length=MAX_REGIONS)]
    planes: Annotated[tuple[PlaneData, ...], msgspec.Meta(min_length=1, max_length=MAX_PLANES)]
    page_size: Count
    layers: Count
    heads: Count
    head_dim: Count
    v_head_dim: Count
    dtype: Text
    scale_scheme: Text | None
    placement: PlacementData


class SidePoolData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A side pool: its identity, which has its name, and what the rank holds of it, if anything."""

    identity: Annotated[bytes, msgspec.Meta(max_length=1 << 16)]
    side: SideData | None


def to_data(side: Side) -> SideData:
    """Describe a rank of this process."""
    pool = side.pool
    return SideData(
        label=pool.label,
        regions=tuple(RegionData(r.name, r.address, r.nbytes, r.device) for r in pool.regions),
        planes=tuple(_plane_data(plane, pool.regions) for plane in pool.planes),
        page_size=pool.page_size,
        layers=pool.layers,
        heads=pool.heads,
        head_dim=pool.head_dim,
        v_head_dim=pool.v_head_dim,
        dtype=pool.dtype,
        scale_scheme=pool.scale_scheme,
        placement=_placement_data(side.placement),
    )


def _plane_data(plane: Plane, regions: tuple[Region, ...]) -> PlaneData:
    layout = plane.layout
    return PlaneData(
        region=regions.index(plane.region),
        axes=tuple(AxisData(a.name, a.extent, a.stride) for a in layout.axes),
        itemsize=layout.itemsize,
        offset=layout.offset,
        form=layout.form,
        components=plane.components,
        dtype=plane.dtype,
    )


def _placement_data(placement: Placement) -> PlacementData:
    return PlacementData(
        layers=_numbers(placement.layers),
        heads=_numbers(placement.heads),
        replica=placement.replica,
        replicas=placement.replicas,
        shards=tuple((name, _numbers(span)) for name, span in placement.shards),
    )


def _numbers(span: Span) -> tuple[int, int, int]:
    return (span.start, span.stop, span.total)


def from_data(data: SideData) -> Side:
    """Rebuild a peer's side; `ConfigError` says what in its description cannot be."""
    try:
        regions = tuple(Region(r.name, r.address, r.nbytes, r.device) for r in data.regions)
        pool = Pool(
            tuple(_plane(plane, regions) for plane in data.planes),
            page_size=data.page_size,
            layers=data.layers,
            heads=data.heads,
            head_dim=data.head_dim,
            v_head_dim=data.v_head_dim,
            dtype=data.dtype,
            label=data.label,
            scale_scheme=data.scale_scheme,
        )
        side = Side(pool, _placement(data.placement))
        _check_held(side)
    except KVConnectError as error:
        raise ConfigError(f"peer's pool {data.label!r} cannot be: {error}") from None
    return side


def _plane(data: PlaneData, regions: tuple[Region, ...]) -> Plane:
    if data.region >= len(regions):
        raise LayoutError(f"plane {data.components} names region {data.region} of {len(regions)}")
    axes = tuple(Axis(a.name, a.extent, a.stride) for a in data.axes)
    layout = Layout(axes, data.itemsize, data.offset, data.form)
    return Plane(regions[data.region], layout, data.components, data.dtype)


def _placement(data: PlacementData) -> Placement:
    return Placement(
        Span(*data.layers),
        Span(*data.heads),
        data.replica,
        data.replicas,
        tuple((name, Span(*numbers)) for name, numbers in data.shards),
    )


def _check_held(side: Side) -> None:
    pool, held = side.pool, side.placement
    for axis, have, span in (("layer", pool.layers, held.layers), ("head", pool.heads, held.heads)):
        if have != span.extent:
            raise LayoutError(f"the pool has {have} {axis}s, the placement holds {span}")
