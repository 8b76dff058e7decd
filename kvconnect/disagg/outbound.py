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
from kvconnect.disagg.conform import common_slots
from kvconnect.disagg.endpoint import Endpoint, PeerRank
from kvconnect.disagg.messages import Back, Message, Staged, Want
from kvconnect.disagg.orders import Layers, Order
from kvconnect.disagg.pair_plan import PairPlan
from kvconnect.disagg.staged import Claim, Lane, carry_staged, choose
from kvconnect.disagg.transport import Runs, Way
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

    def move(self, request_id: str, pages: U64, order: Order, layers: Layers, until: float) -> Sent:
        """Move `layers` of `pages` to the decode rank of `order`; a pull only needs the hash."""
        endpoint, peer = self._endpoint, order.peer
        plan = endpoint.plan(peer, *layers)
        pieces = order.slots // common_slots(endpoint.side.pool, peer.side.pool)
        if (failure := stopped(until, order.stop)) is not None:
            return Sent(Carried(0, failure), None)
        digest = checksum(endpoint.packer(plan), pages, pieces) if order.checksum else None
        if order.way is Way.PULL:
            return Sent(Carried(0), digest)
        packed, why = self.packs(plan, pieces, peer)
        started = time.monotonic()
        if packed:
            carried = self._packed(request_id, pages, order, layers, until, plan)
        else:
            carried = carry(
                endpoint.transport,
                peer.link,
                Way.PUSH,
                Runs(*plan.expand(pages, order.pages, pieces)),
                batch_bytes=endpoint.options.batch_bytes,
                until=until,
                stop=order.stop,
            )
        cause = carried.failure.cause if carried.failure is not None else ""
        ended = time.monotonic() - started, packed, why, cause
        with self._lock:
            self._count += 1
            trip = Trip(self._count, request_id, peer.hello.name, layers, carried.nbytes, *ended)
            self._trips.append(trip)
        return Sent(carried, digest, packed)

    def packs(self, plan: PairPlan, pieces: int, peer: PeerRank) -> tuple[bool, str]:
        """Tell whether a plan's pieces are sent packed, and why."""
        options = self._endpoint.options
        slot = min(self._endpoint.ring.slot_bytes, peer.hello.slot_bytes)
        if plan.piece_nbytes > slot:
            return False, f"a piece of {plan.piece_nbytes} B does not fit a slot of {slot} B"
        if options.stage != "auto":
            return options.stage == "always", f"stage={options.stage}"
        packed, words = choose(plan, pieces, self._endpoint.transport.capabilities)
        log.debug("kvconnect: to %s %s: %s", peer, "packed" if packed else "one by one", words)
        return packed, words

    def _packed(
        self,
        request_id: str,
        pages: U64,
        order: Order,
        layers: Layers,
        until: float,
        plan: PairPlan,
    ) -> Carried:
        endpoint, peer = self._endpoint, order.peer
        pieces = order.slots // common_slots(endpoint.side.pool, peer.side.pool)
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
            lambda first, n, slot: self._tell(peer, Staged(request_id, layers, first, n, slot)),
        )
        self._claims[claim.number] = claim
        try:
            packer = endpoint.packer(plan)
            return carry_staged(lane, packer, pages, pieces, until=until, stop=order.stop)
        finally:
            del self._claims[claim.number]
            claim.close()

    def _tell(self, peer: PeerRank, message: Message) -> None:
        with contextlib.suppress(ClosedError):
            self._endpoint.post(partial(self._endpoint.send_to, peer, message))
