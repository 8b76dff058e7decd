"""Prefill side, in the workers: moving one job's layers to one decode rank, and hashing them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial

from kvconnect.disagg.carry import Carried, carry, stopped
from kvconnect.disagg.checksum import checksum
from kvconnect.disagg.endpoint import Endpoint
from kvconnect.disagg.messages import Back, Message, Staged, Want
from kvconnect.disagg.orders import Order
from kvconnect.disagg.pair_plan import PairPlan
from kvconnect.disagg.peer_rank import PeerRank
from kvconnect.disagg.sections import KV, Layers, Section
from kvconnect.disagg.staged import Claim, Lane, carry_staged, choose
from kvconnect.disagg.straight import Straight, carry_straight
from kvconnect.disagg.transport import SupportsReach, Way
from kvconnect.errors import ClosedError
from kvconnect.page_index import U64

log = logging.getLogger("kvconnect.disagg")

_REMEMBERED = 1000
"""Pushes kept for `Outbound.trips`."""


@dataclass(frozen=True, slots=True)
class Sent:
    """How a job ended, the checksum of what was read, and whether it went packed."""

    carried: Carried
    checksum: bytes | None
    packed: bool = False


@dataclass(frozen=True, slots=True)
class Trip:
    """One push that has ended: what went to whom, how, why so, and in what time.

    `nbytes` are confirmed bytes: a push that failed has fewer than planned, and `failure` says
    why.
    """

    number: int
    request: str
    peer: str
    layers: Layers
    nbytes: int
    seconds: float
    packed: bool
    why: str
    failure: str
    pool: str = KV


class Outbound:
    """Moves jobs of one endpoint, run by run or packed, whichever costs less."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Use the endpoint's ring, transport and channel."""
        self._endpoint = endpoint
        self._claims: dict[int, Claim] = {}
        self._trips: deque[Trip] = deque(maxlen=_REMEMBERED)
        self._count = 0
        self._lock = threading.Lock()

    def trips(self, after: int) -> list[Trip]:
        """Return the remembered pushes whose number is above `after`, oldest first."""
        with self._lock:
            return [trip for trip in self._trips if trip.number > after]

    def lend(self, claim: int, slot: int) -> bool:
        """Hand a lent slot to the job that claimed it; False where that is over."""
        found = self._claims.get(claim)
        if found is not None:
            found.lend(slot)
        return found is not None

    def move(
        self, request_id: str, pages: U64, order: Order, section: Section, until: float
    ) -> Sent:
        """Move a section of `pages` to the decode rank of `order`; a pull only needs the hash."""
        endpoint, peer, there = self._endpoint, order.peer, order.filled[section.pool]
        plan = endpoint.plan(peer, section)
        pieces = endpoint.pieces(peer, section.pool, there.slots)
        if (failure := stopped(until, order.stop)) is not None:
            return Sent(Carried(0, failure), None)
        packer = endpoint.packer(plan, section.pool)
        digest = checksum(packer, pages, pieces) if order.checksum else None
        if order.way is Way.PULL:
            return Sent(Carried(0), digest)
        packed, why = self.packs(plan, pieces, peer)
        started = time.monotonic()
        transport = endpoint.transport
        free = endpoint.options.stage == "auto" and endpoint.options.min_run_bytes is None
        if packed and free and isinstance(transport, SupportsReach):
            packed, why = False, f"{why}; copied straight, as the peer's memory is mapped here"
            sides = endpoint.pools.sides[section.pool], peer.sides[section.pool]
            regions = sides[0].pool.regions, sides[1].pool.regions
            copier = partial(Straight, transport, peer.link, plan.blocks, regions)
            at = pages, there.pages
            carried = carry_straight(copier, at, pieces, until=until, stop=order.stop)
        elif packed:
            carried = self._packed(request_id, pages, order, section, until, plan)
        else:
            carried = carry(
                endpoint.transport,
                peer.link,
                Way.PUSH,
                endpoint.runs(peer, *plan.expand(pages, there.pages, pieces)),
                batch_bytes=endpoint.options.batch_bytes,
                until=until,
                stop=order.stop,
            )
        cause = (carried.trouble() or ("",))[0]
        ended = time.monotonic() - started, packed, why, cause, section.pool
        with self._lock:
            self._count += 1
            begun = self._count, request_id, peer.hello.name, section.layers, carried.nbytes
            self._trips.append(Trip(*begun, *ended))
        return Sent(carried, digest, packed)

    def packs(self, plan: PairPlan, pieces: int, peer: PeerRank) -> tuple[bool, str]:
        """Tell whether a plan's pieces are sent packed, and why."""
        options = self._endpoint.options
        slot = min(self._endpoint.ring.slot_bytes, peer.hello.slot_bytes)
        if plan.piece_nbytes > slot:
            return False, f"a piece of {plan.piece_nbytes} B does not fit a slot of {slot} B"
        if options.stage != "auto":
            return options.stage == "always", f"stage={options.stage}"
        if (least := options.min_run_bytes) is not None:
            return plan.shortest < least, f"runs of {plan.shortest} B, min_run_bytes={least}"
        packed, words = choose(plan, pieces, self._endpoint.transport.capabilities)
        log.debug("kvconnect: to %s %s: %s", peer, "packed" if packed else "one by one", words)
        return packed, words

    def _packed(
        self,
        request_id: str,
        pages: U64,
        order: Order,
        section: Section,
        until: float,
        plan: PairPlan,
    ) -> Carried:
        endpoint, peer = self._endpoint, order.peer
        pieces = endpoint.pieces(peer, section.pool, order.filled[section.pool].slots)

        def announce(first: int, count: int, slot: int) -> None:
            at = section.layers, first, count, slot, section.pool
            self._tell(peer, Staged(request_id, *at))

        claim = Claim(
            want=lambda number, count: self._tell(peer, Want(number, count)),
            back=lambda slot: self._tell(peer, Back(slot)),
        )
        lane = Lane(
            endpoint.transport,
            peer.link,
            endpoint.ring,
            peer.hello.staging.address,
            peer.hello.slot_bytes,
            claim,
            announce,
        )
        self._claims[claim.number] = claim
        try:
            packer = endpoint.packer(plan, section.pool)
            return carry_staged(lane, packer, pages, pieces, until=until, stop=order.stop)
        finally:
            del self._claims[claim.number]
            claim.close()

    def _tell(self, peer: PeerRank, message: Message) -> None:
        with contextlib.suppress(ClosedError):
            self._endpoint.post(partial(self._endpoint.send_to, peer, message))
