"""`Core`: what the parts of a tiered store share, and how a job runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvconnect.backend import Op, Status
from kvconnect.tiered.job import Job
from kvconnect.tiered.late import Late
from kvconnect.tiered.ledger import Ledger
from kvconnect.tiered.load_path import Load
from kvconnect.tiered.options import TieredOptions
from kvconnect.tiered.promote import Promoter
from kvconnect.tiered.store_path import Store
from kvconnect.tiered.tier import Flight, Tier
from kvconnect.tiered.writeback import WriteBack


@dataclass(frozen=True, slots=True)
class Core:
    """Tiers, fastest first, and the machinery between them."""

    tiers: list[Tier]
    options: TieredOptions
    ledger: Ledger
    late: Late
    promoter: Promoter
    writeback: WriteBack


def run(core: Core, job: Job) -> None:
    """Run a job to its end; its memory is free once no tier holds it any more."""
    keys = list(job.batch.keys)
    store = job.batch.op is Op.STORE
    if store and not core.ledger.begin_change(keys, job.deadline, lambda: job.cancelled):
        _refuse(job)
        return
    flights: list[Flight] = []

    def finish() -> None:
        if store:
            core.ledger.end_change(keys)
        job.finish()

    move: Store | Load = Store(core, job) if store else Load(core, job)
    try:
        flights = move.run()
    except Exception as error:  # noqa: BLE001 - it has nobody to be raised to
        failed = np.full(len(keys), Status.BACKEND_ERROR, dtype=np.uint8)
        dirty = np.ones(len(keys), dtype=np.bool_)
        job.settle_all(failed, dict.fromkeys(range(len(keys)), repr(error)), dirty)
        flights = job.flights()
    if any(not flight.quiet() for flight in flights):
        job.answer()
    core.late.after([f.transfer for f in flights if f.transfer is not None], finish)


def _refuse(job: Job) -> None:
    status = Status.CANCELLED if job.cancelled else Status.TIMEOUT
    cause = "another call still changes or copies one of the keys"
    count = len(job.batch)
    job.settle_all(np.full(count, status, np.uint8), dict.fromkeys(range(count), cause))
    job.finish()
