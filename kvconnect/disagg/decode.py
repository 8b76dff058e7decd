"""The decode side: grants pages to a request, and says when they hold it.

A request is done when the confirmed bytes of every share, from every prefill rank that holds
one, are exactly what the plan says, and their checksums agree where they were asked for. A
request that failed keeps its pages until each prefill rank has said that nothing of it moves
any more, or is known to be gone: late bytes never reach a page that was handed out again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

from kvconnect.disagg.carry import Carried, carry
from kvconnect.disagg.checksum import checksum
from kvconnect.disagg.conform import Side, common_slots
from kvconnect.disagg.endpoint import Endpoint, PeerRank
from kvconnect.disagg.greet import Greetings
from kvconnect.disagg.handshake import check_slots
from kvconnect.disagg.inbound import Inbound
from kvconnect.disagg.intake import Heap, Intake, Receiving
from kvconnect.disagg.messages import (
    Abort,
    Back,
    Envelope,
    Grant,
    Hello,
    Message,
    Moved,
    Quiet,
    Ready,
    Refused,
    Staged,
    Taken,
    Want,
    pack_pages,
    unpack_pages,
)
from kvconnect.disagg.orders import Layers
from kvconnect.disagg.pairs import share_of, shares
from kvconnect.disagg.requests import RequestState
from kvconnect.disagg.transport import Runs, Way
from kvconnect.errors import ClosedError, ConfigError, KVConnectError
from kvconnect.page_index import U64, check_page_ids
from kvconnect.placement import Placement


class DecodeEndpoint(Endpoint):
    """One decode rank. Safe to use from many threads; a context manager that closes twice."""

    role = "decode"

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take the arguments of `Endpoint`; call `connect` before the first request."""
        self._receivings: dict[str, Receiving] = {}
        self._greetings = Greetings()
        self._nagged = 0.0
        super().__init__(*args, **options)
        self._inbound = Inbound(self, self._find, self._fail, self._emptied)

    def connect(self, addresses: Sequence[str], timeout: float | None = None) -> None:
        """Meet all ranks of the prefill instance, in any order; again after one restarted.

        Raises `ConfigError` naming both values where something does not fit, `LayoutError`
        where the ranks together do not hold what this one needs, and `UnavailableError` where
        one does not answer in time.
        """
        until = time.monotonic() + (self.options.timeout if timeout is None else timeout)
        met = [self._greet(address, until) for address in addresses]
        shares([peer.side.placement for peer in met], self.side.placement)

    def _greet(self, address: str, until: float) -> PeerRank:
        route = self._channel.dial(address, bytes.fromhex(self.generation))
        said = Envelope(self.generation, "", self.hello())

        def say_hello() -> None:
            self._channel.post(partial(self._channel.send, route, said))

        return self._greetings.greet(address, route, until, say_hello)

    def receive(
        self,
        request_id: str,
        pages: Any,
        *,
        slots: int | None = None,
        timeout: float | None = None,
        checksum: bool = True,
        way: Literal["push", "pull"] = "push",
    ) -> Receiving:
        """Have a request moved into pages; returns at once with a handle to wait on.

        `slots`: how many slots of the pages are filled (None: all); a multiple of the slots
        common to both page sizes. `checksum` compares what arrived with what was read at the
        source. `way`: "push" has the prefill side write, "pull" reads from it.

        The pages belong to the request until `Receiving.quiet()`. Raises `PageIndexError` on
        pages that are none and `ConfigError` on an id in use.
        """
        ids = self.side.pool.check_page_ids(pages)
        size = self.side.pool.page_size
        count = len(ids) * size if slots is None else slots
        if not (len(ids) - 1) * size < count <= len(ids) * size:
            raise ConfigError(f"slots={count} do not fill {len(ids)} pages of {size}")
        until = time.monotonic() + (self.options.timeout if timeout is None else timeout)
        chosen = Way.PUSH if way == "push" else Way.PULL
        if chosen not in self.transport.capabilities.ways:
            raise ConfigError(f"transport {self.transport.name} cannot {way}")
        receiving = Receiving(request_id, ids, until, slots=count, way=chosen, checked=checksum)
        self.in_thread(lambda: self._begin(receiving))
        return receiving

    def _begin(self, receiving: Receiving) -> None:
        if self._closing:
            raise ClosedError(f"{self.options.name} is closed")
        if receiving.request_id in self._receivings:
            raise ConfigError(f"request {receiving.request_id!r} is under way already")
        taken = set(receiving.pages.tolist()).intersection(self._held())
        if taken:
            raise ConfigError(
                f"request {receiving.request_id!r}: page {min(taken)} still belongs to another "
                f"request; wait for its quiet()"
            )
        self._receivings[receiving.request_id] = receiving
        here = {g: peer for g, peer in self.peers.items() if peer.lost is None}
        receiving.intakes = {
            g: Intake(peer, complete=peer.part is None) for g, peer in here.items()
        }
        try:
            placements = [peer.side.placement for peer in here.values()]
            shares(placements, self.side.placement)
            for peer in here.values():
                check_slots(receiving.slots, peer.side.pool, self.side.pool)
        except KVConnectError as error:
            self._fail(receiving, str(error))
            return
        grant = Grant(
            receiving.request_id,
            pack_pages(receiving.pages),
            receiving.slots,
            receiving.way.value,
            max(receiving.until - time.monotonic(), 1e-3),
            receiving.checked,
        )
        for peer in here.values():
            self.send_to(peer, grant)

    def _held(self) -> set[int]:
        return {
            page
            for receiving in self._receivings.values()
            for page in receiving.pages.tolist()
            if not receiving.quiet()
        }

    def quarantined(self) -> list[int]:
        """Return the pages of failed requests that a prefill rank may still write to."""

        def look() -> list[int]:
            failed = [r for r in self._receivings.values() if r.state is RequestState.FAILED]
            return sorted(page for r in failed if not r.quiet() for page in r.pages.tolist())

        found: list[int] = self.in_thread(look)
        return found

    def abort(self, request_id: str, reason: str = "aborted by the decode side") -> None:
        """End a request on both sides; does nothing where it is over or unknown."""

        def stop() -> None:
            if request_id in self._receivings:
                self._fail(self._receivings[request_id], reason)

        self.in_thread(stop)

    def part_of(self, theirs: Side) -> Placement | None:
        """Return what a prefill rank sends here."""
        return share_of(theirs.placement, self.side.placement)

    def on_hello(self, route: str, generation: str, hello: Hello) -> None:
        """Take a prefill rank's answer: connect to it in a worker, then tell who asked."""
        if not self._greetings.expects(route):
            return
        for peer in self.peers.values():
            if peer.route == route and peer.lost is None and peer.generation != generation:
                self.lose(peer, "another start of it answers at its address")

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
        found = self._find(peer, getattr(message, "request", ""))
        if found is None:
            return
        receiving, intake = found
        if isinstance(message, Quiet):
            intake.quiet = True
        elif isinstance(message, Abort):
            self._fail(receiving, f"{peer} gave up: {message.reason}")
        elif receiving.state is RequestState.UNDER_WAY:
            try:
                self._progress(receiving, intake, message)
            except KVConnectError as error:
                self._fail(receiving, str(error))

    def _find(self, peer: PeerRank, request_id: str) -> tuple[Receiving, Intake] | None:
        receiving = self._receivings.get(request_id)
        intake = receiving.intakes.get(peer.generation) if receiving is not None else None
        return None if receiving is None or intake is None else (receiving, intake)

    def _progress(self, receiving: Receiving, intake: Intake, message: Message) -> None:
        if isinstance(message, Moved) and receiving.way is Way.PULL:
            # The prefill side confirms that its pages were still the request's.
            intake.complete = intake.look()
            self._look(receiving)
        elif isinstance(message, Moved) and message.packed:
            intake.check(message.layers)
            intake.heaps.setdefault(message.layers, Heap()).moved = message
            self._emptied(receiving, intake, message.layers)
        elif isinstance(message, Moved):
            intake.expects(message.layers)
            self._in_worker(receiving, intake, message.layers, None, message)
        elif isinstance(message, Ready):
            intake.expects(message.layers)
            pages = check_page_ids(unpack_pages(message.pages), intake.peer.side.pool.pages)
            self._in_worker(receiving, intake, message.layers, pages, message)

    def _emptied(self, receiving: Receiving, intake: Intake, layers: Layers) -> None:
        """Count packed layers in once all pieces are unpacked and the last word is here."""
        heap = intake.heaps[layers]
        if heap.moved is None or heap.unpacking:
            return
        pieces = receiving.slots // common_slots(intake.peer.side.pool, self.side.pool)
        if heap.pieces != pieces:
            self._fail(receiving, f"layers {layers}: {heap.pieces} of {pieces} pieces came")
            return
        try:
            intake.expects(layers)
        except KVConnectError as error:
            self._fail(receiving, str(error))
            return
        self._in_worker(receiving, intake, layers, None, heap.moved)

    def _in_worker(
        self,
        receiving: Receiving,
        intake: Intake,
        layers: Layers,
        pages: U64 | None,
        message: Moved | Ready,
    ) -> None:
        """Pull (where `pages` are given) and check some layers; then count them in."""
        intake.checking += 1

        def work() -> Carried:
            return self._take(receiving, intake, layers, pages, message)

        def ended(carried: Carried | None, error: Exception | None) -> None:
            intake.checking -= 1
            if carried is None:
                self._fail(receiving, f"layers {layers} from {intake.peer}: {error}")
                return
            intake.lingering += carried.lingering
            if carried.failure is not None:
                self._fail(receiving, f"layers {layers}: {carried.failure.cause}")
                return
            intake.nbytes += carried.nbytes
            self._counted(receiving, intake)

        self.later(work, ended)

    def _take(
        self,
        receiving: Receiving,
        intake: Intake,
        layers: Layers,
        pages: U64 | None,
        message: Moved | Ready,
    ) -> Carried:
        peer = intake.peer
        plan = self.plan(peer, *layers)
        pieces = receiving.slots // common_slots(peer.side.pool, self.side.pool)
        if pages is None:
            carried = Carried(message.nbytes) if isinstance(message, Moved) else Carried(0)
        else:
            remote, local, nbytes = plan.expand(pages, receiving.pages, pieces)
            carried = carry(
                self.transport,
                peer.link,
                Way.PULL,
                Runs(local, remote, nbytes),
                batch_bytes=self.options.batch_bytes,
                until=receiving.until,
                stop=receiving.stop,
            )
        if carried.failure is not None:
            return carried
        if carried.nbytes != (want := plan.piece_nbytes * pieces):
            raise ConfigError(f"{carried.nbytes} B were confirmed, the plan has {want} B")
        if not receiving.checked:
            return carried
        if checksum(self.packer(plan), receiving.pages, pieces) != message.checksum:
            raise ConfigError("the checksum of what arrived is not that of what was sent")
        return carried

    def _counted(self, receiving: Receiving, intake: Intake) -> None:
        if receiving.state is not RequestState.UNDER_WAY or not intake.look():
            return
        if receiving.way is Way.PULL:
            self.send_to(intake.peer, Taken(receiving.request_id, intake.nbytes))
            return
        intake.complete = True
        self._look(receiving)

    def _look(self, receiving: Receiving) -> None:
        if not all(intake.complete for intake in receiving.intakes.values()):
            return
        receiving.nbytes = sum(intake.nbytes for intake in receiving.intakes.values())
        if receiving.end(RequestState.DONE):
            receiving.settle()
            del self._receivings[receiving.request_id]

    def _fail(self, receiving: Receiving, reason: str) -> None:
        if not receiving.end(RequestState.FAILED, reason):
            return
        receiving.stop.set()
        self._abort(receiving, receiving.intakes.values())

    def _abort(self, receiving: Receiving, intakes: Iterable[Intake]) -> None:
        said = Abort(receiving.request_id, receiving.reason[:4000])
        for intake in intakes:
            self.send_to(intake.peer, said)

    def on_lost(self, peer: PeerRank) -> None:
        """Fail every request for which a lost rank still had something to do."""
        self._inbound.lender.forget(peer.generation)
        for receiving in list(self._receivings.values()):
            intake = receiving.intakes.get(peer.generation)
            if intake is not None and not intake.told_all(receiving.way):
                self._fail(receiving, f"{peer} was lost: {peer.lost}")

    def on_gone(self, peer: PeerRank) -> None:
        """Take back the slots of a rank that can write no more, and drop its connection."""
        self._inbound.gone(peer)
        others = any(other.route == peer.route for other in self.peers.values())
        if not others and not self._greetings.expects(peer.route):
            self._channel.hang_up(peer.route)

    def on_tick(self, now: float) -> None:
        """Fail what is past its deadline; give back pages that nothing can reach any more."""
        nag = now - self._nagged >= self.options.ping
        self._nagged = now if nag else self._nagged
        for receiving in list(self._receivings.values()):
            if receiving.state is RequestState.UNDER_WAY and now > receiving.until:
                self._fail(receiving, "the request's deadline has passed")
            if receiving.state is RequestState.FAILED and all(
                intake.at_rest() for intake in receiving.intakes.values()
            ):
                receiving.settle()
                del self._receivings[receiving.request_id]
            elif receiving.state is RequestState.FAILED and nag:
                # The first one may have been lost, and without an answer no page comes back.
                intakes = receiving.intakes.values()
                self._abort(receiving, [i for i in intakes if not i.at_rest()])

    def at_rest(self) -> bool:
        """Tell whether nothing is under way and all pages are free."""
        return not self._receivings

    def on_close(self) -> None:
        """Fail everything that is not over."""
        for receiving in list(self._receivings.values()):
            self._fail(receiving, "the decode endpoint closes")
