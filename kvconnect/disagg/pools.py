"""The pools of one rank by name: the KV anchor, and the side pools beside it.

Sliding-window KV, Mamba states, a sparse index, the KV of a draft model: each is a pool of its
own, with its own identity, placement, layout and page size. A request has pages in all of them,
and it is done only with all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvconnect.attach import as_pool, check_identity
from kvconnect.disagg.conform import Side
from kvconnect.disagg.messages import MAX_PAGES, Hello
from kvconnect.disagg.requests import Filled
from kvconnect.disagg.sections import KV
from kvconnect.disagg.wire import MAX_SIDE_POOLS, SidePoolData, from_data, to_data
from kvconnect.errors import ConfigError, KVConnectError
from kvconnect.identity import Identity
from kvconnect.page_index import U64
from kvconnect.placement import Placement
from kvconnect.region import Region


@dataclass(frozen=True, slots=True)
class SidePool:
    """A pool beside the KV, as an endpoint takes it; its name is `identity.pool`.

    `pool` and `placement` are as for the KV. Both are None on a rank that holds nothing of it,
    such as the first pipeline stage where a draft model runs on the last: all ranks of both
    sides name the same pools.
    """

    pool: Any
    placement: Placement | None
    identity: Identity

    def __post_init__(self) -> None:
        """Refuse the name of the anchor, and half of a description."""
        if self.identity.pool == KV:
            raise ConfigError(
                f"a side pool's identity says pool={KV!r}, the name of the anchor; give it its own"
            )
        if (self.pool is None) != (self.placement is None):
            raise ConfigError(
                f"side pool {self.identity.pool!r}: give pool and placement, or neither where "
                f"this rank holds nothing of it"
            )


@dataclass(frozen=True, slots=True)
class Pools:
    """What one rank holds: the `identities` of all pools, the `sides` of those it has a part of.

    Both by name; the anchor is always among them, and is first.
    """

    identities: Mapping[str, Identity]
    sides: Mapping[str, Side]

    @property
    def extent(self) -> int:
        """Local layers over all pools."""
        return sum(side.placement.layers.extent for side in self.sides.values())

    @property
    def regions(self) -> tuple[Region, ...]:
        """The memory behind all pools, each allocation once."""
        return tuple(dict.fromkeys(r for side in self.sides.values() for r in side.pool.regions))

    @classmethod
    def of(
        cls, pool: Any, placement: Placement, identity: Identity, side_pools: Iterable[SidePool]
    ) -> Pools:
        """Take a rank's pools; `ConfigError` where one contradicts its identity."""
        identities, sides = {KV: identity}, {KV: Side(as_pool(pool), placement)}
        check_identity(identity, sides[KV].pool, placement)
        for one in side_pools:
            name = one.identity.pool
            if name in identities:
                raise ConfigError(f"two side pools are called {name!r}; give each its own name")
            identities[name] = one.identity
            if one.placement is not None:
                with about(name):
                    sides[name] = Side(as_pool(one.pool), one.placement)
                    check_identity(one.identity, sides[name].pool, one.placement)
        if len(identities) - 1 > MAX_SIDE_POOLS:
            raise ConfigError(
                f"{len(identities) - 1} side pools; a rank has at most {MAX_SIDE_POOLS}"
            )
        return cls(identities, sides)

    @classmethod
    def from_hello(cls, hello: Hello) -> Pools:
        """Rebuild what a peer has said that it holds; `ConfigError` where that cannot be."""
        identities, sides = {KV: Identity.from_json(hello.identity)}, {KV: from_data(hello.side)}
        for data in hello.side_pools:
            identity = Identity.from_json(data.identity)
            if identity.pool in identities:
                raise ConfigError(f"the peer names the pool {identity.pool!r} twice")
            identities[identity.pool] = identity
            if data.side is not None:
                sides[identity.pool] = from_data(data.side)
        return cls(identities, sides)

    def side_data(self) -> tuple[SidePoolData, ...]:
        """Describe the side pools to a peer."""
        return tuple(
            SidePoolData(
                identity.to_json(), to_data(self.sides[name]) if name in self.sides else None
            )
            for name, identity in self.identities.items()
            if name != KV
        )

    def check(self, name: str, pages: Any) -> U64:
        """Return page ids of the pool `name`, (pages,) uint64, or raise `PageIndexError`."""
        with about(name):
            found: U64 = self.sides[name].pool.check_page_ids(pages)
        return found

    def check_side(self, side: Mapping[str, Any]) -> dict[str, U64]:
        """Return checked page ids by pool; `ConfigError` where one is not here, or is empty."""
        out: dict[str, U64] = {}
        for name, pages in side.items():
            if name == KV or name not in self.sides:
                raise ConfigError(
                    f"side names pool {name!r}; this rank holds {sorted(set(self.sides) - {KV})}"
                )
            out[name] = self.check(name, pages)
            if not len(out[name]):
                raise ConfigError(f"pool {name!r}: no pages; every pool has one at least")
        return out

    def filled(
        self,
        pages: Any,
        slots: int | None,
        side: Mapping[str, Any],
        side_slots: Mapping[str, int],
    ) -> dict[str, Filled]:
        """Return the pages of a request by pool; every pool that this rank holds must be named.

        `slots`, `side_slots`: how many slots are filled, all where they are not given.
        """
        given = {KV: self.check(KV, pages)} | self.check_side(side)
        if missing := [name for name in self.sides if name not in given]:
            raise ConfigError(f"no pages of {missing}; a request has some in every pool")
        if unknown := [name for name in side_slots if name not in side]:
            raise ConfigError(f"side_slots names {unknown}; side names {sorted(side)}")
        wanted = dict(side_slots) | ({} if slots is None else {KV: slots})
        found = {name: self._fill(name, ids, wanted.get(name)) for name, ids in given.items()}
        if (count := sum(len(one.pages) for one in found.values())) > MAX_PAGES:
            raise ConfigError(f"{count} pages in one request; at most {MAX_PAGES} are taken")
        return found

    def _fill(self, name: str, ids: U64, slots: int | None) -> Filled:
        size = self.sides[name].pool.page_size
        count = len(ids) * size if slots is None else slots
        if not (len(ids) - 1) * size < count <= len(ids) * size:
            where = "" if name == KV else f"pool {name!r}: "
            raise ConfigError(f"{where}slots={count} do not fill {len(ids)} pages of {size}")
        return Filled(ids, count)


@contextlib.contextmanager
def about(name: str) -> Iterator[None]:
    """Have what is raised inside name the side pool that it is about."""
    try:
        yield
    except KVConnectError as error:
        if name == KV:
            raise
        raise type(error)(f"pool {name!r}: {error}") from error
