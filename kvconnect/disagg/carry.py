"""Carrying one plan over a transport: in bounded batches, two under way, with one deadline.

Runs in a worker thread. What a failed or cancelled carry leaves behind are transfers that are
not quiet yet; they are handed back, because their memory is not free until they are.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kvconnect.disagg.cause import Cause, cause_of, cause_of_outcome, noted
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

_DEPTH = 2
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Carried:
    """How a carry ended: confirmed bytes, the first failure, and transfers not quiet yet.

    `raised`: the failure of one that could not go on. Never raised by a carry itself, because
    what had been submitted before would be forgotten with it while it still moves.
    """

    nbytes: int
    failure: PeerOutcome | None = None
    lingering: tuple[PeerTransfer, ...] = ()
    raised: Exception | None = None

    def trouble(self) -> tuple[str, Cause] | None:
        """Return why it failed, for people and for programs; None where all bytes are there."""
        if self.raised is not None:
            return str(self.raised), cause_of(self.raised)
        if self.failure is not None:
            return self.failure.cause, cause_of_outcome(self.failure)
        return None


def batches(runs: Runs, capabilities: PeerCapabilities, max_bytes: int) -> Iterator[Runs]:
    """Cut runs into batches of at most `max_entries` runs and about `max_bytes` bytes."""
    most = min(max_bytes, capabilities.max_bytes)
    ends = np.cumsum(runs.nbytes)
    start = 0
    while start < len(runs):
        done = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, np.uint64(done + most), side="right"))
        stop = max(min(stop, start + capabilities.max_entries), start + 1)
        yield runs.part(start, stop)
        start = stop


def carry(
    transport: PeerTransport,
    peer: Peer,
    way: Way,
    runs: Runs,
    *,
    batch_bytes: int,
    until: float,
    stop: threading.Event,
) -> Carried:
    """Move all runs until `until` (monotonic seconds); `stop` ends it early."""
    under_way: deque[PeerTransfer] = deque()
    confirmed, failure, raised = 0, None, None

    def arrive() -> PeerOutcome | None:
        nonlocal confirmed
        outcome = _next(under_way, until, stop)
        confirmed += outcome.nbytes
        return None if outcome.ok else outcome

    try:
        for part in batches(runs, transport.capabilities, batch_bytes):
            if (failure := stopped(until, stop)) is not None:
                break
            under_way.append(transport.submit(peer, way, part, until - time.monotonic()))
            if len(under_way) >= _DEPTH and (failure := arrive()) is not None:
                break
        while failure is None and under_way:
            failure = arrive()
    except Exception as error:  # noqa: BLE001 - handed on in what is returned
        raised = noted(error)
    return Carried(confirmed, failure, let_go(under_way), raised)


def let_go(under_way: Iterable[PeerTransfer]) -> tuple[PeerTransfer, ...]:
    """Cancel transfers; those that are not quiet yet."""
    under_way = list(under_way)
    for transfer in under_way:
        transfer.cancel()
    return tuple(transfer for transfer in under_way if not transfer.done())


def stopped(until: float, stop: threading.Event) -> PeerOutcome | None:
    """Return why not to go on, or None."""
    if stop.is_set():
        return PeerOutcome(PeerStatus.CANCELLED, 0, "cancelled")
    if time.monotonic() >= until:
        return PeerOutcome(PeerStatus.TIMEOUT, 0, "the request's deadline has passed")
    return None


def finish(transfer: PeerTransfer, until: float, stop: threading.Event) -> PeerOutcome | None:
    """Wait for the outcome; None where the deadline or `stop` came first.

    A failure is known before the transfer is quiet: see `PeerTransfer.done` for that.
    """
    while True:
        outcome = transfer.wait(max(min(until - time.monotonic(), _POLL_SECONDS), 0))
        if transfer.done() or outcome.status not in {PeerStatus.OK, PeerStatus.TIMEOUT}:
            return outcome
        if stopped(until, stop) is not None:
            return None


def _next(under_way: deque[PeerTransfer], until: float, stop: threading.Event) -> PeerOutcome:
    """Wait for the oldest transfer; one that is not quiet goes back to the others."""
    transfer = under_way.popleft()
    outcome = finish(transfer, until, stop)
    if not transfer.done():
        under_way.append(transfer)
    if outcome is None:
        return stopped(until, stop) or PeerOutcome(PeerStatus.CANCELLED, 0, "cancelled")
    return outcome
