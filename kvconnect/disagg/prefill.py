"""The prefill side: holds pages, and moves them to the decode ranks that asked for them.

`send(request_id, pages, layers)` may come before or after the decode side's grant, once for all
layers or again and again as layers finish. A request is done when every rank of the decode
instance has everything it needs from here, and fails as a whole: on its deadline, on a transport
failure, on an abort from either side, on the loss of a peer.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvconnect.disagg.cause import Cause, cause_of
from kvconnect.disagg.endpoint import Endpoint
from kvconnect.disagg.messages import (
    Abort,
    Back,
    Envelope,
    Grant,
    Hello,
    Lent,
    Message,
    Moved,
    Quiet,
    Ready,
    Refused,
    Staged,
    Taken,
    pack_pages,
)
from kvconnect.disagg.orders import Order, pages_for
from kvconnect.disagg.outbound import Outbound, Sent, Trip
from kvconnect.disagg.peer_rank import PeerRank
from kvconnect.disagg.requests import Request, RequestState
from kvconnect.disagg.sections import KV, Layers, Section, extent_of
from kvconnect.disagg.transport import Way
from kvconnect.errors import ConfigError
from kvconnect.page_index import U64

_REMEMBER_SECONDS = 60.0
"""After its deadline, how long a failed request is remembered for grants that come late."""


@dataclass(eq=False)
class Sending(Request):
    """A request on the prefill side; see `PrefillEndpoint.send`. `offered`: its pages by pool."""

    offered: dict[str, U64] = field(default_factory=dict)
    sections: list[Section] = field(default_factory=list)


class PrefillEndpoint(Endpoint):
    """One prefill rank. Safe to use from many threads; a context manager that closes twice."""

    role = "prefill"

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take the arguments of `Endpoint`; call `listen` to be found."""
        self._sendings: dict[str, Sending] = {}
        self._orders: dict[str, dict[str, Order]] = {}
        self._ended: dict[str, tuple[str, Cause, float]] = {}
        super().__init__(*args, **options)
        self._outbound = Outbound(self)

    def listen(self, address: str = "tcp://127.0.0.1:*") -> str:
        """Take connections at `address`; returns it with the port in use."""
        return self._channel.listen(address)

    def send(
        self,
        request_id: str,
        pages: Any,
        *,
        layers: Layers | tuple[()] | None = None,
        side: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Sending:
        """Offer pages of a request; returns at once with a handle to wait on.

        `pages`: page ids in the order of the sequence, the same in every call for a request.
        `layers`: the global layers [start, stop) that are finished, None for all of this rank,
        () for none. `side`: the pages in the side pools that are finished, by the pool's name,
        each in one of the calls; the request waits for all that this rank holds. `timeout`
        counts from the first call. An id that has failed stays failed. Raises `PageIndexError`
        on pages that are none and `ConfigError` on layers and pools that are not this rank's or
        were sent before.
        """
        offered = {KV: self.pools.check(KV, pages)} | self.pools.check_side(side or {})
        sections = self._sections(layers, side or {})
        until = time.monotonic() + (self.options.timeout if timeout is None else timeout)
        sending: Sending = self.in_thread(lambda: self._send(request_id, offered, sections, until))
        return sending

    def _sections(self, layers: Layers | tuple[()] | None, side: Iterable[str]) -> list[Section]:
        """Return what a call offers; side pools are sent whole."""
        held = self.side.placement.layers
        out = []
        if layers != ():
            start, stop = layers or (held.start, held.stop)
            if not held.start <= start < stop <= held.stop:
                raise ConfigError(f"layers [{start}, {stop}) are not inside this rank's {held}")
            out.append(Section(KV, start, stop))
        for name in side:
            span = self.pools.sides[name].placement.layers
            out.append(Section(name, span.start, span.stop))
        return out

    def _send(
        self, request_id: str, offered: dict[str, U64], sections: list[Section], until: float
    ) -> Sending:
        sending = self._sendings.get(request_id)
        if sending is None:
            sending = Sending(request_id, offered[KV], until)
            if request_id in self._ended or self._closing:
                closes = "the prefill endpoint closes", Cause.CLOSED, 0.0
                reason, cause, _ = self._ended.get(request_id, closes)
                sending.end(RequestState.FAILED, reason, cause)
                sending.settle()
                return sending
            self._sendings[request_id] = sending
        elif len(sending.pages) != len(offered[KV]) or (sending.pages != offered[KV]).any():
            raise ConfigError(f"request {request_id!r} was begun with other pages")
        for new in sections:
            if any(new.meets(old) for old in sending.sections):
                raise ConfigError(f"request {request_id!r}: {new} were sent before")
        sending.offered |= offered
        sending.sections += sections
        for order in self._orders.get(request_id, {}).values():
            self._serve(sending, order, sections)
        self._look(sending)
        return sending

    def abort(self, request_id: str, reason: str = "aborted by the prefill side") -> None:
        """End a request on both sides; does nothing where it is over or unknown."""
        self.in_thread(lambda: self._fail(request_id, reason, Cause.CANCELLED))

    def trips(self, after: int = 0) -> list[Trip]:
        """Return the last pushes that ended, those with a number above `after`, oldest first."""
        return self._outbound.trips(after)

    def on_hello(self, route: str, generation: str, hello: Hello) -> None:
        """Meet a decode rank in a worker, then answer with our own greeting or a refusal."""

        def answer(peer: PeerRank | None, error: Exception | None) -> None:
            # Where it was asked, which need not be where the peer is known to be.
            said = self.hello() if peer is not None else Refused(str(error)[:4000])
            self._channel.send(route, Envelope(self.generation, generation, said))

        self.acquaint(route, generation, hello, answer)

    def on_stranger(self, route: str, envelope: Envelope) -> None:
        """Tell a rank that is not known (any more), or takes this one for another start of it."""
        peer = self.peers.get(envelope.sender)
        why = f"generation {envelope.to or 'none'} is not here"
        if peer is not None and peer.lost is not None and envelope.to == self.generation:
            why = f"it was lost: {peer.lost}"
        said = Refused(f"{why}; say hello first", envelope.to)
        self._channel.send(route, Envelope(self.generation, envelope.sender, said))

    def on_message(self, peer: PeerRank, message: Message) -> None:
        """Handle a grant, an abort, or the end of a pull."""
        if isinstance(message, Grant):
            self._granted(peer, message)
        elif isinstance(message, Abort):
            self._aborted(peer, message)
        elif isinstance(message, Taken):
            self._taken(peer, message)
        elif isinstance(message, Lent):
            self.borrowed.setdefault(peer.generation, set()).add(message.slot)
            if not self._outbound.lend(message.claim, message.slot):
                self.send_to(peer, Back(message.slot))

    def send_to(self, peer: PeerRank, message: Message) -> None:
        """Channel thread: send to a peer, and note which of its slots this side has no more."""
        if isinstance(message, (Back, Staged)):
            held = self.borrowed.get(peer.generation, set())
            held.discard(message.slot)
            if not held:
                self.borrowed.pop(peer.generation, None)
        super().send_to(peer, message)

    def _granted(self, peer: PeerRank, grant: Grant) -> None:
        if peer.generation in self._orders.get(grant.request, {}):
            raise ConfigError(f"request {grant.request!r} was granted twice")
        order = Order.of(peer, grant)
        if self._foreign(peer, grant.request):
            # The first one goes on: a second must not be able to end what it has no part in.
            said = "another decode instance has asked for this request"
            self.send_to(peer, Abort(grant.request, said, Cause.REFUSED))
            return
        orders = self._orders.setdefault(grant.request, {})
        orders[peer.generation] = order
        sending = self._sendings.get(grant.request)
        if (ended := self._ended.get(grant.request)) is not None:
            self._give_up(grant.request, order, ended[0], ended[1])
        elif self._closing:
            self._give_up(grant.request, order, "the prefill endpoint closes", Cause.CLOSED)
        elif sending is not None:
            self._serve(sending, order, sending.sections)
            self._look(sending)

    def _foreign(self, peer: PeerRank, request_id: str) -> bool:
        """Tell whether a request is that of another decode instance."""
        orders = self._orders.get(request_id, {}).values()
        return any(order.peer.hello.fleet != peer.hello.fleet for order in orders)

    def _aborted(self, peer: PeerRank, message: Abort) -> None:
        if self._foreign(peer, message.request):
            self.send_to(peer, Quiet(message.request))
        else:
            said = f"{peer} gave up: {message.reason}"
            self._fail(message.request, said, message.cause.told, by=peer)

    def _serve(self, sending: Sending, order: Order, sections: Iterable[Section]) -> None:
        """Move what some sections have for one decode rank."""
        for section in sections:
            common = order.peer.common(section)
            if common is None or order.aborted:
                continue
            slots = order.filled[common.pool].slots
            size = self.pools.sides[common.pool].pool.page_size
            need, have = pages_for(slots, size), len(sending.offered[common.pool])
            if need == have:
                self._start(sending, order, common)
                continue
            where = "" if common.pool == KV else f" of pool {common.pool!r}"
            words = (
                f"{order.peer} wants {slots} slots{where}, which are {need} pages of {size}; "
                f"{have} pages were sent"
            )
            self._fail(sending.request_id, words, Cause.REFUSED)

    def _start(self, sending: Sending, order: Order, section: Section) -> None:
        order.jobs += 1
        until = min(sending.until, order.until)
        pages = sending.offered[section.pool]

        def work() -> Sent:
            return self._outbound.move(sending.request_id, pages, order, section, until)

        def ended(sent: Sent | None, error: Exception | None) -> None:
            order.jobs -= 1
            if sent is None:
                self._fail(sending.request_id, f"moving {section}: {error}", cause_of(error))
                return
            order.lingering += sent.carried.lingering
            if (trouble := sent.carried.trouble()) is not None:
                words, cause = trouble
                self._fail(sending.request_id, f"{section}: {words}", cause)
            else:
                self._arrived(sending, order, section, sent)

        self.later(work, ended)

    def _arrived(self, sending: Sending, order: Order, section: Section, sent: Sent) -> None:
        if sending.state is not RequestState.UNDER_WAY or order.aborted:
            return
        what = sending.request_id, section.layers
        if order.way is Way.PULL:
            pages = pack_pages(sending.offered[section.pool])
            self.send_to(order.peer, Ready(*what, pages, sent.checksum, section.pool))
            return
        nbytes = sent.carried.nbytes
        sending.nbytes += nbytes
        order.done(section)
        self.send_to(order.peer, Moved(*what, nbytes, sent.checksum, sent.packed, section.pool))
        self._look(sending)

    def _taken(self, peer: PeerRank, taken: Taken) -> None:
        order = self._orders.get(taken.request, {}).get(peer.generation)
        sending = self._sendings.get(taken.request)
        if order is None or sending is None or order.way is Way.PUSH or order.complete:
            return
        # Only this makes a pull a success: until here the pages were surely not reused.
        self.send_to(peer, taken)
        sending.nbytes += taken.nbytes
        order.complete = True
        self._look(sending)

    def _look(self, sending: Sending) -> None:
        """End a request once every rank of the decode instance has what it needs."""
        orders = list(self._orders.get(sending.request_id, {}).values())
        everything = extent_of(sending.sections) == self.pools.extent
        if not orders or not everything or not all(order.complete for order in orders):
            return
        if len(orders) >= orders[0].peer.hello.ranks and sending.end(RequestState.DONE):
            sending.settle()
            del self._sendings[sending.request_id], self._orders[sending.request_id]

    def _fail(self, request_id: str, reason: str, cause: Cause, by: PeerRank | None = None) -> None:
        """Fail a request on every rank that it concerns; `by` is told `Quiet`, not `Abort`."""
        sending = self._sendings.get(request_id)
        if sending is not None:
            sending.end(RequestState.FAILED, reason, cause)
        if sending is not None or by is not None:
            until = sending.until if sending is not None else time.monotonic()
            # The first counts: jobs that were stopped by it come in with words of their own.
            self._ended.setdefault(request_id, (reason, cause, until + _REMEMBER_SECONDS))
        for order in self._orders.get(request_id, {}).values():
            self._give_up(request_id, order, reason, cause, told=order.peer is by)
        if by is not None and by.generation not in self._orders.get(request_id, {}):
            self.send_to(by, Quiet(request_id))

    def _give_up(
        self, request_id: str, order: Order, reason: str, cause: Cause, *, told: bool = False
    ) -> None:
        if order.aborted:
            return
        order.aborted = True
        order.stop.set()
        if not told:
            self.send_to(order.peer, Abort(request_id, reason[:4000], cause))

    def on_lost(self, peer: PeerRank) -> None:
        """Fail every request of which a lost rank has not got everything."""
        for request_id, orders in list(self._orders.items()):
            order = orders.get(peer.generation)
            if order is not None and not order.complete:
                self._fail(request_id, f"{peer} was lost: {peer.lost}", peer.cause)

    def on_tick(self, now: float) -> None:
        """Fail what is past its deadline; say `Quiet` where an aborted order has come to rest."""
        for request_id, sending in list(self._sendings.items()):
            if sending.state is RequestState.UNDER_WAY and now > sending.until:
                self._fail(request_id, self._late(sending), Cause.TIMEOUT)
        for request_id, orders in list(self._orders.items()):
            self._settle_orders(request_id, orders, now)
        for request_id, sending in list(self._sendings.items()):
            if sending.state is RequestState.FAILED and request_id not in self._orders:
                sending.settle()
                del self._sendings[request_id]
        self._ended = {i: e for i, e in self._ended.items() if e[2] > now}

    def _late(self, sending: Sending) -> str:
        missing = sorted(self.pools.sides.keys() - {s.pool for s in sending.sections})
        words = f"; nothing of {missing} was sent" if missing else ""
        return f"the request's deadline has passed{words}"

    def _settle_orders(self, request_id: str, orders: dict[str, Order], now: float) -> None:
        for generation, order in list(orders.items()):
            if request_id not in self._sendings and now > order.until:
                self._give_up(request_id, order, "nothing was sent in time", Cause.TIMEOUT)
            if order.aborted and order.quiet():
                self.send_to(order.peer, Quiet(request_id))
                del orders[generation]
        if not orders:
            del self._orders[request_id]

    def at_rest(self) -> bool:
        """Tell whether nothing is under way and all pages are free."""
        return not self._sendings and not self._orders

    def on_close(self) -> None:
        """Fail everything that is not over."""
        for request_id in {*self._sendings, *self._orders}:
            sending = self._sendings.get(request_id)
            if sending is None or sending.state is RequestState.UNDER_WAY:
                self._fail(request_id, "the prefill endpoint closes", Cause.CLOSED)
