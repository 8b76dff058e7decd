"""Memory registered with a library: once per allocation, however many use it.

Why it exists: libraries refuse the same memory twice, and cards refuse regions above a size
that only they know. Both are found out here, for stores and transports alike.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from kvconnect.backend import Closable, Closing, Registration
from kvconnect.errors import BackendError, RegionTooLargeError, RegistrationError
from kvconnect.region import Region, register_all
from kvconnect.registrations import Registrations

LEAST_REGION = 4096
"""Bytes. What is refused in one memory page is not refused for its size."""

_Place = tuple[int, int]


class Memory:
    """Registers regions on first use and unregisters them after the last.

    Invariant: what `table` knows is registered with the library, in the order given. `most`
    (bytes of one region, None while no limit is known) only falls.
    """

    def __init__(
        self,
        owner: str,
        table: Registrations,
        register: Callable[[Region], Closable],
        most: int | None,
    ) -> None:
        """`register` returns what unregisters when closed, or raises a `BackendError`."""
        self.most = most
        self._owner, self._table, self._register = owner, table, register
        self._counts: Counter[_Place] = Counter()
        self._held: dict[_Place, Closable] = {}
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes registered now."""
        return sum(region.nbytes for region in self._table.regions)

    def add(self, regions: Sequence[Region]) -> Registration:
        """Register all regions or none; `RegistrationError` with the reason.

        `RegionTooLargeError` where the reason is the size of one: how much the library takes is
        tried on that memory, and remembered.
        """
        for region in regions:
            self._check(region)
        with self._lock:
            handle = self._table.add(regions)
            new = [region for region in regions if not self._counts[_place(region)]]
            try:
                register_all(new, self._hold, self._release)
            except BaseException as error:
                self._table.drop(regions)
                if isinstance(error, RegistrationError):
                    self._probe(max(new, key=lambda region: region.nbytes), error)
                raise
            self._counts.update(map(_place, regions))
        return _Handle(self, handle)

    def _check(self, region: Region) -> None:
        if region.device != "cpu":
            raise RegistrationError(
                f"{self._owner}: {region} is on device {region.device!r}; host memory (cpu) is "
                f"moved: stage through a host buffer"
            )
        if self.most is not None and region.nbytes > self.most:
            raise RegionTooLargeError(
                f"{self._owner}: {region} is larger than max_region_bytes={self.most} B; "
                f"register it in chunks of whole pages",
                self.most,
            )

    def _probe(self, region: Region, error: RegistrationError) -> None:
        """Raise `RegionTooLargeError` if less of `region` is taken, nothing else being held.

        Powers of two, as cards have them, from above: no more is pinned than can stay.
        """
        if self._takes(region):
            return  # together they were too much, or another one is wrong: not its size
        nbytes = 1 << (region.nbytes - 1).bit_length() >> 1
        while nbytes >= LEAST_REGION:
            if self._takes(Region(region.name, region.address, nbytes)):
                self.most = nbytes
                raise RegionTooLargeError(
                    f"{self._owner}: {region} is refused, its first {nbytes} B are taken; "
                    f"register it in chunks of whole pages, or set max_region_bytes={nbytes}",
                    nbytes,
                ) from error
            nbytes //= 2

    def _takes(self, region: Region) -> bool:
        try:
            held = self._register(region)
        except BackendError:
            return False
        held.close()
        return True

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
