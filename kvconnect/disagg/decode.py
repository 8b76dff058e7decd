"""The decode side: grants pages to a request, and says when they hold it.

A request is done when the confirmed bytes of every share, from every prefill rank that holds
one, are exactly what the plan says, and their checksums agree where they were asked for: of the
KV and of every side pool. Otherwise it has failed as a whole.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from kvconnect.disagg.arrivals import Arrivals
from kvconnect.disagg.cause import Cause, cause_of
from kvconnect.disagg.endpoint import Endpoint
from kvconnect.disagg.greet import Greetings
from kvconnect.disagg.inbound import Inbound
from kvconnect.disagg.intake import Receiving
from kvconnect.disagg.ledger import Ledger
from kvconnect.disagg.messages import (
    Abort,
    Back,
    Envelope,
    Hello,
    Message,
    Ping,
    Quiet,
    Refused,
    Staged,
    Want,
)
from kvconnect.disagg.peer_rank import PeerRank
from kvconnect.disagg.requests import RequestState
from kvconnect.disagg.sections import KV
from kvconnect.disagg.transport import Way
from kvconnect.errors import ClosedError, ConfigError, KVConnectError

_REDIAL = 3
"""The hello, when those before had no answer, that goes by a new connection."""


class DecodeEndpoint(Endpoint):
    """One decode rank. Safe to use from many threads; a context manager that closes twice."""

    role = "decode"

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take the arguments of `Endpoint`; call `connect` before the first request."""
        self._ledger = Ledger(self)
        self._receivings = self._ledger.receivings
        self._greetings = Greetings()
        super().__init__(*args, **options)
        self._arrivals = Arrivals(self, self._ledger)
        self._inbound = Inbound(self, self._ledger, self._arrivals.emptied)

    def connect(self, addresses: Sequence[str], timeout: float | None = None) -> None:
        """Meet all ranks of the prefill instance, in any order; again after one restarted.

        Raises `ConfigError` naming both values where something does not fit, `LayoutError`
        where the ranks together do not hold what this one needs, and `UnavailableError` where
        one does not answer in time.
        """
        until = time.monotonic() + (self.options.timeout if timeout is None else timeout)
        self._ledger.check_shares([self._greet(address, until) for address in addresses])

    def _greet(self, address: str, until: float) -> PeerRank:
        route = self._channel.dial(address, bytes.fromhex(self.generation))
        said = Envelope(self.generation, "", self.hello())
        hellos = itertools.count(1)

        def say_hello() -> None:
            if next(hellos) == _REDIAL:
                self._channel.post(partial(self._channel.redial, route))
            # Again: until an answer was waited for, the last of an earlier start may have gone,
            # and its connection with it.
            self._channel.dial(address, bytes.fromhex(self.generation))
            self._channel.post(partial(self._channel.send, route, said))

        return self._greetings.greet(address, route, until, say_hello)

    def receive(
        self,
        request_id: str,
        pages: Any,
        *,
        side: Mapping[str, Any] | None = None,
        slots: int | None = None,
        side_slots: Mapping[str, int] | None = None,
        timeout: float | None = None,
        checksum: bool = True,
        way: Literal["push", "pull"] = "push",
    ) -> Receiving:
        """Have a request moved into pages; returns at once with a handle to wait on.

        `side`: the pages in every side pool that this rank holds, by the pool's name. `slots`
        and `side_slots`: how many slots of the pages are filled (None: all); a multiple of the
        slots common to both page sizes. `checksum` compares what arrived with what was read at
        the source. `way`: "push" has the prefill side write, "pull" reads from it.

        The pages belong to the request until `Receiving.quiet()`. Raises `PageIndexError` on
        pages that are none and `ConfigError` on an id in use.
        """
        filled = self.pools.filled(pages, slots, side or {}, side_slots or {})
        until = time.monotonic() + (self.options.timeout if timeout is None else timeout)
        chosen = Way.PUSH if way == "push" else Way.PULL
        if chosen not in self.transport.capabilities.ways:
            raise ConfigError(f"transport {self.transport.name} cannot {way}")
        receiving = Receiving(
            request_id, filled[KV].pages, until, filled=filled, way=chosen, checked=checksum
        )
        self.in_thread(lambda: self._begin(receiving))
        return receiving

    def _begin(self, receiving: Receiving) -> None:
        if self._closing:
            raise ClosedError(f"{self.options.name} is closed")
        self._ledger.begin(receiving)

    def quarantined(self, pool: str = KV) -> list[int]:
        """Return the pages of failed requests that a prefill rank may still write to.

        Of the KV, or of the side pool named; `ConfigError` where this rank has no such pool.
        """
        if pool not in self.pools.sides:
            raise ConfigError(f"pool is {pool!r}; this rank holds {sorted(self.pools.sides)}")
        found: list[int] = self.in_thread(lambda: self._ledger.quarantined(pool))
        return found

    def abort(self, request_id: str, reason: str = "aborted by the decode side") -> None:
        """End a request on both sides; does nothing where it is over or unknown."""

        def stop() -> None:
            if request_id in self._receivings:
                self._ledger.fail(self._receivings[request_id], reason, Cause.CANCELLED)

        self.in_thread(stop)

    def on_hello(self, route: str, generation: str, hello: Hello) -> None:
        """Take a prefill rank's answer: connect to it in a worker, then tell who asked."""
        if not self._greetings.expects(route):
            return
        for peer in self.peers.values():
            if peer.route == route and peer.lost is None and peer.generation != generation:
                said = "another start of it answers at its address"
                self.lose(peer, said, Cause.GENERATION)

        def told(peer: PeerRank | None, error: Exception | None) -> None:
            self._greetings.answer(route, peer or error or ConfigError(f"{route} said nothing"))

        self.acquaint(route, generation, hello, told)

    def on_stranger(self, route: str, envelope: Envelope) -> None:
        """Hear a refusal from a rank that is not known here."""
        if isinstance(envelope.message, Refused) and envelope.to == self.generation:
            self._refused(route, envelope.message)

    def _refused(self, route: str, said: Refused) -> None:
        """Hear that our greeting is refused, or that a start of a rank is not there any more."""
        if not said.start:
            self._greetings.answer(route, ConfigError(f"{route} refuses: {said.reason}"))
        # Only that one: word of an earlier start must not cost us the one that followed it.
        peer = self.peers.get(said.start)
        if peer is not None and peer.route == route and peer.lost is None:
            self.lose(peer, f"it refuses to talk: {said.reason}")

    def on_message(self, peer: PeerRank, message: Message) -> None:
        """Handle what a prefill rank says about a request."""
        if isinstance(message, Refused):
            self._refused(peer.route, message)
            return
        if isinstance(message, (Want, Staged, Back)):
            self._inbound.on_message(peer, message)
            return
        found = self._ledger.find(peer, getattr(message, "request", ""))
        if found is None:
            return
        receiving, intake = found
        if isinstance(message, Quiet):
            intake.quiet = True
        elif isinstance(message, Abort):
            self._ledger.fail(receiving, f"{peer} gave up: {message.reason}", message.cause.told)
        elif receiving.state is RequestState.UNDER_WAY:
            try:
                self._arrivals.progress(receiving, intake, message)
            except KVConnectError as error:
                self._ledger.fail(receiving, str(error), cause_of(error))

    def on_call(self, peer: PeerRank) -> int:
        """Remember what a rank has of our slots when it is asked."""
        return self._inbound.lender.ask(peer.generation)

    def on_answer(self, peer: PeerRank, ping: Ping) -> None:
        """Take back slots that got lost between a rank and this one."""
        self._inbound.settle(peer, ping.number, ping.slots)

    def on_lost(self, peer: PeerRank) -> None:
        """Fail every request for which a lost rank still had something to do."""
        self._inbound.lender.forget(peer.generation)
        self._ledger.lost(peer)

    def on_gone(self, peer: PeerRank) -> None:
        """Take back the slots of a rank that can write no more, and drop its connection."""
        self._inbound.gone(peer)
        others = any(other.route == peer.route for other in self.peers.values())
        if not others and not self._greetings.expects(peer.route):
            self._channel.hang_up(peer.route)

    def on_tick(self, now: float) -> None:
        """Look at the deadlines and at the pages of what has failed."""
        self._ledger.tick(now)

    def at_rest(self) -> bool:
        """Tell whether nothing is under way and all pages are free."""
        return not self._receivings

    def on_close(self) -> None:
        """Fail everything that is not over."""
        self._ledger.close()
