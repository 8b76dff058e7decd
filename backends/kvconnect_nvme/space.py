"""Reserving space for a batch: holes first, then a new slab, then eviction.

One transaction per call. The batch gets one extent where that is possible, so that its
objects are written by few large writes and read back by few large reads.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kvconnect_nvme import entry as codec
from kvconnect_nvme.extents import Extent
from kvconnect_nvme.index import Index
from kvconnect_nvme.options import Eviction
from kvconnect_nvme.slabs import Slabs
from kvconnect_nvme.tables import Session
from kvconnect_nvme.victims import Victims
from kvconnect_nvme.visited import Visited

log = logging.getLogger("kvconnect.nvme")


@dataclass(slots=True)
class Reservation:
    """What a batch got: an address per object or None, and what is left over.

    `causes` says why, by object. `evicted`: whether objects went for it.
    """

    places: list[int | None]
    evicted: bool = False
    spare: list[Extent] = field(default_factory=list)
    causes: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Space:
    """The rules of one open store: how much it may use, and who goes when it is full.

    `capacity`: bytes; `high`, `low`: bytes where eviction starts and stops.
    """

    capacity: int
    slab_bytes: int
    high: int
    low: int
    policy: Eviction
    slabs: Slabs
    visited: Visited

    @property
    def index_reserve(self) -> int:
        """Bytes of the file system left to the index when a slab is made."""
        return min(self.capacity // 64, 64 << 20) + (1 << 20)

    def reserve(
        self,
        session: Session,
        owner: int,
        rooms: Sequence[int],
        *,
        keep: Collection[int] = (),
        extra: int = 0,
    ) -> Reservation:
        """Hold an extent for each of `rooms` (bytes, whole blocks) on behalf of `owner`.

        `extra` bytes are taken along while there is plenty, as a stock for later batches.
        """
        return _Reserving(self, session, owner, rooms, keep).run(extra)

    def grow(self, index: Index) -> str:
        """Create or enlarge the next slab; return why not, or nothing if it worked."""
        have = dict(index.session.slabs())
        for number in range(-(-self.capacity // self.slab_bytes)):
            want = min(self.slab_bytes, self.capacity - number * self.slab_bytes)
            had = have.get(number, 0)
            if had >= want:
                continue
            try:
                self.slabs.grow(number, had, want, self.index_reserve)
            except OSError as error:
                log.warning("nvme: slab %d of %s: %s", number, self.slabs.path, error)
                return f"slab of {want} B could not be made ({error.strerror}); "
            index.session.set_slab(number, want)
            index.free(number * self.slab_bytes + had, want - had)
            return ""
        return f"capacity={self.capacity} B is used up; "


class _Reserving:
    """One call of `Space.reserve`."""

    def __init__(
        self,
        space: Space,
        session: Session,
        owner: int,
        rooms: Sequence[int],
        keep: Collection[int],
    ) -> None:
        self.space, self.rooms, self.owner = space, rooms, owner
        self.index = Index(session, space.slab_bytes)
        self.counters = session.counters
        now = codec.now_ms()
        self.victims = Victims(self.index, space.visited, space.policy, now, keep)
        self.out = Reservation([None] * len(rooms))
        self.smallest_refused = space.slab_bytes + 1
        self.why = f"larger than slab={space.slab_bytes} B; raise slab= (fixed at creation)"

    def run(self, extra: int) -> Reservation:
        total = sum(room for room in self.rooms if room <= self.space.slab_bytes)
        gone = self._gone()
        self._keep_watermark(min(total, self.space.capacity))
        if extra and self._used() + total + extra > self.space.high:
            extra = 0
        at = 0
        while at < len(self.rooms):
            at = self._next(at, extra)
        self.out.evicted = self._gone() > gone
        return self.out

    def _gone(self) -> int:
        return self.counters.evicted + self.counters.expired

    def _used(self) -> int:
        return self.counters.used + self.counters.held

    def _keep_watermark(self, need: int) -> None:
        space = self.space
        if self._used() + need > space.high:
            self.victims.make_room(max(space.low - need, 0), max(space.high - need, 0))

    def _next(self, at: int, extra: int) -> int:
        """Place objects from `at` on; return the first that is still to be placed."""
        room = self.rooms[at]
        if room >= self.smallest_refused or self._used() + room > self.space.capacity:
            self._refuse(at, self.why if room >= self.smallest_refused else "")
            return at + 1
        hole = self._hole(at, extra)
        if hole is None:
            self.smallest_refused = min(self.smallest_refused, room)
            self._refuse(at, self.why)
            return at + 1
        if self.victims.occupied(hole):
            # A damaged free list would have this object written over a live one. The space
            # is set aside; `verify` gives it back.
            log.error(
                "nvme: free space %s of %s is in use; run verify", hole, self.space.slabs.path
            )
            self.index.take(hole, hole[1])
            return at
        return self._fill(hole, at, extra)

    def _hole(self, at: int, extra: int) -> Extent | None:
        rest, room = min(sum(self.rooms[at:]), self.space.slab_bytes), self.rooms[at]
        for want in (rest + extra, rest) if extra else (rest,):
            if (hole := self.index.fit(want)) is not None:
                return hole
        self.why = self.space.grow(self.index)
        if not self.why:
            return self._hole(at, extra)
        hole = self.index.largest()
        if hole is not None and hole[1] >= room:
            return hole
        slabs = dict(self.index.session.slabs())
        return self.victims.window(room, slabs, self.space.slab_bytes)

    def _fill(self, hole: Extent, at: int, extra: int) -> int:
        last, need = at, 0
        while last < len(self.rooms):
            room = self.rooms[last]
            fits = need + room <= hole[1] and self._used() + need + room <= self.space.capacity
            if room >= self.smallest_refused or not fits:
                break
            self.out.places[last] = hole[0] + need
            need += room
            last += 1
        stock = min(extra, hole[1] - need) if last == len(self.rooms) else 0
        taken = self.index.take(hole, need + stock)
        self.index.hold(self.owner, taken)
        if stock:
            self.out.spare.append((taken[0] + need, stock))
        return last

    def _refuse(self, at: int, why: str) -> None:
        counters = self.counters
        self.out.causes[at] = (
            f"{self.rooms[at]} B do not fit: {why or 'above capacity; '}"
            f"capacity={self.space.capacity} B, {counters.used} B used, {counters.held} B "
            f"reserved, {counters.pinned} of {counters.objects} objects pinned"
        )
