"""Caller memory registered with the library: once per allocation, checked by kvconnect itself.

Mooncake over TCP moves memory that was never registered, and hides until RDMA what is wrong.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from kvconnect.backend import Closing, Registration
from kvconnect.errors import RegistrationError
from kvconnect.region import Region, register_all
from kvconnect.registrations import Registrations

_Place = tuple[int, int]


class Memory:
    """Registers regions with the library on first use and unregisters after the last.

    Invariant: what `table` knows is registered with the library, in the order given.
    """

    def __init__(
        self,
        table: Registrations,
        register: Callable[[int, int], None],
        unregister: Callable[[int], None],
        most: int | None,
    ) -> None:
        """`register` and `unregister` are the library's; `most`: bytes of one region."""
        self.table = table
        self._register, self._unregister, self._most = register, unregister, most
        self._counts: Counter[_Place] = Counter()
        self._lock = threading.Lock()

    def add(self, regions: Sequence[Region]) -> Registration:
        """Register all regions or none; `RegistrationError` with the reason."""
        for region in regions:
            self._check(region)
        with self._lock:
            handle = self.table.add(regions)
            new = [region for region in regions if not self._counts[_place(region)]]
            try:
                register_all(new, lambda r: self._register(r.address, r.nbytes), self._release)
            except BaseException:
                self.table.drop(regions)
                raise
            self._counts.update(map(_place, regions))
        return _Handle(self, handle)

    def _check(self, region: Region) -> None:
        if region.device != "cpu":
            raise RegistrationError(
                f"mooncake: {region} is on device {region.device!r}; host memory (cpu) is moved: "
                f"stage through a host buffer"
            )
        if self._most is not None and region.nbytes > self._most:
            raise RegistrationError(
                f"mooncake: {region} is larger than max_region_bytes={self._most} B; register it "
                f"in chunks of whole pages, as the connector does"
            )

    def _release(self, region: Region) -> None:
        self._unregister(region.address)

    def drop(self, regions: Sequence[Region]) -> None:
        """Count down; unregister, in reverse, what nobody uses any more."""
        with self._lock:
            self._counts.subtract(map(_place, regions))
            for region in reversed(regions):
                if self._counts[_place(region)] <= 0:
                    del self._counts[_place(region)]
                    self._release(region)

    @property
    def nbytes(self) -> int:
        """Bytes registered now."""
        return sum(region.nbytes for region in self.table.regions)


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
