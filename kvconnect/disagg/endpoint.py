"""What prefill and decode endpoints share: the pool, the channel, and the peers they know.

State is touched in the channel's thread only; moving bytes, checksums and connecting are done
by a few workers, whose results are posted back. A peer is one generation of a rank: when the
rank restarts, its old generation is lost and the new one is another peer.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvconnect.attach import as_pool, check_identity, registration_chunks
from kvconnect.backend import Closing
from kvconnect.disagg.blocks import Packer
from kvconnect.disagg.channel import Channel
from kvconnect.disagg.conform import Side
from kvconnect.disagg.handshake import check_identity as check_same
from kvconnect.disagg.handshake import check_sides
from kvconnect.disagg.keys import Keys
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
from kvconnect.disagg.pair_plan import PairPlan, plan_pair
from kvconnect.disagg.ring import Ring
from kvconnect.disagg.transport import Peer, PeerTransport
from kvconnect.disagg.wire import RegionData, from_data, to_data
from kvconnect.disagg.workers import Workers
from kvconnect.errors import ClosedError, ConfigError, KVConnectError, TransferTimeoutError
from kvconnect.identity import Identity
from kvconnect.placement import Placement, Span

log = logging.getLogger("kvconnect.disagg")

_CLOSE_SECONDS = 5.0
"""How long `close` waits for the memory to be quiet."""
_LAST_WORDS_SECONDS = 0.2
"""Between seeing that a peer's process has ended and counting it as lost: what it said last
may still be on the way."""
_MAX_MEETING = 1024
"""Greetings that wait to be answered; whoever is left out greets again."""
_ABOUT_MEMORY = (Abort, Quiet, Lent, Staged, Back)
"""What ranks say to each other even when one counts the other as lost: the requests have failed,
but a process that was only stopped goes on, and its word is what makes memory free again."""


@dataclass(eq=False)
class PeerRank:
    """One generation of a rank of the other side, as this side knows it."""

    route: str
    generation: str
    hello: Hello
    side: Side
    link: Peer
    part: Placement | None
    """What moves between the two; None where nothing does."""
    heard: float
    lost: str | None = None
    """Why the peer counts as lost."""
    ended: float | None = None
    """When its process was seen to have ended."""
    plans: dict[tuple[int, int], PairPlan] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.hello.role} {self.hello.fleet}/{self.hello.name}"


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
        keys: Keys | None = None,
        options: EndpointOptions | None = None,
    ) -> None:
        """Register the pool's memory with the transport and start the control channel.

        The transport stays the caller's to close, after the endpoint.
        """
        self.options = options or EndpointOptions()
        self.side = Side(as_pool(pool), placement)
        check_identity(identity, self.side.pool, placement)
        self.identity, self.transport = identity, transport
        self.generation = transport.generation
        self.peers: dict[str, PeerRank] = {}
        self._meeting: set[str] = set()
        self._closing = False
        self._rested = threading.Event()
        self._pinged = 0.0
        regions = registration_chunks(self.side.pool, None, transport.capabilities.max_region_bytes)
        with contextlib.ExitStack() as undo:
            memory = transport.allocate(self.options.staging, "staging")
            self.ring = undo.enter_context(Ring(memory, self.options.slot))
            regions.append(self.ring.region)
            self._registration = undo.enter_context(transport.register(regions))
            self._workers = Workers(self.options.workers, "kvconnect-move")
            undo.callback(self._workers.close, 0.0)
            # Apart: connecting to a host that is not there must not keep bytes from moving.
            self._greeter = Workers(1, "kvconnect-meet")
            undo.callback(self._greeter.close, 0.0)
            self._channel = Channel(keys, self._on_envelope, self._on_tick)
            undo.pop_all()

    def hello(self) -> Hello:
        """Describe this rank to a peer."""
        ring = self.ring.region
        return Hello(
            role="prefill" if self.role == "prefill" else "decode",
            name=self.options.name,
            fleet=self.options.fleet,
            ranks=self.options.ranks,
            identity=self.identity.to_json(),
            side=to_data(self.side),
            transport=self.transport.name,
            metadata=self.transport.describe(),
            staging=RegionData(ring.name, ring.address, ring.nbytes, ring.device),
            slot_bytes=self.ring.slot_bytes,
        )

    def meet(self, route: str, generation: str, hello: Hello) -> PeerRank:
        """Worker: check a greeting and connect to the peer's memory.

        Raises `ConfigError` naming what does not fit, with both values.
        """
        wanted = "decode" if self.role == "prefill" else "prefill"
        if hello.role != wanted:
            raise ConfigError(f"{self.role} was greeted by {hello.role}; it talks to {wanted}")
        if hello.transport != self.transport.name:
            raise ConfigError(
                f"transport is {self.transport.name!r} here and {hello.transport!r} at the peer"
            )
        check_same(self.identity, Identity.from_json(hello.identity))
        theirs = from_data(hello.side)
        source, target = (self.side, theirs) if self.role == "prefill" else (theirs, self.side)
        check_sides(source, target, min_slots=self.options.min_slots)
        link = self.transport.connect(hello.metadata, self.options.timeout)
        try:
            staging = hello.staging
            granted = [(r.address, r.nbytes, r.name) for r in theirs.pool.regions]
            for region in (*granted, (staging.address, staging.nbytes, staging.name)):
                _check_granted(link, *region)
        except BaseException:
            link.close()
            raise
        return PeerRank(
            route, generation, hello, theirs, link, self.part_of(theirs), time.monotonic()
        )

    def part_of(self, theirs: Side) -> Placement | None:
        """Return what moves between this rank and a peer."""
        raise NotImplementedError

    def plan(self, peer: PeerRank, start: int, stop: int) -> PairPlan:
        """Return the (cached) plan of global layers [start, stop) between this rank and a peer."""
        found = peer.plans.get((start, stop))
        if found is None and peer.part is not None:
            layers = Span(start, stop, peer.part.layers.total)
            part = Placement(layers, peer.part.heads, shards=peer.part.shards)
            sides = (self.side, peer.side) if self.role == "prefill" else (peer.side, self.side)
            found = peer.plans[start, stop] = plan_pair(*sides, part)
        if found is None:
            raise ConfigError(f"nothing moves between {self.options.name} and {peer}")
        return found

    def packer(self, plan: PairPlan) -> Packer:
        """Return what packs this rank's side of a plan."""
        mine = [b.source if self.role == "prefill" else b.target for b in plan.blocks]
        return Packer(plan.blocks, mine, self.side.pool.regions)

    def acquaint(
        self,
        route: str,
        generation: str,
        hello: Hello,
        told: Callable[[PeerRank | None, Exception | None], None],
    ) -> None:
        """Channel thread: `told` of the peer that greets, connected to, or why it cannot be.

        One that was lost and still runs is the same again; its requests stay failed. Says
        nothing where that is under way already, or has to wait until the last of it is gone.
        """
        known = self.peers.get(generation)
        if known is not None:
            if known.lost is not None and known.ended is None and known.link.alive():
                log.info("kvconnect: %s found %s again", self.options.name, known)
                known.lost = None
            if known.lost is None:
                if known.route == route:
                    known.heard = time.monotonic()
                told(known, None)
            return
        if generation in self._meeting or self._closing or len(self._meeting) >= _MAX_MEETING:
            return
        self._meeting.add(generation)

        def met(peer: PeerRank | None, error: Exception | None) -> None:
            self._meeting.discard(generation)
            if peer is not None:
                peer.heard = time.monotonic()
                self.peers[generation] = peer
            told(peer, error)

        self.later(lambda: self.meet(route, generation, hello), met, self._greeter)

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
                result, error = None, caught
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
                self.send_to(peer, Ping(answer=False))
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
        ping = now - self._pinged >= self.options.ping
        if ping:
            self._pinged = now
        for peer in list(self.peers.values()):
            if peer.ended is None and not peer.link.alive():
                peer.ended = now
            if peer.lost is not None:
                self._drop_if_gone(peer)
            elif peer.ended is not None:
                if now - peer.ended > _LAST_WORDS_SECONDS:
                    self.lose(peer, "its process has ended")
            elif now - peer.heard > self.options.peer_timeout:
                self.lose(peer, f"it was silent for {self.options.peer_timeout:g} s")
            elif ping:
                self.send_to(peer, Ping(answer=True))
        self.on_tick(now)
        if self._closing and self.at_rest():
            self._rested.set()

    def _drop_if_gone(self, peer: PeerRank) -> None:
        # One that may still touch memory is kept: requests ask its link when their pages are free.
        if peer.ended is not None:
            del self.peers[peer.generation]
            self.later(peer.link.close, lambda *_: None, self._greeter)
            self.on_gone(peer)

    def lose(self, peer: PeerRank, reason: str) -> None:
        """Count a peer as lost: its requests fail, its generation is never heard again."""
        peer.lost = reason
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
        with contextlib.suppress(ClosedError):
            self.in_thread(self._close_down)
            rested = self._rested.wait(max(until - time.monotonic(), 0))
            if not rested or self._workers.close(until) or self._greeter.close(until):
                raise TransferTimeoutError(
                    f"{self.options.name} is not quiet after {_CLOSE_SECONDS:g} s: "
                    f"{self._workers.busy + self._greeter.busy} of its threads are in the transport"
                    f"{'' if rested else ', and requests still hold pages'}; call close() again, "
                    f"or close the transport first"
                )
        self._channel.close()
        for peer in self.peers.values():
            peer.link.close()
        self._registration.close()
        self.ring.close()

    def _close_down(self) -> None:
        self.on_close()
        self.on_tick(time.monotonic())
        if self.at_rest():
            self._rested.set()

    def on_close(self) -> None:
        """Channel thread: fail what is under way."""
        raise NotImplementedError


def _check_granted(link: Peer, address: int, nbytes: int, name: str) -> None:
    for grant in link.grants.regions:
        if grant.address <= address and address + nbytes <= grant.end:
            return
    raise ConfigError(
        f"the peer's pool lies in {name!r} ({nbytes} B at {address:#x}), which its transport "
        f"does not grant"
    )
