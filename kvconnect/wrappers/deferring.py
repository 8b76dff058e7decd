"""`Deferring`: a wrapper that passes batches on later, in pieces, from a thread of its own.

What `submit` must refuse at once (closed, unregistered memory) is checked before the batch is
put off, because `inner` will only see it later.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np

from kvconnect.backend import Backend, Batch, Closing, Registration, Status, Transfer
from kvconnect.errors import ClosedError, KVConnectError
from kvconnect.region import Region
from kvconnect.registrations import Registrations
from kvconnect.transfers import BatchTransfer, select, verified
from kvconnect.wrappers.base import Wrapper

TICK = 0.002
"""Seconds between two looks at what may have changed: short beside any real transfer."""


class Deferring(Wrapper):
    """Base of wrappers that decide when a piece of a batch may go on.

    Subclasses say how a batch is cut (`pieces`) and wait until a piece may go (`admit`).
    Invariant: `inner` sees a piece only after `admit` returned OK for it, and a transfer is
    done only after `inner` has let go of all its pieces.
    """

    def __init__(self, inner: Backend, *, deadline: float = 30.0) -> None:
        """`deadline`: seconds that a piece may wait for admission, or run."""
        super().__init__(inner)
        self.deadline = deadline
        self.obeys_cancel = True
        self.closing = False
        self._registrations = Registrations(self.name, lambda: self._under_way, self.deadline)
        self._under_way: list[BatchTransfer] = []

    def pieces(self, batch: Batch) -> Iterator[tuple[int, int]]:
        """Yield the half-open key ranges in which `batch` is passed on."""
        yield 0, len(batch)

    def admit(self, transfer: BatchTransfer, piece: Batch) -> Status:
        """Wait until `piece` may go; OK, or the status its keys get instead."""
        raise NotImplementedError

    def leave(self, piece: Batch) -> None:
        """Note that `inner` has let go of an admitted piece."""

    def register(self, regions: Sequence[Region]) -> Registration:
        """Register with `inner`, and note the regions for the check at submit."""
        inner = self.inner.register(regions)
        try:
            return _Both(self._registrations.add(regions), inner)
        except KVConnectError:
            inner.close()
            raise

    def submit(self, batch: Batch) -> Transfer:
        """Check the batch, put it off and return."""
        transfer = BatchTransfer(batch, self.deadline)
        with self._registrations.lock:
            if self.closing:
                raise ClosedError(f"{self.name}: {batch.op.value} after close; open it again")
            self._registrations.check(batch)
            self._under_way = [t for t in self._under_way if not t.done()]
            self._under_way.append(transfer)
        threading.Thread(target=self._run, args=(transfer,), name=self.name, daemon=True).start()
        return transfer

    def close(self) -> None:
        """Cancel what waits, wait for what moves, then close `inner`."""
        with self._registrations.lock:
            self.closing = True
            under_way = list(self._under_way)
        for transfer in under_way:
            transfer.cancel()
        self._registrations.drain()
        super().close()

    def _run(self, transfer: BatchTransfer) -> None:
        try:
            for start, stop in self.pieces(transfer.batch):
                piece = select(transfer.batch, np.arange(start, stop, dtype=np.int64))
                status = Status.CANCELLED if self.closing else self.admit(transfer, piece)
                if status is Status.OK:
                    self._move(transfer, piece, start)
                else:
                    for index in range(start, stop):
                        transfer.settle(index, status, "never passed on")
        finally:
            transfer.finish()

    def _move(self, transfer: BatchTransfer, piece: Batch, start: int) -> None:
        try:
            moving = self.inner.submit(piece)
        except (KVConnectError, OSError) as error:
            for index in range(len(piece)):
                transfer.settle(start + index, Status.BACKEND_ERROR, repr(error))
        else:
            self._follow(transfer, moving, piece, start)
        finally:
            self.leave(piece)

    def _follow(self, transfer: BatchTransfer, moving: Transfer, piece: Batch, start: int) -> None:
        """Wait for `inner`; past the deadline the keys time out, but the lease goes on."""
        until = time.monotonic() + self.deadline
        while not moving.done() and time.monotonic() < until:
            if self.closing or (transfer.cancelled and self.obeys_cancel):
                moving.cancel()
            moving.wait(TICK)
        outcome = verified(piece, moving.wait(0))
        for index in range(len(piece)):
            transfer.settle(
                start + index,
                int(outcome.status[index]),
                outcome.causes.get(index, ""),
                dirty=bool(outcome.dirty is not None and outcome.dirty[index]),
            )
        while not moving.done():
            time.sleep(TICK)


class _Both(Closing):
    """The wrapper's note of the regions and `inner`'s registration, closed in that order."""

    def __init__(self, noted: Registration, inner: Registration) -> None:
        self._noted, self._inner = noted, inner

    @property
    def regions(self) -> tuple[Region, ...]:
        return self._inner.regions

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._inner.close)
            self._noted.close()
