"""The mover: pages to transfers and back to page outcomes, in bounded batches with a deadline.

It owns what is in flight. Batches are cut by bytes, a bounded window of them is under way, a
key that failed in the backend is tried again once, and what did not finish in time stays
quarantined until the backend lets go of it: those pages (or staging slots) are never handed
out again before.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Backend, Batch, Op, Outcome, Status, Transfer
from kvconnect.descriptors import Plan
from kvconnect.errors import BackendError, ClosedError, RegistrationError, TransferTimeoutError
from kvconnect.outcome import page_outcome
from kvconnect.pool import U64
from kvconnect.staging import StagingBuffer
from kvconnect.transfers import select, verified

WINDOW = 4
"""Batches under way at once: enough to hide the gap between two, few enough to bound memory."""

SLOT_WAIT = 0.05
"""Seconds between two looks for staging slots that late transfers have let go of."""


@dataclass(slots=True, eq=False)
class _Flight:
    """One batch under way and what must not be touched until it is done."""

    transfer: Transfer | None
    batch: Batch
    at: int
    pages: U64
    slots: NDArray[np.int64] | None
    started: float
    error: str | None = None

    def quiet(self) -> bool:
        return self.transfer is None or self.transfer.done()


@dataclass(slots=True)
class _Result:
    status: NDArray[np.uint8]
    dirty: NDArray[np.bool_]
    causes: dict[int, str] = field(default_factory=dict)


class Mover:
    """Moves whole pages of one plan; safe to use from many threads."""

    def __init__(
        self,
        plan: Plan,
        backend: Backend,
        staging: StagingBuffer | None,
        *,
        batch_bytes: int,
        retries: int,
        clock: Callable[[], float],
    ) -> None:
        """Take a plan whose regions (and staging buffer) are registered with the backend."""
        self.plan, self.backend, self.staging = plan, backend, staging
        self.retries, self.clock = retries, clock
        pages = max(batch_bytes // plan.page_nbytes, 1)
        self._batch_pages = min(pages, staging.batch_pages) if staging else pages
        self._late: list[_Flight] = []
        self._lock = threading.Lock()

    def move(
        self,
        op: Op,
        keys: Sequence[str],
        page_ids: U64,
        timeout: float,
        *,
        ttl: float | None = None,
        pin: bool = False,
    ) -> Outcome:
        """Move pages; `keys` are page-major object keys. Returns an outcome per page.

        Raises `TransferTimeoutError` if a page is still held by an earlier transfer that timed
        out, `RegistrationError` and `ClosedError` from the backend; all else is a status.
        """
        self.refuse_quarantined(page_ids)
        deadline = self.clock() + timeout
        total = len(keys)
        result = _Result(np.full(total, Status.TIMEOUT, np.uint8), np.zeros(total, np.bool_))
        flights: deque[_Flight] = deque()
        try:
            for start in range(0, len(page_ids), self._batch_pages):
                if len(flights) >= (2 if self.staging else WINDOW):
                    self._collect(flights.popleft(), result, deadline)
                if self.clock() >= deadline:
                    break
                part = page_ids[start : start + self._batch_pages]
                slots = self._slots(len(part), flights, result, deadline)
                if self.staging and slots is None:
                    result.causes[start * self.plan.objects] = "no staging slots free in time"
                    break
                flights.append(self._start(op, keys, start, part, slots, ttl=ttl, pin=pin))
        finally:
            try:
                while flights:
                    self._collect(flights.popleft(), result, deadline)
            finally:
                for flight in flights:  # only after an interrupt: nothing may be forgotten
                    self._quarantine(flight)
        per_page = self.plan.objects
        dirty = result.dirty if op is Op.LOAD else None
        return page_outcome(result.status, result.causes, per_page, self.plan.page_nbytes, dirty)

    def _slots(
        self, pages: int, flights: deque[_Flight], result: _Result, deadline: float
    ) -> NDArray[np.int64] | None:
        """Take staging slots for `pages`; None if there is no staging, or none free in time.

        Waits only while this call holds none itself: two calls that each held half and waited
        for the rest would wait for each other.
        """
        while self.staging is not None:
            self.quarantined()
            left = 0.0 if flights else min(deadline - self.clock(), SLOT_WAIT)
            try:
                return self.staging.acquire(pages, max(left, 0.0))
            except TransferTimeoutError:
                if flights:
                    self._collect(flights.popleft(), result, deadline)
                elif self.clock() >= deadline:
                    break
        return None

    def _start(
        self,
        op: Op,
        keys: Sequence[str],
        start: int,
        pages: U64,
        slots: NDArray[np.int64] | None,
        *,
        ttl: float | None,
        pin: bool,
    ) -> _Flight:
        at = start * self.plan.objects
        part = list(keys[at : at + len(pages) * self.plan.objects])
        try:
            if self.staging is not None and slots is not None:
                if op is Op.STORE:
                    self.staging.gather(pages, slots)
                batch = self.staging.batch(op, part, slots, ttl=ttl, pin=pin)
            else:
                batch = self.plan.batch(op, part, pages, ttl=ttl, pin=pin)
            flight = _Flight(None, batch, at, pages, slots, self.clock())
            self._submit(flight)
        except BaseException:
            if self.staging is not None and slots is not None:
                self.staging.release(slots)
            raise
        return flight

    def _submit(self, flight: _Flight) -> None:
        try:
            flight.transfer = self.backend.submit(flight.batch)
        except (RegistrationError, ClosedError):
            raise
        except BackendError as error:
            flight.error = str(error)

    def _collect(self, flight: _Flight, result: _Result, deadline: float) -> None:
        late: _Flight | None = flight
        try:
            outcome = self._outcome(flight, deadline)
            if flight.quiet():
                outcome, late = self._retry(flight, outcome, deadline)
                self._land(flight, outcome)
        except BaseException:
            self._quarantine(flight)
            raise
        self._note(flight, outcome, result)
        if late is not None:
            self._quarantine(late)
        if late is not flight:
            if late is not None and flight.slots is not None and late.slots is not None:
                flight.slots = np.setdiff1d(flight.slots, late.slots)
            self._let_go(flight)

    def _note(self, flight: _Flight, outcome: Outcome, result: _Result) -> None:
        where = slice(flight.at, flight.at + len(flight.batch))
        result.status[where] = outcome.status
        if not self.staging:
            # Good objects changed their bytes too: a page that did not come whole is dirty.
            failed = outcome.status != Status.OK if outcome.dirty is None else outcome.dirty
            result.dirty[where] = failed | (outcome.status == Status.OK)
        result.causes.update({flight.at + i: text for i, text in outcome.causes.items()})

    def _outcome(self, flight: _Flight, deadline: float) -> Outcome:
        """Wait for a flight; whatever is not a well-formed OK in time becomes a miss."""
        batch = flight.batch
        if flight.transfer is None:
            return _all(batch, flight.error or "not submitted", touched=False)
        try:
            outcome = flight.transfer.wait(max(deadline - self.clock(), 0.0))
        except Exception as error:  # noqa: BLE001 - one batch's failure is data
            outcome = _all(batch, str(error) or repr(error), touched=True)
        outcome = verified(batch, outcome)
        now, lease = self.clock(), self.backend.capabilities.lease_seconds
        if batch.op is Op.LOAD and lease is not None and now - flight.started > lease:
            return _void(outcome, Status.LEASE_EXPIRED, f"lease of {lease:g} s ran out")
        if now > deadline:
            return _void(outcome, Status.TIMEOUT, "finished after its deadline")
        if batch.op is Op.LOAD and not flight.quiet():
            return _void(outcome, Status.TIMEOUT, "the backend still holds the memory")
        return outcome

    def _retry(
        self, flight: _Flight, outcome: Outcome, deadline: float
    ) -> tuple[Outcome, _Flight | None]:
        """Try the keys that failed in the backend again, and only those.

        Also returns the flight of a try that is still under way at the deadline, which then
        owns its pages and slots.
        """
        for _ in range(self.retries):
            failed = np.flatnonzero(outcome.status == Status.BACKEND_ERROR)
            if not len(failed) or self.clock() >= deadline:
                break
            rows = np.unique(failed // self.plan.objects)
            slots = None if flight.slots is None else flight.slots[rows]
            batch = select(flight.batch, failed)
            again = _Flight(None, batch, flight.at, flight.pages[rows], slots, self.clock())
            try:
                self._submit(again)
            except Exception as error:  # noqa: BLE001 - the first try was accepted: data
                again.error = str(error) or repr(error)
            flight.transfer = again.transfer
            outcome = _merge(outcome, failed, self._outcome(again, deadline))
            if not again.quiet():
                return outcome, again
        return outcome, None

    def _land(self, flight: _Flight, outcome: Outcome) -> None:
        """Copy staged pages that came whole into the pool; only then are they hits."""
        if self.staging is None or flight.batch.op is not Op.LOAD or flight.slots is None:
            return
        whole = (outcome.status == Status.OK).reshape(-1, self.plan.objects).all(axis=1)
        self.staging.scatter(flight.pages[whole], flight.slots[whole])

    def _let_go(self, flight: _Flight) -> None:
        if self.staging is not None and flight.slots is not None:
            self.staging.release(flight.slots)
            flight.slots = None

    def _quarantine(self, flight: _Flight) -> None:
        if flight.transfer is not None:
            flight.transfer.cancel()
        with self._lock:
            self._late.append(flight)

    def quarantined(self) -> list[int]:
        """Return the page ids that transfers which timed out still hold, sorted."""
        with self._lock:
            looked = [(flight, flight.quiet()) for flight in self._late]
            self._late = [flight for flight, quiet in looked if not quiet]
            held = [flight.pages for flight in self._late if flight.slots is None]
        for flight in (flight for flight, quiet in looked if quiet):
            self._let_go(flight)
        return sorted({int(page) for pages in held for page in pages})

    def refuse_quarantined(self, page_ids: U64) -> None:
        """Raise `TransferTimeoutError` if one of the pages is still in flight."""
        if not self._late:
            return
        held = sorted(set(self.quarantined()) & {int(page) for page in page_ids})
        if held:
            raise TransferTimeoutError(
                f"pages {held[:8]} are still held by a transfer that timed out; use other pages "
                f"until quarantined() no longer lists them"
            )

    def drain(self, timeout: float) -> bool:
        """Wait until nothing is in flight any more; False if that took too long."""
        deadline = time.monotonic() + timeout
        while True:
            self.quarantined()
            if not self._late:
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)


def _all(batch: Batch, cause: str, *, touched: bool) -> Outcome:
    """Fail every key; `touched` says whether the backend may have written its destination."""
    count = len(batch)
    dirty = np.full(count, touched, np.bool_) if batch.op is Op.LOAD else None
    status = np.full(count, Status.BACKEND_ERROR, np.uint8)
    return Outcome(status, 0, dict.fromkeys(range(count), cause), dirty)


def _void(outcome: Outcome, status: Status, cause: str) -> Outcome:
    """Turn what came too late into misses; other misses keep their reason."""
    late = outcome.status == Status.OK
    changed = np.where(late, np.uint8(status), outcome.status).astype(np.uint8)
    causes = {**outcome.causes, **{int(i): cause for i in np.flatnonzero(late)}}
    before = outcome.dirty if outcome.dirty is not None else np.zeros(len(late), np.bool_)
    return Outcome(changed, 0, causes, before | late)


def _merge(first: Outcome, index: NDArray[np.intp], again: Outcome) -> Outcome:
    status = first.status.copy()
    status[index] = again.status
    dirty = None
    if first.dirty is not None:
        dirty = first.dirty.copy()
        dirty[index] |= again.dirty if again.dirty is not None else again.status != Status.OK
        dirty &= status != Status.OK
    causes = {i: text for i, text in first.causes.items() if status[i] != Status.OK}
    causes |= {int(index[i]): text for i, text in again.causes.items()}
    return Outcome(status, first.nbytes + again.nbytes, causes, dirty)
