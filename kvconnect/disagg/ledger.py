"""The decode side's requests: which there are, what pages they hold, and how they end.

A request that failed keeps its pages until each prefill rank has said that nothing of it moves
any more, or is known to be gone: late bytes never reach a page that was handed out again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from kvconnect.disagg.cause import Cause, cause_of
from kvconnect.disagg.endpoint import Endpoint
from kvconnect.disagg.handshake import check_slots
from kvconnect.disagg.intake import Intake, Receiving
from kvconnect.disagg.messages import Abort, Grant, SideGrant, pack_pages
from kvconnect.disagg.pairs import shares
from kvconnect.disagg.peer_rank import PeerRank
from kvconnect.disagg.pools import about
from kvconnect.disagg.requests import RequestState
from kvconnect.disagg.sections import KV
from kvconnect.errors import ConfigError, KVConnectError


class Ledger:
    """The requests of one decode rank, by id. Used in the channel's thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Start without any."""
        self.receivings: dict[str, Receiving] = {}
        self._endpoint = endpoint
        self._nagged = 0.0

    def begin(self, receiving: Receiving) -> None:
        """Ask every prefill rank for its share; `ConfigError` on an id or pages in use.

        Fails the request where the ranks that are here cannot fill it.
        """
        if receiving.request_id in self.receivings:
            raise ConfigError(f"request {receiving.request_id!r} is under way already")
        self._check_free(receiving)
        self.receivings[receiving.request_id] = receiving
        here = [peer for peer in self._endpoint.peers.values() if peer.lost is None]
        receiving.intakes = {
            peer.generation: Intake(peer, complete=not peer.parts) for peer in here
        }
        try:
            self.check_shares(here)
            self._check_slots(receiving, here)
        except KVConnectError as error:
            self.fail(receiving, str(error), cause_of(error))
            return
        grant = _grant(receiving)
        for peer in here:
            self._endpoint.send_to(peer, grant)

    def check_shares(self, peers: Iterable[PeerRank]) -> None:
        """Raise `LayoutError` unless `peers` together hold each pool as this rank needs it."""
        found = list(peers)
        for name, side in self._endpoint.pools.sides.items():
            with about(name):
                held = [peer.sides[name].placement for peer in found if name in peer.sides]
                shares(held, side.placement)

    def _check_slots(self, receiving: Receiving, peers: Iterable[PeerRank]) -> None:
        for peer in peers:
            for name in peer.parts:
                pool = self._endpoint.pools.sides[name].pool
                with about(name):
                    check_slots(receiving.filled[name].slots, peer.sides[name].pool, pool)

    def _check_free(self, receiving: Receiving) -> None:
        for name, filled in receiving.filled.items():
            taken = set(filled.pages.tolist()).intersection(self._held(name))
            if taken:
                where = "" if name == KV else f" of pool {name!r}"
                raise ConfigError(
                    f"request {receiving.request_id!r}: page {min(taken)}{where} still belongs "
                    f"to another request; wait for its quiet()"
                )

    def _held(self, pool: str, *states: RequestState) -> set[int]:
        """Return the pages of a pool that requests hold, those in `states` (none given: all)."""
        return {
            page
            for receiving in self.receivings.values()
            if not receiving.quiet() and (not states or receiving.state in states)
            for page in receiving.filled[pool].pages.tolist()
        }

    def quarantined(self, pool: str) -> list[int]:
        """Return the pages of a pool that failed requests hold."""
        return sorted(self._held(pool, RequestState.FAILED))

    def find(self, peer: PeerRank, request_id: str) -> tuple[Receiving, Intake] | None:
        """Return a request and what is here of a peer's share of it, or None."""
        receiving = self.receivings.get(request_id)
        intake = receiving.intakes.get(peer.generation) if receiving is not None else None
        return None if receiving is None or intake is None else (receiving, intake)

    def look(self, receiving: Receiving) -> None:
        """End a request as done once every share of every pool is complete."""
        if not all(intake.complete for intake in receiving.intakes.values()):
            return
        receiving.nbytes = sum(intake.nbytes for intake in receiving.intakes.values())
        if receiving.end(RequestState.DONE):
            receiving.settle()
            del self.receivings[receiving.request_id]

    def fail(self, receiving: Receiving, reason: str, cause: Cause) -> None:
        """End a request as failed, unless it has ended; stops whatever still moves."""
        if receiving.end(RequestState.FAILED, reason, cause):
            receiving.stop.set()
            self._abort(receiving, receiving.intakes.values())

    def _abort(self, receiving: Receiving, intakes: Iterable[Intake]) -> None:
        cause = receiving.cause or Cause.ERROR
        said = Abort(receiving.request_id, receiving.reason[:4000], cause)
        for intake in intakes:
            self._endpoint.send_to(intake.peer, said)

    def lost(self, peer: PeerRank) -> None:
        """Fail every request for which a lost rank still had something to do."""
        for receiving in list(self.receivings.values()):
            intake = receiving.intakes.get(peer.generation)
            if intake is not None and not intake.told_all(receiving.way):
                self.fail(receiving, f"{peer} was lost: {peer.lost}", peer.cause)

    def tick(self, now: float) -> None:
        """Fail what is past its deadline; give back pages that nothing can reach any more."""
        nag = now - self._nagged >= self._endpoint.options.ping
        self._nagged = now if nag else self._nagged
        for receiving in list(self.receivings.values()):
            if receiving.state is RequestState.UNDER_WAY and now > receiving.until:
                self.fail(receiving, "the request's deadline has passed", Cause.TIMEOUT)
            if receiving.state is not RequestState.FAILED:
                continue
            moving = [i for i in receiving.intakes.values() if not i.at_rest()]
            if not moving:
                receiving.settle()
                del self.receivings[receiving.request_id]
            elif nag:
                # The first one may have been lost, and without an answer no page comes back.
                self._abort(receiving, moving)

    def close(self) -> None:
        """Fail everything that is not over."""
        for receiving in list(self.receivings.values()):
            self.fail(receiving, "the decode endpoint closes", Cause.CLOSED)


def _grant(receiving: Receiving) -> Grant:
    filled = receiving.filled
    return Grant(
        receiving.request_id,
        pack_pages(filled[KV].pages),
        filled[KV].slots,
        receiving.way.value,
        max(receiving.until - time.monotonic(), 1e-3),
        receiving.checked,
        tuple(
            SideGrant(name, pack_pages(one.pages), one.slots)
            for name, one in filled.items()
            if name != KV
        ),
    )
