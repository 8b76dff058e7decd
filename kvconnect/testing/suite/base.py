"""What the parts of the suite share: hooks, differences between backends, and helpers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvconnect.backend import Backend, Batch, Op, Outcome, Status
from kvconnect.testing.memory import Objects, payload

WAIT = 30.0
"""Seconds any single transfer of the suite may take."""

F = TypeVar("F", bound=Callable[..., Any])


def needs(ability: str) -> Callable[[F], F]:
    """Mark a test as collected only where the class attribute `ability` is true."""

    def mark(test: F) -> F:
        test.__dict__["needs"] = ability
        return test

    return mark


def key(name: object, namespace: str = "suite") -> str:
    """Return a key shaped like kvconnect's: 16 hex characters of namespace, 48 of the rest."""
    head = hashlib.blake2b(namespace.encode(), digest_size=8).hexdigest()
    return head + hashlib.blake2b(str(name).encode(), digest_size=24).hexdigest()


def keys(count: int, namespace: str = "suite") -> list[str]:
    """Return `count` distinct keys of one namespace."""
    return [key(number, namespace) for number in range(count)]


def move(store: Backend, batch: Batch) -> Outcome:
    """Run a batch to its end and return the outcome, whose shape is checked.

    Registers nothing. Fails when the backend still holds the memory at the deadline.
    """
    transfer = store.submit(batch)
    outcome = transfer.wait(WAIT)
    assert transfer.done(), f"{transfer!r} was not done after {WAIT} s: {outcome}"
    assert len(outcome.status) == len(batch)
    confirmed = int(batch.object_nbytes()[outcome.status == Status.OK].sum())
    assert outcome.nbytes == confirmed, "bytes are confirmed for whole OK objects only"
    if batch.op is Op.LOAD:
        assert outcome.dirty is not None
        assert outcome.dirty.shape == (len(batch),)
        assert not (outcome.dirty & outcome.ok).any(), "a key that is OK is not dirty"
    return outcome


class SuiteBase:
    """Hooks and declared differences. A subclass sets what its backend can do."""

    multi_process = False
    """Two processes may have the store open at once; `peer` says how."""
    durable = False
    """Objects survive `close` and `open_store` on the same path."""
    corruptible = False
    """`corrupt` can damage an object without the store's own API."""
    bounded = False
    """`open_small` opens a store that holds about `small_bytes`."""
    small_bytes = 64 << 10
    """Capacity of the small store; a backend's own minimum may ask for more."""
    evicts_in_vain = False
    """A put that can never fit may evict other objects before it is refused."""
    expires = True
    """An object whose TTL has passed is not seen any more."""
    rounds = 1000
    """Rounds of the two-thread test."""
    many = 10_000
    """Keys of the large batch."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Drop the inherited tests that need what this backend does not declare."""
        super().__init_subclass__(**kwargs)
        marked: dict[str, Any] = {}
        for base in reversed(cls.__mro__[1:]):
            tests = {name: test for name, test in vars(base).items() if hasattr(test, "needs")}
            marked |= tests
        for name, test in marked.items():
            # Set either way: a base class may have dropped what this one declares.
            setattr(cls, name, test if getattr(cls, test.needs) else None)

    def open_store(self, path: Path) -> Backend:
        """Open the store that lives at `path` (an existing, empty directory at first)."""
        raise NotImplementedError

    def open_small(self, path: Path) -> Backend:
        """Open a store with room for about `small_bytes` of objects (`bounded`)."""
        raise NotImplementedError

    def peer(self, path: Path) -> tuple[str, str, dict[str, str]]:
        """Say how another process opens it: ``module:function``, location, options."""
        raise NotImplementedError

    def corrupt(self, store: Backend, path: Path, name: str, data: bytes) -> None:
        """Flip a byte of the object `name`, whose bytes are `data`, behind the store's back."""
        raise NotImplementedError

    def pass_time(self, store: Backend, seconds: float) -> None:  # noqa: ARG002
        """Let `seconds` of the store's clock go by; a fake clock need not sleep."""
        time.sleep(seconds)

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Backend]:
        """Yield an open, empty store."""
        with self.open_store(tmp_path) as store:
            yield store


def filled(runs: Sequence[Sequence[int]], names: Sequence[str], version: str = "") -> Objects:
    """Return memory for objects with these runs, filled with bytes that depend on their keys."""
    held = Objects(runs)
    for index, name in enumerate(names):
        held.write(index, content(name, held.sizes[index], version))
    return held


def content(name: str, nbytes: int, version: str = "") -> bytes:
    """Return the bytes that the suite stores under a key."""
    return payload(f"{version}:{name}", nbytes)


def put(store: Backend, names: Sequence[str], sizes: Sequence[int], version: str = "") -> Outcome:
    """Store one-run objects of `sizes` bytes under `names`."""
    held = filled([[size] for size in sizes], names, version)
    with store.register([held.region]):
        outcome = move(store, held.batch(Op.STORE, names))
    for index, name in enumerate(names):
        assert held.read(index) == content(name, sizes[index], version), (
            "a store changed its source"
        )
    held.check()
    return outcome


def get(store: Backend, names: Sequence[str], sizes: Sequence[int]) -> tuple[Outcome, Objects]:
    """Load into fresh one-run memory; returns the outcome and the memory, guards checked."""
    held = Objects([[size] for size in sizes])
    with store.register([held.region]):
        outcome = move(store, held.batch(Op.LOAD, names))
    check_loaded(outcome, held)
    return outcome, held


def check_loaded(outcome: Outcome, held: Objects) -> None:
    """Check what holds after every load: guards whole, clean misses untouched."""
    held.check()
    assert outcome.dirty is not None
    for index in range(len(outcome.status)):
        if outcome.status[index] != Status.OK and not outcome.dirty[index]:
            assert held.untouched(index), f"key {index} missed, said clean, yet bytes changed"


def expect(outcome: Outcome, *statuses: Status) -> None:
    """Check the status of every key."""
    got = [Status(int(value)).name for value in outcome.status]
    assert got == [status.name for status in statuses], dict(outcome.causes)


def stored(store: Backend, names: Sequence[str], sizes: Sequence[int], version: str = "") -> None:
    """Check that exactly these bytes come back under `names`."""
    outcome, held = get(store, names, sizes)
    expect(outcome, *[Status.OK] * len(names))
    for index, name in enumerate(names):
        assert held.read(index) == content(name, sizes[index], version)
