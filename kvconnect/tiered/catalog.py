"""Removing, listing, clearing, records and statistics over all tiers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import (
    SupportsClear,
    SupportsDelete,
    SupportsListing,
    SupportsRecords,
    SupportsStats,
)
from kvconnect.errors import TransferTimeoutError, UnavailableError
from kvconnect.store_front import need_prefix
from kvconnect.tiered.core import Core
from kvconnect.tiered.tier import Tier


class Catalog:
    """The optional protocols of a tiered store; it has those that all tiers have."""

    def __init__(self, core: Core, check_open: Callable[[str], None]) -> None:
        """`check_open` raises `ClosedError` after close."""
        self._core, self._check_open = core, check_open

    def offered(self) -> dict[str, Callable[..., object]]:
        """Return the methods that every tier can back."""
        backends = [tier.backend for tier in self._core.tiers]
        groups: list[tuple[type, dict[str, Callable[..., object]]]] = [
            (SupportsDelete, {"remove": self.remove}),
            (SupportsListing, {"list_keys": self.list_keys}),
            (SupportsClear, {"clear": self.clear}),
            (SupportsRecords, {"put_record": self.put_record, "records": self.records}),
        ]
        methods: dict[str, Callable[..., object]] = {"stats": self.stats}
        for protocol, named in groups:
            if all(isinstance(backend, protocol) for backend in backends):
                methods |= named
        return methods

    def remove(self, keys: Sequence[str]) -> NDArray[np.bool_]:
        """Remove keys from all tiers; True where one had it: (keys,) bool.

        Raises `UnavailableError` if a tier could not be asked: this process sees the key no
        more, others may once that tier is back.
        """
        self._check_open("remove")
        removed, missed = np.zeros(len(keys), dtype=np.bool_), []
        with self._changing(keys):
            self._core.writeback.discard(keys)
            for tier in self._core.tiers:
                tier.stale.note(keys)
                gone = tier.ask(lambda tier=tier: _deletes(tier).remove(keys))  # type: ignore[misc]
                if gone is None:
                    missed.append(tier.label)
                else:
                    tier.stale.forget(keys)
                    removed |= gone
        if missed:
            raise _unavailable(f"remove of {len(keys)} keys", missed)
        return removed

    @contextmanager
    def _changing(self, keys: Sequence[str]) -> Iterator[None]:
        until = time.monotonic() + self._core.options.timeout
        if not self._core.ledger.begin_change(keys, until):
            raise TransferTimeoutError(
                f"tiered: remove of {len(keys)} keys waited {self._core.options.timeout} s for a "
                f"store or copy of one of them; try again"
            )
        try:
            yield
        finally:
            self._core.ledger.end_change(keys)

    def list_keys(self, prefix: str = "") -> list[str]:
        """Return the keys of all tiers that begin with `prefix`, sorted, each once.

        Raises `UnavailableError` if a tier cannot be asked: a shorter list would be wrong.
        """
        self._check_open("list_keys")
        found: set[str] = set()
        missed = []
        for tier in self._core.tiers:
            keys = tier.ask(lambda tier=tier: _lists(tier).list_keys(prefix))  # type: ignore[misc]
            if keys is None:
                missed.append(tier.label)
                continue
            stale = tier.stale.knows(keys)
            found.update(key for key, old in zip(keys, stale.tolist(), strict=True) if not old)
        if missed:
            raise _unavailable("list_keys", missed)
        return sorted(found)

    def clear(self, prefix: str) -> int:
        """Remove all keys that begin with `prefix` from all tiers; return how many.

        Raises `ConfigError` if it is empty, `UnavailableError` if a tier could not be asked.
        """
        self._check_open("clear")
        need_prefix("tiered", prefix)
        core, counts, missed = self._core, [], []
        if not core.ledger.begin_clear(prefix, time.monotonic() + core.options.timeout):
            raise TransferTimeoutError(
                f"tiered: clear of {prefix!r} waited {core.options.timeout} s for stores and "
                f"copies under way; try again"
            )
        try:
            core.writeback.discard_prefix(prefix)
            named = self._named(prefix)
            for tier in core.tiers:
                count = tier.ask(lambda tier=tier: _clears(tier).clear(prefix))  # type: ignore[misc]
                if count is None:
                    missed.append(tier.label)
                    tier.stale.note(named)
                else:
                    counts.append(count)
                    tier.stale.clear(prefix)
        finally:
            core.ledger.end_clear(prefix)
        if missed:
            raise _unavailable(f"clear of {prefix!r}", missed)
        return max(len(named), *counts)

    def _named(self, prefix: str) -> set[str]:
        """Return what the tiers that can be asked have under `prefix`, each key once."""
        found: set[str] = set()
        for tier in self._core.tiers:
            if isinstance(tier.backend, SupportsListing):
                lists = tier.backend.list_keys
                found.update(tier.ask(lambda lists=lists: lists(prefix)) or ())  # type: ignore[misc]
        return found

    def put_record(self, name: str, value: bytes) -> None:
        """Store a record in every tier that can be asked; `UnavailableError` if none can."""
        self._check_open("put_record")
        done = []
        for tier in self._core.tiers:

            def call(tier: Tier = tier) -> bool:
                _keeps(tier).put_record(name, value)
                return True

            done.append(tier.ask(call))
        if not any(done):
            raise _unavailable(f"put_record of {name!r}", [t.label for t in self._core.tiers])

    def records(self) -> dict[str, bytes]:
        """Return the records of all tiers that can be asked; the fastest one's word counts."""
        self._check_open("records")
        found: dict[str, bytes] = {}
        answers = [
            tier.ask(lambda tier=tier: _keeps(tier).records())  # type: ignore[misc]
            for tier in self._core.tiers
        ]
        for answer in reversed([a for a in answers if a is not None]):
            found |= answer
        if all(answer is None for answer in answers):
            raise _unavailable("records", [t.label for t in self._core.tiers])
        return found

    def stats(self) -> dict[str, int | float | str]:
        """Return the store's own counters, and each tier's under ``tierN_``."""
        self._check_open("stats")
        core = self._core
        numbers: dict[str, int | float | str] = {
            "promote_waiting": core.promoter.waiting,
            "promoted": core.promoter.promoted,
            "promote_skipped": core.promoter.skipped,
            "promote_failed": core.promoter.failed,
            "queue_entries": core.writeback.entries,
            "queue_bytes": core.writeback.nbytes,
            "late_transfers": len(core.late),
        }
        numbers |= {f"write_back_{k}": v for k, v in core.writeback.counts.items()}
        for tier in core.tiers:
            numbers |= {f"tier{tier.number}_{name}": v for name, v in _about(tier).items()}
        return numbers


def _about(tier: Tier) -> dict[str, int | float | str]:
    circuit = tier.circuit
    numbers: dict[str, int | float | str] = {
        "name": tier.backend.name,
        "state": "failing" if circuit.is_open else "in use",
        "failures": circuit.failures,
        "outages": circuit.outages,
        "not_asked": circuit.skipped,
        "loaded_keys": tier.loaded,
        "stored_keys": tier.stored,
        "taken_for_absent": len(tier.absent),
        "out_of_date": len(tier.stale),
        "out_of_date_forgotten": tier.stale.lost,
    }
    backend = tier.backend
    if isinstance(backend, SupportsStats):
        numbers |= {f"store_{k}": v for k, v in (tier.ask(backend.stats) or {}).items()}
    return numbers


def _deletes(tier: Tier) -> SupportsDelete:
    assert isinstance(tier.backend, SupportsDelete)
    return tier.backend


def _lists(tier: Tier) -> SupportsListing:
    assert isinstance(tier.backend, SupportsListing)
    return tier.backend


def _clears(tier: Tier) -> SupportsClear:
    assert isinstance(tier.backend, SupportsClear)
    return tier.backend


def _keeps(tier: Tier) -> SupportsRecords:
    assert isinstance(tier.backend, SupportsRecords)
    return tier.backend


def _unavailable(what: str, missed: Sequence[str]) -> UnavailableError:
    return UnavailableError(
        f"tiered: {what} did not reach {', '.join(missed)}; repeat it when that tier answers"
    )
