"""Loads: from the fastest tier that has a key, on to the next for those that did not come."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Outcome, Status
from kvconnect.tiered.job import Job
from kvconnect.tiered.merge import note_causes
from kvconnect.tiered.tier import Flight, Tier
from kvconnect.transfers import select

if TYPE_CHECKING:
    from kvconnect.tiered.core import Core

FINAL = (Status.OK, Status.SIZE_MISMATCH, Status.CANCELLED)
"""What no slower tier is asked to better. Another size is the newer object, not a fault."""


class Load:
    """One load under way.

    Invariant: a tier is started only after all before it have let go of the memory.
    """

    def __init__(self, core: Core, job: Job) -> None:
        count = len(job.batch)
        self.core, self.job = core, job
        self.keys, self.sizes = list(job.batch.keys), job.sizes
        self.status = np.full(count, Status.ABSENT, dtype=np.uint8)
        self.dirty = np.zeros(count, dtype=np.bool_)
        self.causes: dict[int, str] = {}
        self.heal = np.zeros(count, dtype=np.bool_)

    def run(self) -> list[Flight]:
        """Load; return what still holds memory."""
        rest = np.arange(len(self.keys), dtype=np.int64)
        flights: list[Flight] = []
        for at, tier in enumerate(self.core.tiers):
            if not len(rest) or self._over(rest):
                break
            if len(ask := self._worth_asking(tier, rest)):
                flights = [self._one(at, tier, ask)]
                if not flights[0].quiet():
                    self._stop(rest, Status.TIMEOUT, f"{tier.label} still holds the memory")
                    break
            rest = rest[~np.isin(self.status[rest], FINAL)]
        self.job.settle_all(self.status, self.causes, self.dirty)
        return [flight for flight in flights if not flight.quiet()]

    def _over(self, rest: NDArray[np.int64]) -> bool:
        if self.job.cancelled:
            self._stop(rest, Status.CANCELLED, "")
        elif time.monotonic() >= self.job.deadline:
            self._stop(rest, Status.TIMEOUT, "no time left")
        else:
            return False
        return True

    def _stop(self, rest: NDArray[np.int64], status: Status, cause: str) -> None:
        stopped = rest[self.status[rest] != Status.OK]
        self.status[stopped] = status
        if cause:
            for index in stopped.tolist():
                before = self.causes.get(index)
                self.causes[index] = f"{before}; {cause}" if before else cause

    def _worth_asking(self, tier: Tier, rest: NDArray[np.int64]) -> NDArray[np.int64]:
        keys = [self.keys[i] for i in rest.tolist()]
        over = tier.passed_over(keys, self.sizes[rest].tolist())
        if tier.number > 1:
            # What a slower tier has under these keys is an older object, if anything.
            over |= self.core.writeback.pending(keys)
        return rest[~over]

    def _one(self, at: int, tier: Tier, ask: NDArray[np.int64]) -> Flight:
        part = select(self.job.batch, ask)
        versions = self.core.ledger.versions(part.keys)
        flight = self.job.start(tier, part)
        last = at == len(self.core.tiers) - 1
        outcome = flight.collect(self.job.share(last=last), self.job.deadline)
        self._merge(tier, ask, outcome)
        if flight.asked and tier.number > 1:
            gone = (outcome.status == Status.ABSENT) & self.core.ledger.same(part.keys, versions)
            which = np.flatnonzero(gone).tolist()
            tier.absent.note([part.keys[i] for i in which], self.sizes[ask[gone]].tolist())
        good = np.flatnonzero(outcome.status == Status.OK)
        if at and len(good) and flight.quiet():
            self.core.promoter.offer(select(part, good), versions[good], self.heal[ask[good]])
        return flight

    def _merge(self, tier: Tier, ask: NDArray[np.int64], outcome: Outcome) -> None:
        """Take this tier's word where it is OK, or where no faster one had anything to say."""
        new, old = outcome.status, self.status[ask]
        take = (new == Status.OK) | (old == Status.ABSENT)
        self.status[ask] = np.where(take, new, old)
        if outcome.dirty is not None:
            self.dirty[ask] |= outcome.dirty
        if tier.number == 1:
            self.heal[ask] = new == Status.CHECKSUM
        tier.loaded += int((new == Status.OK).sum())
        note_causes(self.causes, tier.label, ask, outcome)
