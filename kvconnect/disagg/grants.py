"""What a rank grants its peers, as it stands in the metadata of network transports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, TypeVar

import msgspec

from kvconnect.errors import ConfigError, KVConnectError
from kvconnect.region import Region, RegionTable

MAX_GRANTS = 256
MAX_METADATA = 1 << 20

Generation = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
Token = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Host = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z.:_-]{1,255}$")]
Port = Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
Address = Annotated[int, msgspec.Meta(ge=1, lt=(1 << 63) - 1)]

T = TypeVar("T")


class Grant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One region that a peer may touch."""

    name: Annotated[str, msgspec.Meta(max_length=200)]
    address: Address
    nbytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]


Grants = Annotated[tuple[Grant, ...], msgspec.Meta(max_length=MAX_GRANTS)]


def grants_of(regions: Iterable[Region], owner: str) -> tuple[Grant, ...]:
    """Return the grants of regions; `ConfigError` where they are more than a peer takes."""
    grants = tuple(Grant(region.name[:200], region.address, region.nbytes) for region in regions)
    if len(grants) > MAX_GRANTS:
        raise ConfigError(
            f"{owner}: {len(grants)} regions are registered, peers take at most {MAX_GRANTS}; "
            f"register whole allocations, or raise max_region_bytes"
        )
    return grants


def table_of(grants: Iterable[Grant], owner: str) -> RegionTable:
    """Return the grants as a table; `ConfigError` where they cannot be."""
    try:
        return RegionTable(Region(g.name, g.address, g.nbytes) for g in grants)
    except KVConnectError as error:
        raise ConfigError(f"{owner}: the peer's grants cannot be: {error}") from None


def decode(metadata: bytes, kind: type[T], owner: str) -> T:
    """Decode what a peer sent; `ConfigError` if it is not metadata of this transport."""
    if len(metadata) > MAX_METADATA:
        raise ConfigError(
            f"{owner}: the peer's metadata has {len(metadata)} B; at most {MAX_METADATA} B can be"
        )
    try:
        return msgspec.msgpack.decode(metadata, type=kind)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{owner}: the peer's metadata cannot be read: {error}") from None
