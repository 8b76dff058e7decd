"""What the directory knows, and its rules: no I/O, a clock that is given.

A rank's entry is never overwritten by another key. With the same key a later start of the rank
replaces its own entry, an earlier one is refused: a process that was stopped and goes on must
not take the place of the one that followed it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec

from kvconnect.disagg.messages import Generation
from kvconnect.errors import CapacityError, ConfigError

MAX_ENTRIES = 1 << 16

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
RankCount = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank as it registers itself."""

    fleet: Name
    """The instance of the engine; the same on all its ranks."""
    name: Name
    ranks: RankCount
    """How many ranks the fleet has."""
    address: Annotated[str, msgspec.Meta(pattern="^(tcp|ipc)://.", max_length=300)]
    """Of the control channel."""
    public_key: Annotated[str, msgspec.Meta(pattern="^.{40}$")] | None
    generation: Generation
    started: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    """When this start of the rank began, in ns of the wall clock; orders its generations."""


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The wish to know the ranks of a fleet."""

    fleet: Name


class Answer(msgspec.Struct, frozen=True):
    """`entries` are there only once all `ranks` are; `ranks` is 0 for an unknown fleet."""

    have: int
    ranks: int
    entries: list[Entry]

    @property
    def complete(self) -> bool:
        """Whether every rank is there."""
        return 0 < self.ranks == self.have


class Registered(msgspec.Struct, frozen=True):
    """The entry is there for `ttl` seconds more."""

    ttl: float


@dataclass(slots=True)
class _Kept:
    entry: Entry
    until: float


class Table:
    """Entries by fleet and name. Safe to use from many threads."""

    def __init__(self, ttl: float, clock: Callable[[], float]) -> None:
        """Keep entries `ttl` seconds after their last registration."""
        self.ttl, self._clock = ttl, clock
        self._fleets: dict[str, dict[str, _Kept]] = {}
        self._lock = threading.Lock()

    def register(self, entry: Entry) -> Registered:
        """Add, refresh or replace an entry.

        Raises `ConfigError` naming both values where it contradicts what is there, and
        `CapacityError` when the directory is full.
        """
        with self._lock:
            self._forget_old()
            fleet = self._fleets.get(entry.fleet, {})
            known = fleet.get(entry.name)
            if known is not None:
                _check(known.entry, entry)
            elif sum(len(ranks) for ranks in self._fleets.values()) >= MAX_ENTRIES:
                raise CapacityError(f"the directory is full: {MAX_ENTRIES} ranks are registered")
            others = [kept.entry for name, kept in fleet.items() if name != entry.name]
            _check_count(others, entry)
            kept = _Kept(entry, self._clock() + self.ttl)
            self._fleets.setdefault(entry.fleet, {})[entry.name] = kept
            return Registered(self.ttl)

    def find(self, fleet: str) -> Answer:
        """Return all ranks of a fleet, or how many of them are there."""
        with self._lock:
            self._forget_old()
            kept = self._fleets.get(fleet, {})
            entries = [kept[name].entry for name in sorted(kept)]
            ranks = entries[0].ranks if entries else 0
            return Answer(len(entries), ranks, entries if len(entries) == ranks else [])

    def _forget_old(self) -> None:
        now = self._clock()
        for fleet, ranks in list(self._fleets.items()):
            for name in [name for name, kept in ranks.items() if kept.until <= now]:
                del ranks[name]
            if not ranks:
                del self._fleets[fleet]


def _check(known: Entry, entry: Entry) -> None:
    who = f"rank {entry.name!r} of fleet {entry.fleet!r}"
    if known.public_key != entry.public_key:
        raise ConfigError(
            f"{who} is registered with key {known.public_key}, this one has {entry.public_key}; "
            f"a rank is never overwritten by another key: give one of them another name, or wait "
            f"until the entry expires"
        )
    if known.generation != entry.generation and entry.started <= known.started:
        raise ConfigError(
            f"{who}: generation {entry.generation} started at {entry.started}, not after "
            f"generation {known.generation}, started at {known.started}, which is registered"
        )


def _check_count(others: list[Entry], entry: Entry) -> None:
    for other in others:
        if other.ranks != entry.ranks:
            raise ConfigError(
                f"fleet {entry.fleet!r} has {other.ranks} ranks by {other.name!r} and "
                f"{entry.ranks} by {entry.name!r}"
            )
    if len(others) >= entry.ranks:
        raise ConfigError(
            f"fleet {entry.fleet!r} is complete with {entry.ranks} ranks; {entry.name!r} is one "
            f"more"
        )
