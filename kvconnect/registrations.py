"""Which regions a backend may touch: refcounted, checked, and released only when quiet.

Why it exists: two connectors on one pool register the same allocation, and either may leave
first. A count per allocation makes both closes safe, and the table of what is registered is
what every descriptor is checked against before anything moves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Batch, Closing, Registration
from kvconnect.errors import RegistrationError, TransferTimeoutError
from kvconnect.region import Region, RegionTable

_Place = tuple[int, int, str]


class Lease(Protocol):
    """A transfer as seen from here: the local memory it holds, until it is settled."""

    @property
    def leased(self) -> NDArray[np.uint64]:
        """Addresses of its local runs: (runs,) uint64."""

    def settled(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds; tell whether the memory is free."""


class Registrations:
    """The registered regions of one backend or transport.

    Invariants: regions are disjoint; one allocation registered n times is known until n
    handles are closed; no transfer touches a handle's regions when its close has returned.

    `lock` guards the table. A backend that checks a batch and then marks it as under way does
    both while holding it, so that no region can leave in between.
    """

    def __init__(
        self, owner: str, under_way: Callable[[], Sequence[Lease]], deadline: float
    ) -> None:
        """`under_way` lists the owner's transfers; `drain` waits for them `deadline` seconds."""
        self.lock = threading.RLock()
        self._owner = owner
        self._under_way = under_way
        self._deadline = deadline
        self._counts: dict[_Place, int] = {}
        self._known: dict[_Place, Region] = {}
        self._table = RegionTable(())

    @property
    def regions(self) -> tuple[Region, ...]:
        """Everything registered now, by address."""
        return self._table.regions

    def add(self, regions: Sequence[Region]) -> Registration:
        """Register all regions, or none and raise `RegistrationError` (they overlap)."""
        with self.lock:
            known = self._known | {_place(r): r for r in regions}
            self._table = RegionTable(known.values())
            self._known = known
            for region in regions:
                self._counts[_place(region)] = self._counts.get(_place(region), 0) + 1
        return _Handle(self, tuple(regions))

    def check(self, batch: Batch) -> None:
        """Raise `RegistrationError` unless every run lies inside one registered region."""
        try:
            self.locate(batch.address, batch.nbytes)
        except RegistrationError as error:
            raise RegistrationError(
                f"{self._owner}: {batch.op.value} of {len(batch)} keys refused: {error}; "
                f"register the whole pool first"
            ) from None

    def locate(self, address: NDArray[np.uint64], nbytes: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Return the index in `regions` of each run; `RegistrationError` if one is outside."""
        return self._table.locate(address, nbytes)

    def drop(self, regions: Sequence[Region]) -> None:
        """Count the regions down; those at zero are known no longer."""
        with self.lock:
            for place in map(_place, regions):
                self._counts[place] -= 1
                if not self._counts[place]:
                    del self._counts[place], self._known[place]
            self._table = RegionTable(self._known.values())

    def drain(self, regions: Sequence[Region] | None = None) -> None:
        """Wait until no transfer touches `regions` (None: none at all is under way).

        Raises `TransferTimeoutError` after the deadline; the memory is then still leased.
        """
        until = time.monotonic() + self._deadline
        with self.lock:
            under_way = list(self._under_way())
        for transfer in under_way:
            if regions is not None and not _touches(transfer.leased, regions):
                continue
            if not transfer.settled(max(until - time.monotonic(), 0)):
                raise TransferTimeoutError(
                    f"{self._owner}: {transfer!r} was not done after {self._deadline} s; its "
                    f"memory is still leased"
                )


def _touches(address: NDArray[np.uint64], regions: Sequence[Region]) -> bool:
    """Tell whether a run begins in one of the regions (it then lies in it)."""
    return any(((address >= r.address) & (address < r.end)).any() for r in regions)


def _place(region: Region) -> _Place:
    # The name is for messages only: two callers may call one allocation differently.
    return (region.address, region.nbytes, region.device)


class _Handle(Closing):
    """One caller's share of the registrations; closing it twice counts once."""

    def __init__(self, owner: Registrations, regions: tuple[Region, ...]) -> None:
        self.regions = regions
        self._owner = owner
        self._dropped = False

    def close(self) -> None:
        """Give the regions back once transfers are quiet; `TransferTimeoutError` if not."""
        with self._owner.lock:
            dropped, self._dropped = self._dropped, True
            if not dropped:
                self._owner.drop(self.regions)
        # Outside the lock: a transfer may need it to finish. A second close waits again, so
        # that a close that timed out can be repeated.
        self._owner.drain(self.regions)

    def __repr__(self) -> str:
        state = "closed" if self._dropped else "open"
        return f"Registration({', '.join(map(str, self.regions))}; {state})"
