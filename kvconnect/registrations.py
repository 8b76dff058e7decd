"""Which regions a backend may touch: refcounted, checked, and released only when quiet.

Why it exists: two connectors on one pool register the same allocation, and either may leave
first. A count per allocation makes both closes safe, and the table of what is registered is
what every descriptor is checked against before anything moves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvconnect.backend import Batch, Closing, Registration
from kvconnect.errors import RegistrationError
from kvconnect.region import Region, RegionTable

_Place = tuple[int, int, str]


class Registrations:
    """The registered regions of one backend.

    Invariants: regions are disjoint; one allocation registered n times is known until n
    handles are closed; `drain` has returned before the last handle's close returns.

    `lock` guards the table. A backend that checks a batch and then marks it as under way does
    both while holding it, so that no region can leave in between.
    """

    def __init__(self, owner: str, drain: Callable[[], None]) -> None:
        """`drain` waits, with a deadline, until no transfer is under way, or raises."""
        self.lock = threading.RLock()
        self._owner = owner
        self._drain = drain
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
            self._table.locate(batch.address, batch.nbytes)
        except RegistrationError as error:
            raise RegistrationError(
                f"{self._owner}: {batch.op.value} of {len(batch)} keys refused: {error}; "
                f"register the whole pool first"
            ) from None

    def drop(self, regions: Sequence[Region]) -> None:
        """Count the regions down; those at zero are known no longer."""
        with self.lock:
            for place in map(_place, regions):
                self._counts[place] -= 1
                if not self._counts[place]:
                    del self._counts[place], self._known[place]
            self._table = RegionTable(self._known.values())

    def drain(self) -> None:
        """Wait until no transfer is under way, or raise."""
        self._drain()


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
        self._owner.drain()

    def __repr__(self) -> str:
        state = "closed" if self._dropped else "open"
        return f"Registration({', '.join(map(str, self.regions))}; {state})"
