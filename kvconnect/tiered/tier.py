"""`Tier`: one backend of a tiered store, with its circuit and what is known about its keys."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Backend, Batch, Op, Outcome, Status, SupportsDelete, Transfer
from kvconnect.errors import BackendError, KVConnectError
from kvconnect.tiered.circuit import Circuit, Pass
from kvconnect.tiered.late import Late
from kvconnect.tiered.options import TieredOptions
from kvconnect.tiered.recall import Recall
from kvconnect.transfers import verified

T = TypeVar("T")

MOST_STALE = 1 << 16
"""Keys of one tier that are known to be out of date; beyond it the oldest are forgotten."""

GRACE = 0.1
"""Seconds past a deadline in which a tier that obeys `cancel` lets go of the memory."""

FAILURES = (Status.BACKEND_ERROR, Status.TIMEOUT)


class Tier:
    """A backend that may fail without failing the store.

    Invariant: a key in `stale` has changed elsewhere and could not be changed here; this tier
    is not asked for it until it holds what the others hold.
    """

    def __init__(self, backend: Backend, number: int, options: TieredOptions, late: Late) -> None:
        """Take a backend; `number` counts from 1, fastest first."""
        self.backend, self.number, self._late = backend, number, late
        self.label = f"tier {number} ({backend.name})"
        self.circuit = Circuit(self.label, options.trip_after, options.retry_after)
        ttl = options.negative_ttl if number > 1 else 0.0
        self.absent = Recall(ttl, max(options.negative_entries, 1))
        self.stale = Recall(math.inf, MOST_STALE)
        self.loaded = self.stored = 0

    def passed_over(self, keys: Sequence[str], sizes: Sequence[int]) -> NDArray[np.bool_]:
        """Tell which keys need not be asked for here: (keys,) bool."""
        return self.stale.knows(keys) | self.absent.knows(keys, sizes)

    def has(self, keys: Iterable[str]) -> None:
        """Note that the tier now holds these keys as the others do."""
        named = list(keys)
        self.stale.forget(named)
        self.absent.forget(named)

    def outdate(self, keys: Sequence[str]) -> None:
        """Keep an older object from coming back: remove it, or ask no more for it."""
        self.stale.note(keys)
        if self.drop(keys):
            self.stale.forget(keys)

    def drop(self, keys: Sequence[str]) -> bool:
        """Remove keys; False if the tier cannot, does not answer or refuses such keys."""
        backend = self.backend
        if not isinstance(backend, SupportsDelete):
            return False
        try:
            return self.ask(lambda: backend.remove(keys)) is not None
        except KVConnectError:
            # Nobody asked for this by name: the threads that copy must not end with it.
            return False

    def ask(self, call: Callable[[], T]) -> T | None:
        """Return what `call` returns, None if the tier failed or is taken for dead.

        The caller's own mistakes (`ConfigError` and the like) are raised.
        """
        given = self.circuit.enter()
        if given is None:
            return None
        try:
            answer = call()
        except (BackendError, OSError) as error:
            self.circuit.fail(repr(error), late=isinstance(error, TimeoutError))
            return None
        except KVConnectError:
            self.circuit.succeed()
            raise
        except Exception as error:  # noqa: BLE001 - a foreign library's error is an outage here
            self.circuit.fail(repr(error))
            return None
        finally:
            self.circuit.leave(given)
        self.circuit.succeed()
        return answer

    def exists(self, keys: Sequence[str], sizes: Sequence[int]) -> NDArray[np.bool_] | None:
        """Ask which keys are there; an answer of the wrong length is none."""

        def call() -> NDArray[np.bool_]:
            found = np.asarray(self.backend.exists(keys, sizes), dtype=np.bool_)
            if found.shape != (len(keys),):
                raise BackendError(f"exists gave {found.shape} answers to {len(keys)} questions")
            return found

        return self.ask(call)

    def start(self, batch: Batch) -> Flight:
        """Start a batch, or say why not."""
        given = self.circuit.enter()
        if given is None:
            return Flight(self, batch, None, "not asked: it failed before", asked=False)
        try:
            return Flight(self, batch, self.backend.submit(batch), given=given)
        except Exception as error:  # noqa: BLE001 - one tier's failure is data
            if isinstance(error, KVConnectError) and not isinstance(error, BackendError):
                self.circuit.succeed()  # it answers: what it refuses is this batch
            else:
                self.circuit.fail(repr(error))
            self.circuit.leave(given)
            return Flight(self, batch, None, repr(error))

    def finished(self, transfer: Transfer, given: Pass) -> None:
        """Leave the circuit once `transfer` is quiet."""
        if transfer.done():
            self.circuit.leave(given)
            return
        self.circuit.hang(1)

        def quiet() -> None:
            self.circuit.hang(-1)
            self.circuit.leave(given)

        self._late.after([transfer], quiet)


class Flight:
    """A batch in one tier."""

    def __init__(
        self, tier: Tier, batch: Batch, transfer: Transfer | None, error: str = "", *,
        asked: bool = True, given: Pass = Pass.FREELY,
    ) -> None:  # fmt: skip
        """`error` says why there is no transfer; `asked` is False where the circuit was open."""
        self.tier, self.batch, self.transfer = tier, batch, transfer
        self.error, self.asked, self._given = error, asked, given
        self._cancelled = False

    def quiet(self) -> bool:
        """Tell whether the tier has let go of the memory."""
        return self.transfer is None or self.transfer.done()

    def cancel(self) -> None:
        """Ask the tier to stop: the caller wants no more of it."""
        self._cancelled = True
        if self.transfer is not None:
            self.transfer.cancel()

    def collect(self, until: float, quiet_until: float | None = None) -> Outcome:
        """Wait until `until` (monotonic); then cancel, and wait for quiet until `quiet_until`.

        Never raises. A load that still holds its memory has no key that is OK.
        """
        if self.transfer is None:
            return self._failed(self.error, touched=False)
        started = time.monotonic()
        outcome = self._wait(self.transfer, until)
        late = not self.transfer.done()
        if late:
            self.transfer.cancel()
            outcome = self._wait(self.transfer, max(quiet_until or 0.0, until + GRACE))
            outcome = _changed(outcome, Status.CANCELLED, Status.TIMEOUT, "took too long")
        outcome = verified(self.batch, outcome)
        lease = self.tier.backend.capabilities.lease_seconds
        if self.batch.op is Op.LOAD:
            if not self.transfer.done():
                outcome = _changed(outcome, Status.OK, Status.TIMEOUT, "still holds the memory")
            elif lease is not None and time.monotonic() - started > lease:
                outcome = _changed(outcome, Status.OK, Status.LEASE_EXPIRED, "lease ran out")
        self._judge(outcome, late=late)
        self.tier.finished(self.transfer, self._given)
        return outcome

    def _wait(self, transfer: Transfer, until: float) -> Outcome:
        try:
            return transfer.wait(max(until - time.monotonic(), 0.0))
        except Exception as error:  # noqa: BLE001 - one tier's failure is data
            return self._failed(repr(error), touched=True)

    def _judge(self, outcome: Outcome, *, late: bool) -> None:
        circuit = self.tier.circuit
        if self._cancelled:
            return
        if late:
            circuit.fail(f"{self.batch.op.value} of {len(self.batch)} keys timed out", late=True)
        elif len(self.batch) and np.isin(outcome.status, FAILURES).all():
            circuit.fail(outcome.causes.get(0, Status(int(outcome.status[0])).name))
        else:
            circuit.succeed()

    def _failed(self, cause: str, *, touched: bool) -> Outcome:
        count, load = len(self.batch), self.batch.op is Op.LOAD
        status = np.full(count, Status.BACKEND_ERROR, dtype=np.uint8)
        causes = dict.fromkeys(range(count), cause)
        return Outcome(status, 0, causes, np.full(count, touched, np.bool_) if load else None)


def _changed(outcome: Outcome, old: Status, new: Status, cause: str) -> Outcome:
    """Turn one status into another; bytes are counted anew by whoever merges the tiers."""
    which = outcome.status == old
    status = np.where(which, np.uint8(new), outcome.status).astype(np.uint8)
    causes = {**outcome.causes, **{int(i): cause for i in np.flatnonzero(which)}}
    dirty = None if outcome.dirty is None else outcome.dirty | which
    nbytes = 0 if old is Status.OK else outcome.nbytes
    return Outcome(status, nbytes, causes, dirty)
