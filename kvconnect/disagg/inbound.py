"""Decode side: lending staging slots to prefill ranks, and unpacking what they put in them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvconnect.disagg.cause import cause_of
from kvconnect.disagg.endpoint import Endpoint
from kvconnect.disagg.intake import Heap, Intake, Receiving
from kvconnect.disagg.ledger import Ledger
from kvconnect.disagg.messages import Back, Lent, Staged, Want
from kvconnect.disagg.peer_rank import PeerRank
from kvconnect.disagg.requests import RequestState
from kvconnect.disagg.ring import Lender
from kvconnect.disagg.sections import Section
from kvconnect.errors import ConfigError, KVConnectError

log = logging.getLogger("kvconnect.disagg")


class Inbound:
    """The slots of one decode rank. Used in the channel's thread; unpacking is for the workers."""

    def __init__(
        self,
        endpoint: Endpoint,
        ledger: Ledger,
        emptied: Callable[[Receiving, Intake, Section], None],
    ) -> None:
        """Call `emptied` once a slot of a request's section was."""
        self.lender = Lender(endpoint.ring)
        self._endpoint, self._ledger, self._emptied = endpoint, ledger, emptied

    def on_message(self, peer: PeerRank, message: Want | Staged | Back) -> None:
        """Lend slots in turn, and take them back: filled, or not needed."""
        if isinstance(message, Want):
            self.lender.want(peer.generation, message.claim, message.count)
        else:
            self.lender.take_back(peer.generation, message.slot)
            if isinstance(message, Back) or not self._unpack(peer, message):
                self.lender.ring.give(message.slot)
        self._pump()

    def settle(self, peer: PeerRank, number: int, slots: Sequence[int]) -> None:
        """Hear which slots a rank has, as the answer to question `number`."""
        if lost := self.lender.settle(peer.generation, number, slots):
            log.warning(
                "kvconnect: %d staging slots were lost on the way to or from %s", lost, peer
            )
            self._pump()

    def gone(self, peer: PeerRank) -> None:
        """Take back the slots of a rank that can write no more."""
        self.lender.reclaim(peer.generation)
        self._pump()

    def _pump(self) -> None:
        for generation, claim, slot in self.lender.pump():
            self._endpoint.send_to(self._endpoint.peers[generation], Lent(claim, slot))

    def _unpack(self, peer: PeerRank, message: Staged) -> bool:
        """Empty a slot into pages in a worker; False where nobody waits for it."""
        found = self._ledger.find(peer, message.request)
        if found is None or found[0].state is not RequestState.UNDER_WAY:
            return False
        receiving, intake = found
        section = Section(message.pool, *message.layers)
        try:
            heap = self._count(receiving, intake, section, message)
        except KVConnectError as error:
            words = f"{peer} sent what cannot be: {error}"
            self._ledger.fail(receiving, words, cause_of(error))
            return False
        heap.unpacking += 1
        intake.checking += 1
        endpoint = self._endpoint

        def work() -> None:
            packer = endpoint.packer(endpoint.plan(peer, section), section.pool)
            buffer = endpoint.ring.buffer(message.slot, packer.nbytes * message.pieces)
            packer.unpack(receiving.filled[section.pool].pages, message.first, buffer)

        def ended(_: None, error: Exception | None) -> None:
            heap.unpacking -= 1
            intake.checking -= 1
            self.lender.ring.give(message.slot)
            self._pump()
            if error is not None:
                self._ledger.fail(receiving, f"unpacking {section}: {error}", cause_of(error))
            elif receiving.state is RequestState.UNDER_WAY:
                self._emptied(receiving, intake, section)

        endpoint.later(work, ended)
        return True

    def _count(
        self, receiving: Receiving, intake: Intake, section: Section, message: Staged
    ) -> Heap:
        """Count pieces in; `ConfigError` unless they follow those that came before."""
        endpoint, peer = self._endpoint, intake.peer
        intake.check(section)
        heap = intake.heaps.setdefault(section, Heap())
        total = endpoint.pieces(peer, section.pool, receiving.filled[section.pool].slots)
        after = message.first + message.pieces
        if message.first != heap.pieces or after > total:
            raise ConfigError(
                f"pieces [{message.first}, {after}) of {total} after {heap.pieces} of them"
            )
        nbytes = endpoint.plan(peer, section).piece_nbytes * message.pieces
        if nbytes > endpoint.ring.slot_bytes:
            raise ConfigError(f"{nbytes} B in a slot of {endpoint.ring.slot_bytes} B")
        heap.pieces = after
        return heap
