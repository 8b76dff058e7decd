"""Memory registered with a transport's library: once per allocation, however many use it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from kvconnect.backend import Closable, Closing, Registration
from kvconnect.errors import RegistrationError
from kvconnect.region import Region, register_all
from kvconnect.registrations import Registrations

_Place = tuple[int, int]


class Memory:
    """Registers regions on first use and unregisters them after the last.

    Invariant: what `table` knows is registered with the library, in the order given.
    """

    def __init__(
        self,
        owner: str,
        table: Registrations,
        register: Callable[[Region], Closable],
        most: int | None,
    ) -> None:
        """`register` returns what unregisters when closed; `most`: bytes of one region."""
        self._owner, self._table = owner, table
        self._register, self._most = register, most
        self._counts: Counter[_Place] = Counter()
        self._held: dict[_Place, Closable] = {}
        self._lock = threading.Lock()

    def add(self, regions: Sequence[Region]) -> Registration:
        """Register all regions or none; `RegistrationError` with the reason."""
        for region in regions:
            self._check(region)
        with self._lock:
            handle = self._table.add(regions)
            new = [region for region in regions if not self._counts[_place(region)]]
            try:
                register_all(new, self._hold, self._release)
            except BaseException:
                self._table.drop(regions)
                raise
            self._counts.update(map(_place, regions))
        return _Handle(self, handle)

    def _check(self, region: Region) -> None:
        if region.device != "cpu":
            raise RegistrationError(
                f"{self._owner}: {region} is on device {region.device!r}; host memory (cpu) is "
                f"moved: stage through a host buffer"
            )
        if self._most is not None and region.nbytes > self._most:
            raise RegistrationError(
                f"{self._owner}: {region} is larger than max_region_bytes={self._most} B; "
                f"register it in chunks of whole pages"
            )

    def _hold(self, region: Region) -> None:
        self._held[_place(region)] = self._register(region)

    def _release(self, region: Region) -> None:
        self._held.pop(_place(region)).close()

    def drop(self, regions: Sequence[Region]) -> None:
        """Count down; unregister, in reverse, what nobody uses any more."""
        with self._lock:
            self._counts.subtract(map(_place, regions))
            for region in reversed(regions):
                if self._counts[_place(region)] <= 0 and _place(region) in self._held:
                    del self._counts[_place(region)]
                    self._release(region)

    def close(self) -> None:
        """Unregister everything that is left."""
        with self._lock:
            held, self._held = self._held, {}
        for one in reversed(list(held.values())):
            one.close()


class _Handle(Closing):
    """One caller's share; closing it twice counts once."""

    def __init__(self, owner: Memory, handle: Registration) -> None:
        self.regions = handle.regions
        self._owner, self._handle = owner, handle
        self._released = False
        self._lock = threading.Lock()

    def close(self) -> None:
        """Give the regions back once transfers are quiet; `TransferTimeoutError` if not."""
        self._handle.close()
        with self._lock:
            released, self._released = self._released, True
        if not released:
            self._owner.drop(self.regions)

    def __repr__(self) -> str:
        return repr(self._handle)


def _place(region: Region) -> _Place:
    return (region.address, region.nbytes)
