"""`ObjectStore`: keys, bytes, checksums, pins, expiry and a capacity, under one lock.

Time comes from a clock that tests replace, so that expiry is tested without sleeping.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import xxhash

from kvconnect.backend import Status
from kvconnect.errors import ConfigError

MAX_RECORD_BYTES = 64 << 10


@dataclass(slots=True)
class StoredObject:
    """The bytes of one key; `expires` is a time of the store's clock, in seconds."""

    data: bytes
    checksum: int
    expires: float = math.inf
    pinned: bool = False


def checksum(key: str, data: bytes) -> int:
    """Return xxh3_64 of `data` seeded by `key`, so that two swapped objects both fail."""
    seed = xxhash.xxh3_64_intdigest(key.encode())
    return int(xxhash.xxh3_64_intdigest(data, seed=seed))


class ObjectStore:
    """Objects and records of one store.

    Invariants: `used` is the sum of the object sizes and never exceeds `capacity`; an expired
    object is not seen by anyone; pinned objects leave only by `remove`. `objects` is ordered
    from least to most recently used. Whoever reads and then acts holds `lock` for both.
    """

    def __init__(
        self, capacity: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`capacity`: payload bytes, None for no limit; `clock`: seconds that never go back."""
        self.capacity = capacity
        self.lock = threading.RLock()
        self.objects: dict[str, StoredObject] = {}
        self.used = 0
        self._clock = clock
        self._records: dict[str, bytes] = {}
        self._evicted = self._expired = 0

    def find(self, key: str) -> StoredObject | None:
        """Return the live object under `key`; one that has expired is dropped here."""
        with self.lock:
            found = self.objects.get(key)
            if found is None or self._clock() < found.expires:
                return found
            self._drop(key)
            self._expired += 1
            return None

    def expired(self, found: StoredObject) -> bool:
        """Tell whether an object that was found has run out of time since."""
        return self._clock() >= found.expires

    def touch(self, key: str) -> None:
        """Make `key` the most recently used."""
        with self.lock:
            self.objects[key] = self.objects.pop(key)

    def put(
        self,
        key: str,
        data: bytes,
        *,
        ttl: float | None = None,
        pin: bool = False,
        keep: Collection[str] = (),
    ) -> Status:
        """Store `data`, evicting others but those in `keep`; OK or NO_SPACE.

        Equal bytes are not written again: the later expiry counts and a pin stays. On
        NO_SPACE nothing has changed, not even an older object under this key.
        """
        expires = math.inf if ttl is None else self._clock() + ttl
        with self.lock:
            old = self.find(key)
            if old is not None and old.data == data:
                old.expires = max(old.expires, expires)
                old.pinned = old.pinned or pin
                self.touch(key)
                return Status.OK
            if not self._make_room(key, len(data) - (len(old.data) if old else 0), keep):
                return Status.NO_SPACE
            self._drop(key)
            self.objects[key] = StoredObject(data, checksum(key, data), expires, pin)
            self.used += len(data)
            return Status.OK

    def remove(self, key: str) -> bool:
        """Remove `key`; True if it was there."""
        with self.lock:
            return self.find(key) is not None and self._drop(key)

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Return the bytes under each key, None where there is no object."""
        with self.lock:
            found = [self.find(key) for key in keys]
        return [None if one is None else len(one.data) for one in found]

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with `prefix`, sorted."""
        with self.lock:
            named = [key for key in self.objects if key.startswith(prefix)]
            return sorted(key for key in named if self.find(key) is not None)

    def put_record(self, name: str, value: bytes) -> None:
        """Store or replace a record; `ConfigError` above 64 KiB."""
        if len(value) > MAX_RECORD_BYTES:
            raise ConfigError(
                f"memory: record {name!r} has {len(value)} B; at most {MAX_RECORD_BYTES} B are kept"
            )
        with self.lock:
            self._records[name] = bytes(value)

    def records(self) -> dict[str, bytes]:
        """Return a copy of all records."""
        with self.lock:
            return dict(self._records)

    def stats(self) -> dict[str, int | float | str]:
        """Return sizes (bytes) and counts."""
        with self.lock:
            return {
                "objects": len(self.objects),
                "bytes": self.used,
                "capacity": -1 if self.capacity is None else self.capacity,
                "pinned": sum(one.pinned for one in self.objects.values()),
                "evicted": self._evicted,
                "expired": self._expired,
            }

    def _make_room(self, key: str, more: int, keep: Collection[str]) -> bool:
        """Evict until `more` bytes fit; evict nothing when that would not be enough."""
        if self.capacity is None or self.used + more <= self.capacity:
            return True
        others = [k for k in self.objects if k != key and k not in keep]
        live = [k for k in others if self.find(k) is not None]  # the expired go first
        excess = self.used + more - self.capacity
        victims: list[str] = []
        for name in live:
            if excess > 0 and not self.objects[name].pinned:
                victims.append(name)
                excess -= len(self.objects[name].data)
        if excess > 0:
            return False
        for name in victims:
            self._drop(name)
        self._evicted += len(victims)
        return True

    def _drop(self, key: str) -> bool:
        gone = self.objects.pop(key, None)
        self.used -= len(gone.data) if gone else 0
        return gone is not None

    def __repr__(self) -> str:
        limit = "" if self.capacity is None else f" of {self.capacity}"
        return f"ObjectStore({len(self.objects)} objects, {self.used}{limit} B)"
