"""`Metered`: counters by operation and reason, bytes and seconds, beside any backend."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Backend, Batch, Outcome, Registration, SupportsStats, Transfer
from kvconnect.errors import KVConnectError
from kvconnect.metrics import Metrics
from kvconnect.region import Region
from kvconnect.transfers import verified
from kvconnect.wrappers.base import Wrapper


class Metered(Wrapper):
    """Counts what callers of `inner` were told.

    A batch counts once, with the outcome that its caller saw first. One that confirmed no
    byte adds none and no seconds: the rate of a failed transfer is not a rate. An outcome
    whose numbers do not add up counts as failed (see `kvconnect.transfers.verified`), though
    the caller gets it unchanged.
    """

    def __init__(self, inner: Backend, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: seconds, monotonic."""
        super().__init__(inner)
        self.metrics = Metrics()
        self.clock = clock

    def register(self, regions: Sequence[Region]) -> Registration:
        """Register with `inner` and count the bytes, or the failure."""
        with _Counting(self.metrics, "register"):
            registration = self.inner.register(regions)
        self.metrics.add("register.bytes", sum(region.nbytes for region in regions))
        return registration

    def exists(self, keys: Sequence[str], nbytes: Sequence[int]) -> NDArray[np.bool_]:
        """Ask `inner` and count keys and hits: (keys,) bool."""
        with _Counting(self.metrics, "exists"):
            found = self.inner.exists(keys, nbytes)
        self.metrics.add("exists.keys", len(keys))
        self.metrics.add("exists.hits", int(np.count_nonzero(found)))
        return found

    def submit(self, batch: Batch) -> Transfer:
        """Submit to `inner`; the outcome is counted when the caller takes it."""
        begin = self.clock()
        with _Counting(self.metrics, f"{batch.op.value}.submit"):
            inner = self.inner.submit(batch)
        return _Observed(inner, batch, self, begin)

    def stats(self) -> dict[str, int | float | str]:
        """Return the counters as ``metered.*``, beside the stats of `inner`."""
        own = {f"metered.{name}": value for name, value in self.metrics.snapshot().items()}
        inner = self.inner.stats() if isinstance(self.inner, SupportsStats) else {}
        return {**inner, **own}


class _Counting:
    """Counts calls, and errors by their class, of one operation."""

    def __init__(self, metrics: Metrics, operation: str) -> None:
        self._metrics, self._operation = metrics, operation

    def __enter__(self) -> None:
        self._metrics.add(f"{self._operation}.calls")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, KVConnectError):
            self._metrics.add(f"{self._operation}.{kind.__name__}")


class _Observed:
    """A transfer whose first reported outcome is counted."""

    def __init__(self, inner: Transfer, batch: Batch, meter: Metered, begin: float) -> None:
        self._inner, self._batch, self._meter, self._begin = inner, batch, meter, begin
        self._lock = threading.Lock()
        self._counted = False

    def done(self) -> bool:
        return self._inner.done()

    def wait(self, timeout: float | None = None) -> Outcome:
        outcome = self._inner.wait(timeout)
        seconds = self._meter.clock() - self._begin
        with self._lock:
            first, self._counted = not self._counted, True
        if first:
            checked = verified(self._batch, outcome)
            self._meter.metrics.observe(self._batch.op.value, checked, seconds)
        return outcome

    def cancel(self) -> None:
        self._inner.cancel()
