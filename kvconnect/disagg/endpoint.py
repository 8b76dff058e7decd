"""What prefill and decode endpoints share: the pools, the channel, and the peers they know.

State is touched in the channel's thread only; moving bytes, checksums and connecting are done
by a few workers, whose results are posted back. A peer is one generation of a rank: when the
rank restarts, its old generation is lost and the new one is another peer.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvconnect.attach import register_pool
from kvconnect.backend import Closing
from kvconnect.disagg.blocks import Packer
from kvconnect.disagg.cause import Cause, noted
from kvconnect.disagg.channel import Channel
from kvconnect.disagg.conform import common_slots
from kvconnect.disagg.granted import cut_runs, register_ring
from kvconnect.disagg.keys import Keys
from kvconnect.disagg.liveness import Liveness
from kvconnect.disagg.meetings import Meetings, Told
from kvconnect.disagg.messages import (
    Abort,
    Back,
    Envelope,
    Hello,
    Lent,
    Message,
    Ping,
    Quiet,
    Staged,
)
from kvconnect.disagg.options import EndpointOptions
from kvconnect.disagg.pair_plan import PairPlan
from kvconnect.disagg.peer_rank import PeerRank
from kvconnect.disagg.plan_cache import Plans
from kvconnect.disagg.pools import Pools, SidePool
from kvconnect.disagg.ring import Ring
from kvconnect.disagg.sections import KV, Section
from kvconnect.disagg.transport import PeerTransport, Runs
from kvconnect.disagg.workers import Workers
from kvconnect.errors import ClosedError, ConfigError, KVConnectError, TransferTimeoutError
from kvconnect.identity import Identity
from kvconnect.page_index import U64
from kvconnect.placement import Placement, Span
from kvconnect.region import RegionTable

log = logging.getLogger("kvconnect.disagg")

_CLOSE_SECONDS = 5.0
"""How long `close` waits for the memory to be quiet."""
_ABOUT_MEMORY = (Abort, Quiet, Lent, Staged, Back)
"""What ranks say to each other even when one counts the other as lost: the requests have failed,
but a process that was only stopped goes on, and its word is what makes memory free again."""


class Endpoint(Closing):
    """The common half. Subclasses say what they do with a greeting, a message and a tick."""

    role = ""

    def __init__(
        self,
        pool: Any,
        placement: Placement,
        identity: Identity,
        transport: PeerTransport,
        *,
        side_pools: Sequence[SidePool] = (),
        keys: Keys | None = None,
        options: EndpointOptions | None = None,
    ) -> None:
        """Register the pools' memory with the transport and start the control channel.

        `side_pools`: what a request has beside its KV; both sides name the same. The transport
        stays the caller's to close, after the endpoint.
        """
        self.options = options or EndpointOptions()
        self.pools = Pools.of(pool, placement, identity, side_pools)
        self.side, self.identity = self.pools.sides[KV], identity
        self.transport, self.generation = transport, transport.generation
        self.peers: dict[str, PeerRank] = {}
        self.borrowed: dict[str, set[int]] = {}
        """Staging slots of other ranks that this one has, by generation: pushes into them may
        outlive what is known of the rank."""
        self._plans = Plans()
        self._closing = False
        self._rested = threading.Event()
        self._alive = Liveness(
            self.peers,
            self.options.ping,
            self.options.peer_timeout,
            lambda peer: self.send_to(peer, Ping(answer=True, number=self.on_call(peer))),
            self.lose,
            self._drop,
        )
        with contextlib.ExitStack() as undo:
            memory = transport.allocate(self.options.staging, "staging")
            self.ring = undo.enter_context(Ring(memory, self.options.slot))
            most = transport.capabilities.max_region_bytes
            self._registrations = [undo.enter_context(register_ring(transport, self.ring))]
            for side in self.pools.sides.values():
                registration = register_pool(transport.register, side.pool, None, most)
                self._registrations.append(undo.enter_context(registration))
            regions = (r for registration in self._registrations for r in registration.regions)
            self._table = RegionTable(dict.fromkeys(regions))
            self._workers = Workers(self.options.workers, "kvconnect-move")
            undo.callback(self._workers.close, 0.0)
            mine = self.role, self.pools, transport, self.ring, self.options
            self._meetings = Meetings(*mine, self._plans, self.peers)
            undo.callback(self._meetings.workers.close, 0.0)
            self._channel = Channel(keys, self._on_envelope, self._on_tick)
            undo.pop_all()

    def hello(self) -> Hello:
        """Describe this rank to a peer."""
        return self._meetings.hello()

    def acquaint(self, route: str, generation: str, hello: Hello, told: Told) -> None:
        """Channel thread: see `Meetings.acquaint`; says nothing once this side closes."""
        if generation in self.peers or not self._closing:
            self._meetings.acquaint(route, generation, hello, told, self.later)

    def plan(self, peer: PeerRank, section: Section) -> PairPlan:
        """Return the (cached) plan of a section between this rank and a peer."""
        found, part = peer.plans.get(section), peer.parts.get(section.pool)
        if found is None and part is not None:
            layers = Span(section.start, section.stop, part.layers.total)
            part = Placement(layers, part.heads, shards=part.shards)
            sides = self.pools.sides[section.pool], peer.sides[section.pool]
            source, target = sides if self.role == "prefill" else reversed(sides)
            found = peer.plans[section] = self._plans.plan(source, target, part)
        if found is None:
            raise ConfigError(f"nothing moves between {self.options.name} and {peer}")
        return found

    def pieces(self, peer: PeerRank, pool: str, slots: int) -> int:
        """Return how many pieces of a pool `slots` slots are, between this rank and a peer."""
        return slots // common_slots(self.pools.sides[pool].pool, peer.sides[pool].pool)

    def runs(self, peer: PeerRank, local: U64, remote: U64, nbytes: U64) -> Runs:
        """Return runs between this rank's memory and a peer's, each in one region on both sides."""
        return cut_runs(Runs(local, remote, nbytes), self._table, peer.link.grants)

    def packer(self, plan: PairPlan, pool: str) -> Packer:
        """Return what packs this rank's side of a plan of a pool."""
        mine = [b.source if self.role == "prefill" else b.target for b in plan.blocks]
        return Packer(plan.blocks, mine, self.pools.sides[pool].pool.regions)

    def send_to(self, peer: PeerRank, message: Message) -> None:
        """Channel thread: send to a peer; to one that is lost, only what is about memory."""
        if peer.lost is None or isinstance(message, _ABOUT_MEMORY):
            self._channel.send(peer.route, Envelope(self.generation, peer.generation, message))

    def later(
        self,
        work: Callable[[], Any],
        then: Callable[[Any, Exception | None], None],
        workers: Workers | None = None,
    ) -> None:
        """Have a worker do `work`; `then(result, error)` is called in the channel's thread."""

        def run() -> None:
            try:
                result, error = work(), None
            except Exception as caught:  # noqa: BLE001 - handed on to whoever waits
                result, error = None, noted(caught)
            with contextlib.suppress(ClosedError):
                self._channel.post(lambda: then(result, error))

        (workers or self._workers).submit(run)

    def _on_envelope(self, route: str, envelope: Envelope) -> None:
        if isinstance(envelope.message, Hello):
            self.on_hello(route, envelope.sender, envelope.message)
            return
        peer = self.peers.get(envelope.sender)
        message = envelope.message
        known = peer is not None and peer.route == route and envelope.to == self.generation
        if peer is None or not known or (peer.lost and not isinstance(message, _ABOUT_MEMORY)):
            # From or to an earlier start of a rank: whatever it says is about memory that is gone.
            self._channel.counts["stale"] += 1
            self.on_stranger(route, envelope)
            return
        peer.heard = time.monotonic()
        if isinstance(message, Ping):
            if message.answer:
                slots = tuple(self.borrowed.get(peer.generation, ()))
                self.send_to(peer, Ping(answer=False, number=message.number, slots=slots))
            else:
                self.on_answer(peer, message)
            return
        try:
            self.on_message(peer, message)
        except KVConnectError as error:
            self._channel.counts["refused"] += 1
            log.warning("kvconnect: %s sent what cannot be: %s", peer, error)

    def on_hello(self, route: str, generation: str, hello: Hello) -> None:
        """Handle a greeting."""
        raise NotImplementedError

    def on_stranger(self, route: str, envelope: Envelope) -> None:
        """Handle a message of a generation that is not known."""

    def on_message(self, peer: PeerRank, message: Message) -> None:
        """Handle a message of a known peer."""
        raise NotImplementedError

    def on_call(self, peer: PeerRank) -> int:  # noqa: ARG002 - of those who lend
        """Return the number of the next question whether a peer is alive."""
        return 0

    def on_answer(self, peer: PeerRank, ping: Ping) -> None:
        """Handle a peer's sign of life."""

    def on_tick(self, now: float) -> None:
        """Look at deadlines; called some fifty times a second."""
        raise NotImplementedError

    def at_rest(self) -> bool:
        """Tell whether nothing is under way and all pages are free."""
        raise NotImplementedError

    def on_lost(self, peer: PeerRank) -> None:
        """Handle the loss of a peer."""
        raise NotImplementedError

    def on_gone(self, peer: PeerRank) -> None:
        """Handle that a lost peer can surely touch nothing any more."""

    def _on_tick(self) -> None:
        now = time.monotonic()
        self._alive.tick(now)
        self.on_tick(now)
        if self._closing and self.at_rest():
            self._rested.set()

    def _drop(self, peer: PeerRank) -> None:
        self.later(peer.link.close, lambda *_: None, self._meetings.workers)
        self.on_gone(peer)

    def lose(self, peer: PeerRank, reason: str, cause: Cause = Cause.PEER_LOST) -> None:
        """Count a peer as lost: its requests fail, its generation is never heard again."""
        peer.lost, peer.cause = reason, cause
        log.warning("kvconnect: %s lost %s: %s", self.options.name, peer, reason)
        self.on_lost(peer)

    def post(self, work: Callable[[], None]) -> None:
        """Have the channel's thread call `work` soon; `ClosedError` after `close`."""
        self._channel.post(work)

    def in_thread(self, work: Callable[[], Any]) -> Any:
        """Run `work` in the channel's thread and return what it returned."""
        return self._channel.call(work)

    def counters(self) -> dict[str, int]:
        """Return counts of control messages: received, stale, garbage, refused, unsent."""
        return dict(self._channel.counts)

    def close(self) -> None:
        """Stop: fail what is under way, let the peers know, wait until the memory is quiet.

        Raises `TransferTimeoutError` where it is not quiet after some seconds: a transport call
        hangs, or a peer is stopped and may still write. Call it again then, or close the
        transport first, which cuts the peers off.
        """
        until = time.monotonic() + _CLOSE_SECONDS
        self._closing = True
        workers = self._workers, self._meetings.workers
        with contextlib.suppress(ClosedError):
            self.in_thread(self._close_down)
            rested = self._rested.wait(max(until - time.monotonic(), 0))
            if not rested or any(some.close(until) for some in workers):
                raise TransferTimeoutError(
                    f"{self.options.name} is not quiet after {_CLOSE_SECONDS:g} s: "
                    f"{sum(some.busy for some in workers)} of its threads are in the transport"
                    f"{'' if rested else ', and requests still hold pages'}; call close() again, "
                    f"or close the transport first"
                )
        self._channel.close()
        for peer in self.peers.values():
            peer.link.close()
        for registration in reversed(self._registrations):
            registration.close()
        self.ring.close()

    def _close_down(self) -> None:
        self.on_close()
        self.on_tick(time.monotonic())
        if self.at_rest():
            self._rested.set()

    def on_close(self) -> None:
        """Channel thread: fail what is under way."""
        raise NotImplementedError
