"""`Faulty`: everything a store can do wrong, by script or by seeded chance.

The faults are those of real stores seen in public issues: a status
for one key, a destination half written, an `exists` that is wrong or cannot answer, a result
of the wrong length, a registration that fails part way.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Backend, Batch, Op, Registration, Status, Transfer
from kvconnect.errors import ClosedError, RegistrationError
from kvconnect.region import Region, register_all
from kvconnect.transfers import select
from kvconnect.wrappers.base import Wrapper
from kvconnect.wrappers.broken import BrokenTransfer, Chunked, Dirt, Lie

Step = Sequence[int] | Lie | Exception
"""What one call does: a status per key (0 lets a key through), a lie, or an error."""


class Faulty(Wrapper):
    """Does what `inner` does, except where told otherwise.

    Invariants: a key with an injected store fault never reaches `inner`; one with an injected
    load fault leaves its destination as `dirt` says and is reported dirty accordingly; a step
    is used once; the same seed and calls give the same faults.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        seed: int = 0,
        rates: Mapping[Status, float] | None = None,
        dirt: Dirt = Dirt.ALL,
    ) -> None:
        """`rates`: chance in [0, 1] per key of each status, in both directions."""
        super().__init__(inner)
        self.rates = dict(rates or {})
        self.dirt = dirt
        self.claims: set[str] = set()
        """Keys that `exists` says are present, whatever `inner` says."""
        self.refused: str | None = None
        """Name of the region whose registration failed last."""
        self.released: list[str] = []
        """Names of the regions released, in order."""
        self._random = random.Random(seed)  # noqa: S311 - repeatable, not secret
        self._steps: dict[Op, deque[Step]] = {op: deque() for op in Op}
        self._exists: deque[Lie | Exception] = deque()
        self._refuse_at: int | None = None

    def script(self, op: Op, *steps: Step) -> None:
        """Say what the next batches in this direction do, one step each."""
        self._steps[op].extend(steps)

    def script_exists(self, *steps: Lie | Exception) -> None:
        """Say what the next calls of `exists` do, one step each."""
        self._exists.extend(steps)

    def refuse_region(self, nth: int) -> None:
        """Let the next `register` call fail at its region number `nth`, from 0."""
        self._refuse_at = nth

    def register(self, regions: Sequence[Region]) -> Registration:
        """Register one region after the other with `inner`, or fail part way."""
        refuse_at, self._refuse_at = self._refuse_at, None
        handles: dict[Region, Registration] = {}

        def one(region: Region) -> None:
            if len(handles) == refuse_at:
                self.refused = region.name
                raise RegistrationError(f"{self.name}: injected at region {refuse_at}, {region}")
            handles[region] = self.inner.register([region])

        def undo(region: Region) -> None:
            self.released.append(region.name)
            handles.pop(region).close()

        try:
            register_all(regions, one, undo)
        except RegistrationError as error:
            if isinstance(error.__cause__, ClosedError):
                raise error.__cause__ from None
            raise
        return Chunked(tuple(regions), handles, undo)

    def exists(self, keys: Sequence[str], nbytes: Sequence[int]) -> NDArray[np.bool_]:
        """Ask `inner`, add the false claims, and do the next step: (keys,) bool, or worse."""
        step = self._exists.popleft() if self._exists else None
        if isinstance(step, Exception):
            raise step
        claimed = np.array([key in self.claims for key in keys], dtype=np.bool_)
        found = self.inner.exists(keys, nbytes) | claimed
        if step is Lie.TOO_FEW:
            return found[:-1]
        return np.append(found, True) if step is Lie.TOO_MANY else found

    def submit(self, batch: Batch) -> Transfer:
        """Pass on the keys that have no fault."""
        steps = self._steps[batch.op]
        step = steps.popleft() if steps else self._draw(batch)
        if isinstance(step, Exception):
            raise step
        lie = step if isinstance(step, Lie) else None
        injected = np.zeros(len(batch), dtype=np.uint8)
        if not isinstance(step, Lie):
            given = min(len(step), len(batch))
            injected[:given] = step[:given]
        through = np.flatnonzero(self._reaches(batch, injected, lie))
        inner = self.inner.submit(select(batch, through))
        dirt = self.dirt if batch.op is Op.LOAD else Dirt.NONE
        return BrokenTransfer(inner, batch, through, injected, lie, dirt)

    def _reaches(
        self, batch: Batch, injected: NDArray[np.uint8], lie: Lie | None
    ) -> NDArray[np.bool_]:
        """Tell which keys `inner` sees: (keys,) bool."""
        if batch.op is Op.STORE:
            return np.asarray((injected == Status.OK) & (lie is not Lie.FORGOTTEN))
        # A load that shall leave dirt goes through, so that `inner` checks the destination
        # before anything is written to it.
        return np.asarray((injected == Status.OK) | (self.dirt is not Dirt.NONE))

    def _draw(self, batch: Batch) -> list[int]:
        return [self._one() for _ in range(len(batch))] if self.rates else []

    def _one(self) -> int:
        chance = self._random.random()
        for status, rate in self.rates.items():
            if chance < rate:
                return int(status)
            chance -= rate
        return int(Status.OK)
