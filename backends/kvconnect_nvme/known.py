"""Memory an engine knows: each allocation once, however many callers registered it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvconnect.backend import Closable, Closing, Registration
from kvconnect.region import Region, register_all

_Place = tuple[int, int, str]


class Known:
    """Counts the holders of each allocation; the engine hears of the first and the last."""

    def __init__(self, register: Callable[[Region], Closable]) -> None:
        """`register` makes one region known to the engine until what it returns is closed."""
        self._register = register
        self._held: dict[_Place, tuple[Closable, int]] = {}
        self._lock = threading.Lock()

    def add(self, regions: Sequence[Region]) -> None:
        """Count all regions up, or none and raise `RegistrationError`."""
        register_all(regions, self._up, self._down)

    def drop(self, regions: Sequence[Region]) -> None:
        """Count the regions down; nothing may move to or from them any more."""
        for region in regions:
            self._down(region)

    def _up(self, region: Region) -> None:
        place = (region.address, region.nbytes, region.device)
        with self._lock:
            handle, count = self._held.get(place, (None, 0))
            self._held[place] = (handle or self._register(region), count + 1)

    def _down(self, region: Region) -> None:
        place = (region.address, region.nbytes, region.device)
        with self._lock:
            handle, count = self._held.pop(place)
            if count > 1:
                self._held[place] = (handle, count - 1)
            else:
                handle.close()


class KnownRegistration(Closing):
    """A caller's registration that also counts with the engine."""

    def __init__(self, inner: Registration, known: Known) -> None:
        """`known` has counted the regions of `inner` up already."""
        self._inner, self._known = inner, known
        self._dropped = False
        self._lock = threading.Lock()

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions as registered."""
        return self._inner.regions

    def close(self) -> None:
        """Give the regions back once transfers are quiet; `TransferTimeoutError` if not."""
        # Raises while one is not: the engine then still knows the memory. Close again later.
        self._inner.close()
        with self._lock:
            dropped, self._dropped = self._dropped, True
        if not dropped:
            self._known.drop(self.regions)

    def __repr__(self) -> str:
        return repr(self._inner)


_: type[Registration] = KnownRegistration
