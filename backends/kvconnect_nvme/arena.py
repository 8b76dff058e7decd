"""A store's own stock of reserved space, so that most puts need one transaction, not two.

Every index transaction waits for the disk. The stock is taken along with a reservation,
counted as held, and given back on close, when it does not fit, or by the sweep after a crash.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from itertools import accumulate
from pathlib import Path

from kvconnect.errors import TransferTimeoutError
from kvconnect_nvme.env import IndexEnv
from kvconnect_nvme.extents import Extent, joined
from kvconnect_nvme.index import Index
from kvconnect_nvme.owners import Owner, exclusive, sweep
from kvconnect_nvme.space import Reservation, Space
from kvconnect_nvme.tables import Session

MOST = 512 << 20
"""Bytes of stock at most, four batches of 128 MiB; also at most a 64th of the capacity."""


class Arena:
    """Extents that are held by this store and used by no put yet.

    Invariant: the stock and the extents handed out are exactly what `held` lists for `owner`.
    """

    def __init__(self, space: Space, env: IndexEnv, owner: Owner, lock: Path) -> None:
        """`owner`: holder of the space; `lock`: the store's open lock, for sweeping."""
        self._space, self._env, self._owner = space, env, owner.id
        self._owners, self._open_lock = owner.folder, lock
        self._stock: list[Extent] = []
        self._lock = threading.Lock()
        self.extra = min(MOST, space.capacity // 64) // 4096 * 4096

    def reserve(self, rooms: Sequence[int], keep: Collection[int] = ()) -> Reservation:
        """Return a place for each of `rooms` (bytes, whole blocks), from the stock or anew."""
        if not self._lock.acquire(timeout=self._env.timeout):
            raise TransferTimeoutError(
                f"nvme: no space was handed out for {self._env.timeout} s; a put before hangs"
            )
        try:
            got = self._from_stock(rooms) or self._refill(rooms, keep)
            if None in got.places and self._sweep():
                placed = zip(got.places, rooms, strict=True)
                back = [(place, room) for place, room in placed if place is not None]
                self._stock = joined([*self._stock, *back], self._space.slab_bytes)
                got = self._refill(rooms, keep)
            return got
        finally:
            self._lock.release()

    def _sweep(self) -> int:
        """Look for space of processes that died; return the bytes found."""
        try:
            with exclusive(self._open_lock, 0):
                return sweep(self._owners, self._env, self._space.slab_bytes)
        except TransferTimeoutError:
            return 0  # somebody is opening or sweeping the store right now

    def _from_stock(self, rooms: Sequence[int]) -> Reservation | None:
        need = sum(rooms)
        for i, (address, nbytes) in enumerate(self._stock):
            if nbytes >= need:
                rest = (address + need, nbytes - need)
                self._stock[i : i + 1] = [rest] if rest[1] else []
                return Reservation([*accumulate(rooms[:-1], initial=address)])
        return None

    def _refill(self, rooms: Sequence[int], keep: Collection[int]) -> Reservation:
        stock = list(self._stock)

        def change(session: Session) -> Reservation:
            # What is left of the stock goes back first: joined with its neighbours it may be
            # just what is needed.
            self._release(session, stock)
            return self._space.reserve(session, self._owner, rooms, keep=keep, extra=self.extra)

        got = self._env.write(change)
        self._stock = []
        if got.evicted and self._env.durability == "data":
            # A power cut may undo this commit, and the evicted would be back over the bytes of
            # their successors: wrong data where checksums are not looked at. If this fails, the
            # space stays held and is not written to.
            self._env.sync()
        self._stock = got.spare
        return got

    def _release(self, session: Session, extents: Sequence[Extent]) -> None:
        index = Index(session, self._space.slab_bytes)
        for address, nbytes in extents:
            index.unhold(self._owner, address, nbytes)
            index.free(address, nbytes)

    def give(self, extents: list[Extent]) -> None:
        """Take back what a put did not use; no transaction, so that it cannot fail."""
        with self._lock:
            self._stock = joined([*self._stock, *extents], self._space.slab_bytes)

    def drain(self) -> None:
        """Return the stock to free space."""
        with self._lock:
            stock = list(self._stock)
            if stock:
                self._env.write(lambda session: self._release(session, stock))
            self._stock = []
