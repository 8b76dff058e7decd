"""Moving the objects of a batch: a window of them under way, each with its own end.

What NIXL says of a failure is that there was one. The reason comes from a look at the object
(`Control.look`) on another thread, so that misses and retries do not hold up what flies.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from kvconnect.backend import Op, Status
from kvconnect.errors import KVConnectError
from kvconnect_nixl.s3 import names, seal
from kvconnect_nixl.s3.control import Seen, pause
from kvconnect_nixl.s3.core import Core, Job
from kvconnect_nixl.s3.slots import Slot
from kvconnect_nixl.s3.wire import POLL_SECONDS, Flight

_BUSY_SECONDS = 0.05
"""Between two tries to store an object that an older store may still replace."""


@dataclass(slots=True, eq=False)
class Task:
    """One object: `size` bytes of payload, and where it stands."""

    index: int
    name: str
    key: bytes
    size: int
    slot: Slot | None = None
    flight: Flight | None = None
    look: Future[Seen] | None = None
    tries: int = 0
    after: float = 0.0
    """Time before which it is not tried again."""
    seal: seal.Seal | None = None
    mark: bytes = b""


class Moving(ABC):
    """Runs one batch; a subclass says what to do before and after each flight."""

    op: Op

    def __init__(self, core: Core, job: Job) -> None:
        """Nothing is under way yet."""
        self.core, self.job = core, job
        keys, sizes = job.batch.keys, job.memory.sizes.tolist()
        self._waiting = deque(
            Task(index, job.names[index], names.raw(keys[index]), size)
            for index, size in enumerate(sizes)
            if self.wanted(index, size)
        )
        self._active: list[Task] = []
        self._later: list[Task] = []
        self._began = time.monotonic()

    def wanted(self, index: int, size: int) -> bool:
        """Tell whether there is anything to do; if not, it is settled here."""
        if size:
            return True
        self.job.settle(index, Status.SIZE_MISMATCH, "0 B; an object has at least one byte")
        return False

    @abstractmethod
    def prepare(self, task: Task, slot: Slot) -> None:
        """Fill the slot for the task's next flight."""

    @abstractmethod
    def length(self, task: Task) -> int:
        """Bytes that are moved at most."""

    @abstractmethod
    def landed(self, task: Task, slot: Slot) -> bool:
        """Settle what came through; False asks for a look at the object."""

    @abstractmethod
    def looked(self, task: Task, seen: Seen) -> bool:
        """Settle by what the look found; False has the task tried again."""

    def run(self) -> None:
        """Move everything; on return every key is settled and the caller's memory quiet."""
        try:
            while (self._waiting or self._active or self._later) and not self._stopped():
                if not self._step():
                    time.sleep(POLL_SECONDS)
        finally:
            self._let_go()

    def _stopped(self) -> bool:
        """Settle what is not to be started any more; True ends the batch."""
        stop = self.job.stop_reason()
        if stop is Status.TIMEOUT:
            self._note_silence()
            seconds = self.core.options.timeout
            self.job.settle_rest(stop, f"not confirmed within {seconds} s")
        elif stop is not None:
            self._drop_waiting(stop, "")
            if self.op is Op.LOAD:
                # Nobody wants it, and what it would still bring lands in slots only. A store
                # is awaited: cancelled and visible later would be neither.
                self.job.settle_rest(stop, "")
                return True
        elif (error := self.core.circuit.error()) is not None:
            self._drop_waiting(Status.BACKEND_ERROR, str(error))
        return stop is Status.TIMEOUT

    def _step(self) -> bool:
        moved = False
        for task in list(self._active):
            if self._advance(task):
                moved = True
                self._active.remove(task)
        return self._launch() or moved

    def _launch(self) -> bool:
        now, launched = time.monotonic(), False
        # In front: they may hold the very slots that the others wait for.
        self._waiting.extendleft(task for task in self._later if task.after <= now)
        self._later = [task for task in self._later if task.after > now]
        while self._waiting:
            task = self._waiting[0]
            if self._overtakes(task):
                self._later.append(task)
            elif self._fly(task):
                launched = True
            else:
                break
            self._waiting.popleft()
        return launched

    def _overtakes(self, task: Task) -> bool:
        # A store that timed out earlier may land yet, and would replace what is stored now.
        if self.op is Op.STORE and self.core.wire.storing_late(task.name.__eq__):
            task.after = time.monotonic() + _BUSY_SECONDS
            return True
        return False

    def _fly(self, task: Task) -> bool:
        """Launch a task (or settle it, if it can never fly); False where it has to wait."""
        slots = self.core.wire.slots
        room = self.length(task) + seal.MARK
        if room > slots.nbytes:
            cause = f"{task.size} B and a trailer pass through bounce={slots.nbytes} B; raise it"
            self.job.settle(task.index, Status.NO_SPACE, cause)
            return True
        if task.slot is None:
            task.slot = slots.take(room)
            if task.slot is None:
                return False
            self.prepare(task, task.slot)
        try:
            task.flight = self.core.wire.start(self.op, task.name, task.slot, self.length(task))
        except KVConnectError as error:
            self._settle(task, Status.BACKEND_ERROR, str(error))
            return True
        if task.flight is None:
            return False
        self._active.append(task)
        return True

    def _advance(self, task: Task) -> bool:
        """Look after a task under way; True if it is no longer active."""
        if task.flight is not None:
            return self._advance_flight(task, task.flight)
        if task.look is None or not task.look.done():
            return False
        look, task.look = task.look, None
        try:
            settled = self.looked(task, look.result())
        except KVConnectError as error:
            self._settle(task, Status.BACKEND_ERROR, str(error))
            return True
        if not settled:
            self._again(task)
        elif task.slot is not None:
            self._free(task)
        return True

    def _advance_flight(self, task: Task, flight: Flight) -> bool:
        if not self.core.wire.ended(flight):
            return False
        task.flight = None
        if flight.posted.error is None and self.landed(task, flight.slot):
            self._free(task)
            return True
        task.look = self.core.control.look_later(task.name, self.job.until)
        return False

    def _again(self, task: Task) -> None:
        task.tries += 1
        self.core.count(f"{self.op.value}.retries")
        if task.tries > self.core.options.retries:
            verb = "GET" if self.op is Op.LOAD else "PUT"
            cause = f"{verb} of {task.size} B failed {task.tries} times, though the server answers"
            self._settle(task, Status.BACKEND_ERROR, cause)
            return
        task.after = time.monotonic() + pause(task.tries)
        if task.slot is not None:
            self.prepare(task, task.slot)
        self._later.append(task)

    def _settle(self, task: Task, status: Status, cause: str) -> None:
        self.job.settle(task.index, status, cause)
        self._free(task)

    def _free(self, task: Task) -> None:
        slot, task.slot = task.slot, None
        if slot is not None:
            self.core.wire.slots.give(slot)

    def _drop_waiting(self, status: Status, cause: str) -> None:
        for task in (*self._waiting, *self._later):
            self._settle(task, status, cause)
        self._waiting.clear()
        self._later.clear()

    def _note_silence(self) -> None:
        flying = any(task.flight is not None for task in self._active)
        if flying and self.core.wire.last_end < self._began:
            self.core.circuit.trip(
                f"nixl+s3: nothing came from {self.core.place} in {self.core.options.timeout} s"
            )

    def _let_go(self) -> None:
        """Keep nothing but what NIXL still holds: that stays with the wire."""
        for task in (*self._waiting, *self._later, *self._active):
            if task.look is not None:
                task.look.cancel()
            flight, task.flight = task.flight, None
            if flight is not None:
                task.slot = None
                self.core.count(f"{self.op.value}.given_up")
                self.core.wire.give_up(flight)
            self._free(task)
        self._waiting.clear()
        self._later.clear()
        self._active.clear()
