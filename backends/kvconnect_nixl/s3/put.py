"""Storing: gather an object and its trailer into a slot, send it as one request.

An S3 server makes an object visible when all of it has arrived, so nothing half-written is ever
seen, and replaces an older object as a whole. Every store sends its bytes, also where the same
are there already: asking first costs a round trip for every new page to save a rare one.
"""

from __future__ import annotations

import math
import time

from kvconnect.backend import Op, Status
from kvconnect_nixl.s3 import seal
from kvconnect_nixl.s3.control import Seen
from kvconnect_nixl.s3.core import Core, Job
from kvconnect_nixl.s3.moving import Moving, Task
from kvconnect_nixl.s3.slots import Slot


class Storing(Moving):
    """Stores a batch."""

    op = Op.STORE

    def __init__(self, core: Core, job: Job) -> None:
        """Fix the expiry now: all objects of a batch run out together."""
        ttl = job.batch.ttl
        self._expiry = 0 if ttl is None else math.ceil((time.time() + ttl) * 1000)
        super().__init__(core, job)

    def length(self, task: Task) -> int:
        """Payload and trailer."""
        return task.size + seal.NBYTES

    def prepare(self, task: Task, slot: Slot) -> None:
        """Copy first, then hash the copy: the sum is of the bytes that are sent."""
        if task.seal is None:
            self.job.memory.gather(task.index, slot.address, slot.region)
            task.seal = seal.sealed(task.key, slot.view[: task.size], self._expiry)
            slot.view[task.size : task.size + seal.NBYTES] = task.seal.pack()

    def landed(self, task: Task, slot: Slot) -> bool:  # noqa: ARG002
        """Note that the server has confirmed it."""
        self._stored(task)
        return True

    def looked(self, task: Task, seen: Seen) -> bool:
        """Take an object that is there for stored: only the answer was lost."""
        if seen.size != self.length(task) or seal.unpack(seen.tail) != task.seal:
            return False
        self._stored(task)
        return True

    def _stored(self, task: Task) -> None:
        self.core.count("store.objects")
        self.core.count("store.bytes", task.size)
        self.job.settle(task.index, Status.OK)
