"""A backend that answers from a script, and a mover on it."""

import ctypes
from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest

from kvconnect.backend import Capabilities, Op, Outcome, Status
from kvconnect.descriptors import describe
from kvconnect.mover import Mover
from kvconnect.staging import StagingBuffer
from tests.unit.held_pools import held, whole

OK, ABSENT, ERROR, TIMEOUT = Status.OK, Status.ABSENT, Status.BACKEND_ERROR, Status.TIMEOUT
LOADED = 0x5A


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@dataclass
class Step:
    """What the next batch does; an OK load fills its runs with LOADED."""

    status: list | None = None
    hold: bool = False
    seconds: float = 0.0
    refuse: Exception | None = None
    fail: BaseException | None = None
    nbytes: int | None = None
    no_dirty: bool = False


class Flown:
    def __init__(self, store, batch, step):
        self.store, self.batch, self.step = store, batch, step
        self.held, self.cancelled = step.hold, False

    def done(self):
        return not self.held

    def cancel(self):
        self.cancelled = True

    def wait(self, timeout=None):
        assert timeout is not None
        assert timeout >= 0
        self.store.clock.now += self.step.seconds
        if self.step.fail:
            raise self.step.fail
        status = np.array(self.step.status or [OK] * len(self.batch), dtype=np.uint8)
        good = status[: len(self.batch)] == OK
        for key in np.flatnonzero(good) if self.batch.op is Op.LOAD else ():
            for row in range(int(self.batch.first[key]), int(self.batch.first[key + 1])):
                ctypes.memset(int(self.batch.address[row]), LOADED, int(self.batch.nbytes[row]))
        sizes = self.batch.object_nbytes()[: len(status)]
        nbytes = int(sizes[good].sum()) if self.step.nbytes is None else self.step.nbytes
        dirty = None if self.step.no_dirty or self.batch.op is Op.STORE else status != OK
        return Outcome(status, nbytes, {}, dirty)


class Scripted:
    """A backend that does one step for each batch, and afterwards all OK."""

    name = "scripted"

    def __init__(self, *steps, lease=None):
        self.steps, self.clock = deque(steps), Clock()
        self.capabilities = Capabilities(lease_seconds=lease)
        self.flown = []

    def submit(self, batch):
        step = self.steps.popleft() if self.steps else Step()
        if step.refuse:
            raise step.refuse
        self.flown.append(Flown(self, batch, step))
        return self.flown[-1]


@dataclass
class Rig:
    """Six pages of 384 B, `per_page` objects each, `batch_pages` pages a batch."""

    store: Scripted
    staged: bool = False
    per_page: int = 1
    batch_pages: int = 6
    retries: int = 1
    slots: int = 6

    def __post_init__(self):
        self.one = held("cplshd", pages=6)
        self.plan = describe(
            self.one.pool,
            whole(self.one.pool),
            Capabilities(),
            "staged" if self.staged else "auto",
            head_group=4 // self.per_page,
        )
        size = 4096 * self.per_page
        self.staging = StagingBuffer(self.plan, self.slots * size) if self.staged else None
        self.mover = Mover(
            self.plan,
            self.store,
            self.staging,
            batch_bytes=self.batch_pages * 384,
            retries=self.retries,
            clock=self.store.clock,
        )
        # Staging halves its slots for two batches; here the test says how many pages a batch has.
        self.mover._batch_pages = self.batch_pages
        self.before = self.one.snapshot()

    def move(self, op=Op.LOAD, pages=range(6), timeout=10.0):
        ids = np.array(list(pages), dtype=np.uint64)
        keys = [f"{page}.{at}" for page in ids.tolist() for at in range(self.plan.objects)]
        return self.mover.move(op, keys, ids, timeout)

    def loaded(self):
        """Tell which pages have all their bytes from the store."""
        found = self.one.read(range(6))
        return [all((found[n][page] == LOADED).all() for n in found) for page in range(6)]

    def free_slots(self):
        self.mover.quarantined()
        return len(self.staging._free)


def names(outcome):
    return [Status(int(s)).name for s in outcome.status]


staged = pytest.mark.parametrize("staged", [False, True])
both = pytest.mark.parametrize("op", list(Op))
