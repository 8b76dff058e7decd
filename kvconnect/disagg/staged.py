"""Prefill side: sending pieces packed, where their runs are too short to be sent one by one.

Pieces are packed into a slot of this side's ring, pushed as one run into a slot that the decode
side has lent, and announced; the decode side unpacks them. Packing, pushing and unpacking of
neighbouring chunks overlap. Whether that pays is computed from what the transport costs.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvconnect.disagg.blocks import Packer
from kvconnect.disagg.carry import Carried, finish, let_go, stopped
from kvconnect.disagg.cause import noted
from kvconnect.disagg.pair_plan import PairPlan
from kvconnect.disagg.ring import Ring
from kvconnect.disagg.transport import (
    Peer,
    PeerCapabilities,
    PeerOutcome,
    PeerStatus,
    PeerTransfer,
    PeerTransport,
    Runs,
    Way,
)
from kvconnect.page_index import U64

COPY_SECONDS = 1.5e-10
"""Per byte, of packing and of unpacking runs of 256 B and more on one core."""
_DEPTH = 3

_claims = itertools.count(1)


def choose(plan: PairPlan, pieces: int, capabilities: PeerCapabilities) -> tuple[bool, str]:
    """Tell whether to send packed, and why, in numbers."""
    nbytes = plan.piece_nbytes * pieces
    direct = capabilities.seconds(len(plan.nbytes) * pieces, nbytes)
    staged = capabilities.seconds(max(nbytes >> 22, 1), nbytes) + 2 * COPY_SECONDS * nbytes
    words = (
        f"{len(plan.nbytes) * pieces} runs of {plan.shortest} B and more: {direct * 1e3:.3g} ms "
        f"one by one, {staged * 1e3:.3g} ms packed"
    )
    return staged < direct, words


@dataclass(eq=False)
class Claim:
    """Slots that the decode side lends to one job, as they come."""

    want: Callable[[int, int], None]
    """Ask for (claim, count) slots."""
    back: Callable[[int], None]
    """Return a slot unused."""
    number: int = field(default_factory=lambda: next(_claims))
    _slots: deque[int] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _closed: bool = False

    def lend(self, slot: int) -> None:
        """Take a slot in; one that comes too late goes straight back."""
        with self._changed:
            if not self._closed:
                self._slots.append(slot)
                self._changed.notify()
                return
        self.back(slot)

    def try_take(self) -> int | None:
        """Return a lent slot, or None."""
        with self._changed:
            return self._slots.popleft() if self._slots else None

    def take(self, until: float, stop: threading.Event) -> int | None:
        """Wait for a slot until `until` or `stop`; None where none came."""
        with self._changed:
            while not self._slots:
                left = until - time.monotonic()
                if left <= 0 or stop.is_set():
                    return None
                self._changed.wait(min(left, 0.05))
            return self._slots.popleft()

    def close(self) -> None:
        """Return what is left, now and later."""
        with self._changed:
            self._closed = True
            left, self._slots = list(self._slots), deque()
        for slot in left:
            self.back(slot)


class Free(Protocol):
    """Gives a chunk's slots back; the remote one only if it did not arrive."""

    def __call__(self, chunk: Chunk, *, arrived: bool) -> None:
        """Give both back, or the local one only."""


@dataclass(eq=False)
class Chunk:
    """A slot on its way: a transfer that gives both slots back when it has failed and is quiet."""

    transfer: PeerTransfer
    first: int
    pieces: int
    local: int
    remote: int
    free: Free
    _freed: bool = False

    def done(self) -> bool:
        """Tell whether it is quiet; frees its slots once, the remote one as failed."""
        if not self.transfer.done():
            return False
        self.release(arrived=False)
        return True

    def release(self, *, arrived: bool) -> None:
        """Free the local slot, and the remote one unless it `arrived` and is to be unpacked."""
        if not self._freed:
            self._freed = True
            self.free(self, arrived=arrived)

    def wait(self, timeout: float) -> PeerOutcome:
        """Wait for the transfer."""
        return self.transfer.wait(timeout)

    def cancel(self) -> None:
        """Ask the transfer to stop."""
        self.transfer.cancel()


@dataclass(frozen=True, slots=True)
class Lane:
    """What one staged job needs: where from, where to, and whom to tell."""

    transport: PeerTransport
    peer: Peer
    ring: Ring
    remote_base: int
    remote_slot_bytes: int
    claim: Claim
    announce: Callable[[int, int, int], None]
    """Called with (first piece, pieces, slot) when a chunk has arrived."""


def carry_staged(
    lane: Lane, packer: Packer, pages: U64, pieces: int, *, until: float, stop: threading.Event
) -> Carried:
    """Move `pieces` pieces of `pages` packed; a worker's job. See `carry` for the result."""
    job = _Job(lane, packer, pages, until, stop)
    failure = raised = None
    try:
        failure = job.run(pieces)
    except Exception as error:  # noqa: BLE001 - handed on in what is returned
        raised = noted(error)
    lane.claim.close()
    whole = failure is None and raised is None
    return Carried(pieces * packer.nbytes if whole else 0, failure, let_go(job.under_way), raised)


@dataclass(eq=False)
class _Job:
    """One staged carry.

    Invariant: while it waits for a slot it holds none that others could wait for in turn. It
    waits for a lent slot with empty hands, and for one of its own ring with a lent one only;
    those who hold slots of the ring wait for nothing but the transport. So waiting never goes
    in circles, however few slots there are.
    """

    lane: Lane
    packer: Packer
    pages: U64
    until: float
    stop: threading.Event
    under_way: deque[Chunk] = field(default_factory=deque)

    def run(self, pieces: int) -> PeerOutcome | None:
        """Send all chunks and wait for them; the first failure, or None."""
        lane = self.lane
        each = min(lane.ring.slot_bytes, lane.remote_slot_bytes) // self.packer.nbytes
        chunks = -(-pieces // each)
        lane.claim.want(lane.claim.number, min(chunks, _DEPTH))
        for number in range(chunks):
            first = number * each
            failure = self._send(first, min(each, pieces - first))
            if failure is not None:
                return failure
            if number + _DEPTH < chunks:
                lane.claim.want(lane.claim.number, 1)
            if len(self.under_way) >= _DEPTH and (failure := self._arrive()) is not None:
                return failure
        return self._arrive_all()

    def _send(self, first: int, pieces: int) -> PeerOutcome | None:
        claim, ring = self.lane.claim, self.lane.ring
        remote = claim.try_take()
        if remote is None:
            if (failure := self._arrive_all()) is not None:
                return failure
            remote = claim.take(self.until, self.stop)
        if remote is None:
            return self._no_slot("the decode side lent no staging slot in time")
        local = ring.try_take()
        if local is None:
            if (failure := self._arrive_all()) is not None:
                claim.back(remote)
                return failure
            local = ring.take(self.until, self.stop)
        if local is None:
            claim.back(remote)
            return self._no_slot("no own staging slot was free in time")
        self.under_way.append(self._start(first, pieces, local, remote))
        return None

    def _no_slot(self, words: str) -> PeerOutcome:
        return stopped(self.until, self.stop) or PeerOutcome(PeerStatus.TIMEOUT, 0, words)

    def _start(self, first: int, pieces: int, local: int, remote: int) -> Chunk:
        lane = self.lane
        nbytes = pieces * self.packer.nbytes
        try:
            self.packer.pack(self.pages, first, lane.ring.buffer(local, nbytes))
            runs = Runs(
                np.array([lane.ring.address(local)], dtype=np.uint64),
                np.array([lane.remote_base + remote * lane.remote_slot_bytes], dtype=np.uint64),
                np.array([nbytes], dtype=np.uint64),
            )
            left = self.until - time.monotonic()
            transfer = lane.transport.submit(lane.peer, Way.PUSH, runs, left)
        except BaseException:
            lane.ring.give(local)
            lane.claim.back(remote)
            raise
        return Chunk(transfer, first, pieces, local, remote, self._free)

    def _free(self, chunk: Chunk, *, arrived: bool) -> None:
        self.lane.ring.give(chunk.local)
        if not arrived:
            self.lane.claim.back(chunk.remote)

    def _arrive(self) -> PeerOutcome | None:
        """Wait for the oldest chunk and announce it; the failure if it was one."""
        chunk = self.under_way[0]
        outcome = finish(chunk.transfer, self.until, self.stop)
        if outcome is None or not outcome.ok:
            return outcome or self._no_slot("stopped")
        self.under_way.popleft()
        chunk.release(arrived=True)
        self.lane.announce(chunk.first, chunk.pieces, chunk.remote)
        return None

    def _arrive_all(self) -> PeerOutcome | None:
        failure = None
        while failure is None and self.under_way:
            failure = self._arrive()
        return failure
