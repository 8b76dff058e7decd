"""How two ranks get to know each other: a greeting each way, checked, then the memory's link.

Connecting to a host that is not there may take its time, so it is done by a thread of its own
and keeps no bytes from moving. A peer is one generation of a rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from kvconnect.disagg.granted import check_granted
from kvconnect.disagg.handshake import check_pools
from kvconnect.disagg.messages import Hello
from kvconnect.disagg.options import EndpointOptions
from kvconnect.disagg.peer_rank import PeerRank
from kvconnect.disagg.plan_cache import Plans
from kvconnect.disagg.pools import Pools, about
from kvconnect.disagg.ring import Ring
from kvconnect.disagg.sections import KV
from kvconnect.disagg.transport import PeerTransport
from kvconnect.disagg.wire import RegionData, to_data
from kvconnect.disagg.workers import Workers
from kvconnect.errors import ConfigError, KVConnectError
from kvconnect.placement import Placement
from kvconnect.region import Region

log = logging.getLogger("kvconnect.disagg")

_MAX_MEETING = 1024
"""Greetings that wait to be answered; whoever is left out greets again."""

Told = Callable[[PeerRank | None, Exception | None], None]
Later = Callable[[Callable[[], Any], Callable[[Any, Exception | None], None], Workers], None]


class Meetings:
    """The greetings of one rank. Used in the channel's thread; `meet` is for its own worker."""

    def __init__(
        self,
        role: str,
        pools: Pools,
        transport: PeerTransport,
        ring: Ring,
        options: EndpointOptions,
        plans: Plans,
        peers: dict[str, PeerRank],
    ) -> None:
        """Start the worker; `peers`, by generation, gets who was met."""
        self._role, self._pools, self._transport = role, pools, transport
        self._ring, self._options, self._plans, self._peers = ring, options, plans, peers
        self.waiting: set[str] = set()
        """Generations whose greeting is being answered."""
        self.workers = Workers(1, "kvconnect-meet")

    def hello(self) -> Hello:
        """Describe this rank to a peer."""
        ring, pools = self._ring.region, self._pools
        return Hello(
            role="prefill" if self._role == "prefill" else "decode",
            name=self._options.name,
            fleet=self._options.fleet,
            ranks=self._options.ranks,
            identity=pools.identities[KV].to_json(),
            side=to_data(pools.sides[KV]),
            transport=self._transport.name,
            metadata=self._transport.describe(),
            staging=RegionData(ring.name, ring.address, ring.nbytes, ring.device),
            slot_bytes=self._ring.slot_bytes,
            side_pools=pools.side_data(),
        )

    def acquaint(self, route: str, generation: str, hello: Hello, told: Told, later: Later) -> None:
        """Channel thread: `told` of the peer that greets, connected to, or why it cannot be.

        One that was lost and still runs is the same again; its requests stay failed. Says
        nothing where that is under way already, or has to wait until the last of it is gone.
        """
        known = self._peers.get(generation)
        if known is not None:
            if known.lost is not None and known.ended is None and known.link.alive():
                log.info("kvconnect: %s found %s again", self._options.name, known)
                known.lost = None
            if known.lost is None:
                if known.route == route:
                    known.heard = time.monotonic()
                told(known, None)
            return
        if generation in self.waiting or len(self.waiting) >= _MAX_MEETING:
            return
        self.waiting.add(generation)

        def met(peer: PeerRank | None, error: Exception | None) -> None:
            self.waiting.discard(generation)
            if peer is not None:
                peer.heard = time.monotonic()
                self._peers[generation] = peer
            told(peer, error)

        later(lambda: self.meet(route, generation, hello), met, self.workers)

    def meet(self, route: str, generation: str, hello: Hello) -> PeerRank:
        """Worker: check a greeting and connect to the peer's memory.

        Raises `ConfigError` naming what does not fit, with both values, and `LayoutError` where
        a pool has no plan.
        """
        wanted = "decode" if self._role == "prefill" else "prefill"
        if hello.role != wanted:
            raise ConfigError(f"{self._role} was greeted by {hello.role}; it talks to {wanted}")
        if hello.transport != self._transport.name:
            raise ConfigError(
                f"transport is {self._transport.name!r} here and {hello.transport!r} at the peer"
            )
        theirs = Pools.from_hello(hello)
        parts = check_pools(
            self._pools,
            theirs,
            sending=self._role == "prefill",
            min_slots=self._options.min_slots,
        )
        self._check_plans(theirs, parts)
        link = self._transport.connect(hello.metadata, self._options.timeout)
        try:
            staging = _staging(hello)
            for region in (*theirs.regions, staging):
                check_granted(link, region)
        except BaseException:
            link.close()
            raise
        heard = time.monotonic()
        return PeerRank(route, generation, hello, theirs.sides, link, parts, heard)

    def _check_plans(self, theirs: Pools, parts: dict[str, Placement]) -> None:
        """Plan all that moves: what cannot is found now, and what can is planned already."""
        for name, part in parts.items():
            sides = self._pools.sides[name], theirs.sides[name]
            source, target = sides if self._role == "prefill" else reversed(sides)
            with about(name):
                self._plans.plan(source, target, part)


def _staging(hello: Hello) -> Region:
    told = hello.staging
    try:
        return Region(told.name, told.address, told.nbytes, told.device)
    except KVConnectError as error:
        raise ConfigError(f"the peer's staging memory cannot be: {error}") from None
