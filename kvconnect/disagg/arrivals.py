"""Decode side: what prefill ranks say has landed is pulled, unpacked, hashed, and counted in."""

from __future__ import annotations

from kvconnect.disagg.carry import Carried, carry
from kvconnect.disagg.cause import Cause, RequestError, cause_of
from kvconnect.disagg.checksum import checksum
from kvconnect.disagg.endpoint import Endpoint
from kvconnect.disagg.intake import Heap, Intake, Receiving
from kvconnect.disagg.ledger import Ledger
from kvconnect.disagg.messages import Message, Moved, Ready, Taken, unpack_pages
from kvconnect.disagg.requests import RequestState
from kvconnect.disagg.sections import Section
from kvconnect.disagg.transport import Way
from kvconnect.errors import ConfigError, KVConnectError
from kvconnect.page_index import U64, check_page_ids


class Arrivals:
    """Takes sections in. Used in the channel's thread; the work is for the workers."""

    def __init__(self, endpoint: Endpoint, ledger: Ledger) -> None:
        """Count in `ledger` what arrives at `endpoint`."""
        self._endpoint, self._ledger = endpoint, ledger

    def progress(self, receiving: Receiving, intake: Intake, message: Message) -> None:
        """Handle what a prefill rank says of a request that is under way."""
        if isinstance(message, Taken):
            if receiving.way is Way.PULL:
                # The prefill side confirms that its pages were still the request's.
                intake.complete = intake.look()
                self._ledger.look(receiving)
            return
        if not isinstance(message, (Moved, Ready)):
            return
        section, pages = Section(message.pool, *message.layers), None
        intake.check(section)
        if isinstance(message, Ready) != (receiving.way is Way.PULL):
            # By its word alone nothing of a pull is here, and a push needs none from us.
            said = type(message).__name__
            raise ConfigError(f"{intake.peer} said {said} of a {receiving.way.value}")
        if isinstance(message, Moved) and message.packed:
            intake.heaps.setdefault(section, Heap()).moved = message
            self.emptied(receiving, intake, section)
            return
        if isinstance(message, Ready):
            most = intake.peer.sides[section.pool].pool.pages
            pages = check_page_ids(unpack_pages(message.pages), most)
        intake.expects(section)
        self._in_worker(receiving, intake, section, pages, message)

    def emptied(self, receiving: Receiving, intake: Intake, section: Section) -> None:
        """Count a packed section in once all pieces are unpacked and the last word is here."""
        heap = intake.heaps[section]
        if heap.moved is None or heap.unpacking:
            return
        slots = receiving.filled[section.pool].slots
        pieces = self._endpoint.pieces(intake.peer, section.pool, slots)
        if heap.pieces != pieces:
            words = f"{section}: {heap.pieces} of {pieces} pieces came"
            self._ledger.fail(receiving, words, Cause.SIZE_MISMATCH)
            return
        try:
            intake.expects(section)
        except KVConnectError as error:
            self._ledger.fail(receiving, str(error), cause_of(error))
            return
        self._in_worker(receiving, intake, section, None, heap.moved)

    def _in_worker(
        self,
        receiving: Receiving,
        intake: Intake,
        section: Section,
        pages: U64 | None,
        message: Moved | Ready,
    ) -> None:
        """Pull (where `pages` are given) and check a section; then count it in."""
        intake.checking += 1

        def work() -> Carried:
            return self._take(receiving, intake, section, pages, message)

        def ended(carried: Carried | None, error: Exception | None) -> None:
            intake.checking -= 1
            if carried is None:
                words = f"{section} from {intake.peer}: {error}"
                self._ledger.fail(receiving, words, cause_of(error))
                return
            intake.lingering += carried.lingering
            if (trouble := carried.trouble()) is not None:
                words, cause = trouble
                self._ledger.fail(receiving, f"{section}: {words}", cause)
                return
            intake.nbytes += carried.nbytes
            self._counted(receiving, intake)

        self._endpoint.later(work, ended)

    def _take(
        self,
        receiving: Receiving,
        intake: Intake,
        section: Section,
        pages: U64 | None,
        message: Moved | Ready,
    ) -> Carried:
        endpoint, peer, here = self._endpoint, intake.peer, receiving.filled[section.pool]
        plan = endpoint.plan(peer, section)
        pieces = endpoint.pieces(peer, section.pool, here.slots)
        if pages is None:
            carried = Carried(message.nbytes if isinstance(message, Moved) else 0)
        else:
            remote, local, nbytes = plan.expand(pages, here.pages, pieces)
            carried = carry(
                endpoint.transport,
                peer.link,
                Way.PULL,
                endpoint.runs(peer, local, remote, nbytes),
                batch_bytes=endpoint.options.batch_bytes,
                until=receiving.until,
                stop=receiving.stop,
            )
        if carried.trouble() is not None:
            return carried
        if carried.nbytes != (want := plan.piece_nbytes * pieces):
            words = f"{carried.nbytes} B were confirmed, the plan has {want} B"
            raise RequestError(Cause.SIZE_MISMATCH, words)
        if receiving.checked:
            found = checksum(endpoint.packer(plan, section.pool), here.pages, pieces)
            if found != message.checksum:
                words = "the checksum of what arrived is not that of what was sent"
                raise RequestError(Cause.CHECKSUM, words)
        return carried

    def _counted(self, receiving: Receiving, intake: Intake) -> None:
        if receiving.state is not RequestState.UNDER_WAY or not intake.look():
            return
        if receiving.way is Way.PULL:
            self._endpoint.send_to(intake.peer, Taken(receiving.request_id, intake.nbytes))
            return
        intake.complete = True
        self._ledger.look(receiving)
