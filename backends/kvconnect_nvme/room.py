"""Making room: grow by slabs while the capacity allows, then evict to the low watermark."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvconnect.errors import BackendError, CapacityError
from kvconnect_nvme.catalog import Catalog, Hold
from kvconnect_nvme.index import Index
from kvconnect_nvme.owner import Owner
from kvconnect_nvme.slabs import Slabs
from kvconnect_nvme.visited import Visited

log = logging.getLogger("kvconnect.nvme")


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a store may hold: `capacity` bytes, watermarks as fractions of it."""

    capacity: int
    high: float
    low: float
    evict: bool = True


class Room:
    """Holds room for objects; the one place that grows, evicts, and sweeps dead owners."""

    def __init__(
        self, index: Index, slabs: Slabs, owner: Owner, visited: Visited, limits: Limits
    ) -> None:
        """Serve one open store."""
        self.index, self.slabs, self.owner = index, slabs, owner
        self.visited, self.limits = visited, limits
        self.growth_error: str | None = None
        self._orphans: list[Hold] = []

    def give_back(self, holds: Sequence[Hold]) -> None:
        """Take back holds whose transaction failed; the next one that succeeds frees them."""
        self._orphans.extend(holds)

    def catalog(self, txn: Any) -> Catalog:
        """Return the catalog of a write transaction."""
        return Catalog(txn, self.index, self.slabs.slab_bytes)

    def hold(self, sizes: Sequence[int]) -> list[Hold] | None:
        """Hold room for objects of padded `sizes`; None where there is none.

        One transaction: what had to be evicted for it is gone in the same instant.
        """
        orphans, self._orphans = self._orphans, []

        def change(txn: Any) -> list[Hold] | None:
            catalog = self.catalog(txn)
            catalog.unhold(self.owner.id, orphans)
            for orphan in orphans:
                catalog.extents.release(orphan.address, orphan.nbytes)
            holds = self._make(catalog, sizes)
            catalog.done()
            return holds

        try:
            return self.index.update(change)
        except BaseException:
            self._orphans.extend(orphans)
            raise

    def sweep(self) -> int:
        """Return what dead owners held; bytes returned."""

        def change(txn: Any) -> tuple[int, list[bytes]]:
            catalog = self.catalog(txn)
            dead = self.owner.dead(catalog.holders())
            freed = sum(catalog.release_owner(owner) for owner in dead)
            catalog.done()
            return freed, dead

        freed, dead = self.index.update(change)
        for owner in dead:
            self.owner.bury(owner)
        if freed:
            log.info("nvme: %d B held by %d dead processes returned", freed, len(dead))
        return freed

    def _make(self, catalog: Catalog, sizes: Sequence[int]) -> list[Hold] | None:
        need, state = sum(sizes), catalog.state
        if max(sizes) > self.slabs.slab_bytes:
            return None
        if state.used + need > self.limits.capacity * self.limits.high:
            self._evict(catalog, need)
        if state.used + need > self.limits.capacity:
            return None
        while (holds := catalog.hold(self.owner.id, sizes)) is None:
            if not self._grow(catalog) and not self._defragment(catalog, sizes):
                return None
        return holds

    def _evict(self, catalog: Catalog, need: int) -> None:
        if not self.limits.evict:
            return
        target = self.limits.capacity * self.limits.low
        excess = int(catalog.state.used + need - target)
        catalog.evict(min(excess, catalog.state.used), self.visited.take)

    def _grow(self, catalog: Catalog) -> bool:
        """Add one slab; False where capacity or the file system allows none."""
        left = self.limits.capacity - catalog.state.total
        nbytes = min(self.slabs.slab_bytes, left) // 4096 * 4096
        if nbytes <= 0:
            return False
        try:
            self.slabs.create(catalog.state.slabs, nbytes)
        except (CapacityError, BackendError) as error:
            if str(error) != self.growth_error:
                log.warning("nvme: no further slab: %s", error)
            self.growth_error = str(error)
            return False
        self.growth_error = None
        catalog.add_slab(nbytes)
        return True

    def _defragment(self, catalog: Catalog, sizes: Sequence[int]) -> bool:
        """Evict neighbours until the hole that is missing exists; False if it cannot."""
        if not self.limits.evict:
            return False
        for size in (sum(sizes), max(sizes)):
            if size <= self.slabs.slab_bytes and catalog.extents.largest() < size:
                return catalog.evict_window(size)
        # Every single object has a hole, but not all of them together: free more.
        return catalog.evict(sum(sizes), self.visited.take) > 0
