"""Stores: into all tiers at once, or into the first and later into the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Status
from kvconnect.tiered.job import Job
from kvconnect.tiered.merge import note_causes
from kvconnect.tiered.tier import Flight, Tier
from kvconnect.transfers import select

if TYPE_CHECKING:
    from kvconnect.tiered.core import Core

NOT_ASKED = np.uint8(255)
"""Where a tier is to get the object by write-back."""


class Store:
    """One store under way; the ledger holds its keys meanwhile."""

    def __init__(self, core: Core, job: Job) -> None:
        self.core, self.job = core, job
        self.keys = list(job.batch.keys)
        self.said = np.full((len(core.tiers), len(self.keys)), NOT_ASKED, dtype=np.uint8)
        self.causes: dict[int, str] = {}
        self.flights: list[Flight] = []

    def run(self) -> list[Flight]:
        """Store; return what still holds memory."""
        queued = self.core.writeback.pending(self.keys)
        self.core.writeback.discard(self.keys)
        everything = np.arange(len(self.keys), dtype=np.int64)
        if self.core.options.write == "through":
            self._into(self.core.tiers, everything, last=True)
        else:
            self._into(self.core.tiers[:1], everything, last=False)
            rest = np.flatnonzero(~self._queued())
            if len(rest) and not self.job.cancelled:
                self._into(self.core.tiers[1:], rest, last=True)
        good = (self.said == Status.OK).any(axis=0)
        self._outdate(good, queued)
        self.job.settle_all(self._status(good), self.causes)
        return [flight for flight in self.flights if not flight.quiet()]

    def _into(self, tiers: list[Tier], index: NDArray[np.int64], *, last: bool) -> None:
        """Store the keys at `index` in these tiers, all at the same time: they only read."""
        part = select(self.job.batch, index)
        flights = [(tier, self.job.start(tier, part)) for tier in tiers]
        until = self.job.share(last=last)
        for tier, flight in flights:
            outcome = flight.collect(until)
            self.said[tier.number - 1, index] = outcome.status
            note_causes(self.causes, tier.label, index, outcome)
            tier.has(self.keys[i] for i in index[outcome.status == Status.OK].tolist())
            tier.stored += int((outcome.status == Status.OK).sum())
            self.flights.append(flight)

    def _queued(self) -> NDArray[np.bool_]:
        """Queue what the first tier has; what does not fit is written through now."""
        good = np.flatnonzero(self.said[0] == Status.OK)
        taken = np.zeros(len(self.keys), dtype=np.bool_)
        names, sizes = [self.keys[i] for i in good.tolist()], self.job.sizes[good].tolist()
        batch = self.job.batch
        taken[good] = self.core.writeback.offer(names, sizes, batch.ttl, pin=batch.pin)
        return taken

    def _outdate(self, good: NDArray[np.bool_], queued: NDArray[np.bool_]) -> None:
        """Where one tier has the new object and another failed, that one has an old one.

        So it has where the object that was `queued` for it is not going to be copied any more.
        """
        for tier, said in zip(self.core.tiers, self.said, strict=True):
            old = (good | (queued & (tier.number > 1))) & (said != Status.OK)
            if tier.number > 1 and self.core.options.write == "back":
                old &= (said != NOT_ASKED) | ~good
            if old.any():
                tier.outdate([self.keys[i] for i in np.flatnonzero(old).tolist()])

    def _status(self, good: NDArray[np.bool_]) -> NDArray[np.uint8]:
        """Give the verdict: OK, or the fastest tier's reason."""
        bad = (self.said != Status.OK) & (self.said != NOT_ASKED)
        if self.core.options.require == "all":
            good = good & ~bad.any(axis=0)
        why = self.said[bad.argmax(axis=0), np.arange(len(self.keys))]
        return np.where(good, np.uint8(Status.OK), why).astype(np.uint8)
