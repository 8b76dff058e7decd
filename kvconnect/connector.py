"""The connector: one rank's pool on one store, in pages.

`put`, `get`, `exists`, `remove`, `clear`, `why`. A hit means that every byte of every object
of the page was read, at exactly its size, under a key that fixes the bytes, in time. All else
is a miss with a reason, never an exception. What is raised are the caller's mistakes: indices
that are no pages, a closed connector, a page that a late transfer still holds.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvconnect.attach import as_pool, check_identity, register_pool
from kvconnect.backend import (
    Backend,
    Closing,
    Op,
    Outcome,
    Status,
    SupportsClear,
    SupportsDelete,
    SupportsRecords,
)
from kvconnect.config import Bytes, parse_options
from kvconnect.descriptors import Mode, Plan, describe
from kvconnect.errors import (
    BackendError,
    CapabilityError,
    ClosedError,
    ConfigError,
    TransferTimeoutError,
)
from kvconnect.explain import explain_identity
from kvconnect.identity import Identity, KeyMaker, as_hash
from kvconnect.metrics import Metrics
from kvconnect.mover import Mover
from kvconnect.negative import NegativeCache
from kvconnect.outcome import Hits, spread
from kvconnect.placement import Placement
from kvconnect.staging import StagingBuffer

log = logging.getLogger("kvconnect")

PageHash = bytes | str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions:
    """How a connector works; sizes in bytes, times in seconds."""

    want: str = "auto"
    object_layout: str = "native"
    tp_sizes: tuple[int, ...] = ()
    """All TP sizes that share pages; sets the head group."""
    head_group: int | None = None
    layer_chunk: int | None = None
    timeout: float = 30.0
    """Deadline of one call where the call gives none."""
    batch_bytes: Bytes = 256 << 20
    """Most bytes in one backend batch: bounds how long one step can take."""
    staging: Bytes = 256 << 20
    """Upper bound of the bounce buffer, where the plan needs one."""
    retries: int = 1
    negative_ttl: float = 5.0
    """How long a page that vanished between exists and get is taken for absent."""
    self_test: bool = True
    self_test_page: int | None = None
    """Page the self-test borrows and restores; the last one by default."""
    elect_writer: bool = True
    """Let one replica of each page store it; False stores from every replica."""

    def __post_init__(self) -> None:
        """Check ranges; `ConfigError` names the option."""
        for name in ("timeout", "batch_bytes", "staging"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} must be greater than 0 and finite"
                )
        for name in ("retries", "negative_ttl"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be at least 0")


def connector_options(**options: Any) -> ConnectorOptions:
    """Build the options; values may be text, and ``"False"`` is not true.

    Raises `ConfigError` on an unknown name, with close matches, and on a value that is wrong.
    """
    # These two are not of a type that text can have; `describe` checks what is in them.
    apart = {name: options.pop(name) for name in ("want", "tp_sizes") if name in options}
    parsed = parse_options(options, ConnectorOptions, "Connector")
    sizes = apart.get("tp_sizes", ())
    if not isinstance(sizes, (tuple, list)):
        raise ConfigError(f"Connector: tp_sizes={sizes!r} must be a list of ints")
    return dataclasses.replace(parsed, **apart | {"tp_sizes": tuple(sizes)})


class Connector(Closing):
    """One pool of one rank on one backend. Safe to use from many threads.

    The backend stays the caller's to close, after the connector. Registration happens once,
    here; attaching runs one put, exists, get, compare through a real page unless
    ``self_test=False``.
    """

    def __init__(
        self,
        pool: Any,
        placement: Placement,
        identity: Identity,
        backend: Backend,
        *,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> None:
        """Attach `pool` (a `Pool`, or an engine's host pool that `kvconnect.wrap` can read)."""
        self.options = connector_options(**options)
        self.pool = as_pool(pool)
        self.backend = backend
        check_identity(identity, self.pool, placement)
        self.plan: Plan = describe(
            self.pool,
            placement,
            backend.capabilities,
            self.options.want,
            object_layout=self.options.object_layout,
            tp_sizes=self.options.tp_sizes,
            head_group=self.options.head_group,
            layer_chunk=self.options.layer_chunk,
        )
        self.identity = dataclasses.replace(identity, object_layout=self.plan.signature)
        self.keys = KeyMaker(self.identity, self.plan.cells)
        self.metrics = Metrics()
        self._negative = NegativeCache(self.options.negative_ttl, clock)
        self._active, self._closing = 0, False
        self._changed = threading.Condition()
        self._attach(clock)

    def _attach(self, clock: Callable[[], float]) -> None:
        staging, most = None, self.backend.capabilities.max_region_bytes
        if self.plan.mode is Mode.STAGED:
            staging = StagingBuffer(self.plan, self.options.staging)
        self._staging = staging
        try:
            self._registration = register_pool(self.backend.register, self.pool, staging, most)
        except BaseException:
            if staging:
                staging.close()
            raise
        self._mover = Mover(
            self.plan,
            self.backend,
            staging,
            batch_bytes=self.options.batch_bytes,
            retries=self.options.retries,
            clock=clock,
        )
        try:
            self._introduce()
        except BaseException as error:
            try:
                self.close()
            except BackendError as left:
                error.add_note(f"detaching failed too: {left}")
            raise

    def _introduce(self) -> None:
        from kvconnect.selftest import self_test  # noqa: PLC0415 - only at attach

        if isinstance(self.backend, SupportsRecords):
            self.backend.put_record(f"identity/{self.identity.namespace}", self.identity.to_json())
        tested = self_test(self) if self.options.self_test else "self-test off"
        log.info(
            "kvconnect: %s on %s: %s, %d objects a page, namespace %s; %s",
            self.pool.label,
            self.backend.name,
            self.plan.mode.value,
            self.plan.objects,
            self.identity.namespace,
            tested,
        )

    def put(
        self,
        hashes: Sequence[PageHash],
        page_ids: Any,
        *,
        ttl: float | None = None,
        pin: bool = False,
        timeout: float | None = None,
    ) -> Outcome:
        """Store pages; one status per page, in order.

        `hashes` are prefix-chain hashes, `page_ids` as many pages of the pool. A page that a
        replica of this rank stores is NOT_WRITER here. OK means that these bytes are stored
        as safely as the backend promises. `ttl` in seconds; `pin` keeps pages until removed.
        """
        with self._working("put"):
            names = [as_hash(h) for h in hashes]
            ids = self._ids(names, page_ids)
            started = time.monotonic()
            mine = np.ones(len(names), dtype=np.bool_)
            if self.options.elect_writer and self.plan.placement.replicas > 1 and names:
                mine = self.plan.placement.writes(self.keys.turns(names))
            chosen = [name for name, take in zip(names, mine, strict=True) if take]
            keys = self.keys.keys(chosen)
            limit = self._limit(timeout)
            moved = self._mover.move(Op.STORE, keys, ids[mine], limit, ttl=ttl, pin=pin)
            self._negative.forget(n for n, ok in zip(chosen, moved.ok, strict=True) if ok)
            outcome = spread(moved, mine)
            self.metrics.observe("put", outcome, time.monotonic() - started)
            return outcome

    def get(
        self, hashes: Sequence[PageHash], page_ids: Any, *, timeout: float | None = None
    ) -> Outcome:
        """Load pages into the pool; one status per page, `dirty` where bytes may have changed."""
        with self._working("get"):
            names = [as_hash(h) for h in hashes]
            ids = self._ids(names, page_ids)
            started = time.monotonic()
            keys = self.keys.keys(names)
            outcome = self._mover.move(Op.LOAD, keys, ids, self._limit(timeout))
            gone = np.isin(outcome.status, (Status.ABSENT, Status.PARTIAL))
            vanished = self._negative.vanished(names[i] for i in np.flatnonzero(gone))
            self.metrics.add("get.absent_after_exists", vanished)
            self.metrics.observe("get", outcome, time.monotonic() - started)
            return outcome

    def exists(self, hashes: Sequence[PageHash]) -> Hits:
        """Tell which pages this rank could load: all objects present, at exactly their sizes.

        A store that cannot be asked has no hits; the failure is counted and logged once.
        """
        with self._working("exists"):
            names = [as_hash(h) for h in hashes]
            if not names:
                return Hits(np.zeros(0, dtype=np.bool_))
            sizes = self.plan.object_nbytes() * len(names)
            try:
                found = self.backend.exists(self.keys.keys(names), sizes)
            except BackendError as error:
                self._count_failure("exists", error)
                return Hits(np.zeros(len(names), dtype=np.bool_))
            if len(found) != len(sizes):
                self._count_failure("exists", f"{len(found)} answers for {len(sizes)} keys")
                return Hits(np.zeros(len(names), dtype=np.bool_))
            pages = np.asarray(found, dtype=np.bool_).reshape(len(names), -1).all(axis=1)
            hits = Hits(pages & ~self._negative.known(names))
            self._negative.saw(names[i] for i in np.flatnonzero(hits.pages))
            self.metrics.add("exists.calls")
            self.metrics.add("exists.pages", len(names))
            self.metrics.add("exists.hits", int(hits.pages.sum()))
            return hits

    def _count_failure(self, op: str, error: object) -> None:
        if not self.metrics.snapshot().get(f"{op}.backend_error"):
            log.warning("kvconnect: %s on %s fails: %s", op, self.backend.name, error)
        self.metrics.add(f"{op}.backend_error")

    def remove(self, hashes: Sequence[PageHash]) -> Hits:
        """Remove pages; True where at least one object of the page was there."""
        with self._working("remove"):
            if not isinstance(self.backend, SupportsDelete):
                raise CapabilityError(f"backend {self.backend.name!r} cannot remove keys")
            names = [as_hash(h) for h in hashes]
            if not names:
                return Hits(np.zeros(0, dtype=np.bool_))
            gone = self.backend.remove(self.keys.keys(names))
            rows = np.asarray(gone, dtype=np.bool_).reshape(len(names), -1)
            return Hits(np.asarray(rows.any(axis=1)))

    def clear(self) -> int:
        """Remove everything under this identity, and nothing else; return objects removed."""
        with self._working("clear"):
            if not isinstance(self.backend, SupportsClear):
                raise CapabilityError(f"backend {self.backend.name!r} cannot clear a namespace")
            return self.backend.clear(self.identity.namespace)

    def why(self, page_hash: PageHash) -> str:
        """Say in words why a page is or is not a hit: see `kvconnect.why`."""
        from kvconnect.why import why  # noqa: PLC0415 - text is not hot-path code

        with self._working("why"):
            return why(self, as_hash(page_hash))

    def explain(self) -> str:
        """Return plan and key record in words."""
        return f"{self.plan.explain()}\n{explain_identity(self.identity)}"

    def quarantined(self) -> list[int]:
        """Return page ids that transfers which timed out still hold; do not reuse these."""
        return self._mover.quarantined()

    def stats(self) -> dict[str, float]:
        """Return counters by reason, bytes and rates; see `kvconnect.metrics`."""
        values = self.metrics.snapshot()
        values["quarantined.pages"] = len(self.quarantined())
        values["staging.bytes"] = self._staging.region.nbytes if self._staging else 0
        return values

    def close(self, timeout: float | None = None) -> None:
        """Detach: refuse new calls, wait for those under way, unregister once.

        Raises `TransferTimeoutError` (and stays registered, so that it may be called again)
        while a transfer still holds memory after `timeout` seconds.
        """
        limit = self._limit(timeout)
        deadline = time.monotonic() + limit
        with self._changed:
            self._closing = True
            while self._active and time.monotonic() < deadline:
                self._changed.wait(max(deadline - time.monotonic(), 0.0))
            active = self._active
        if active or not self._mover.drain(max(deadline - time.monotonic(), 0.0)):
            raise TransferTimeoutError(
                f"close: {active} calls and {len(self._mover.quarantined())} pages are still in "
                f"flight after {limit:g} s; the pool must stay allocated, call close again"
            )
        self._registration.close()
        if self._staging:
            self._staging.close()

    def _limit(self, timeout: float | None) -> float:
        return self.options.timeout if timeout is None else timeout

    def _ids(self, names: Sequence[bytes], page_ids: Any) -> Any:
        ids = self.pool.check_page_ids(page_ids)
        if len(ids) != len(names):
            raise ConfigError(f"{len(names)} hashes for {len(ids)} page ids; give one for each")
        if len(set(names)) != len(names):
            twice = next(name for at, name in enumerate(names) if name in names[:at])
            raise ConfigError(f"page hash {twice!r} is given twice in one call; ask once for each")
        return ids

    @contextmanager
    def _working(self, what: str) -> Iterator[None]:
        with self._changed:
            if self._closing:
                raise ClosedError(f"{what} on a closed connector ({self.pool.label})")
            self._active += 1
        try:
            yield
        finally:
            with self._changed:
                self._active -= 1
                self._changed.notify_all()

    def __repr__(self) -> str:
        return (
            f"Connector({self.pool.label!r} on {self.backend.name}, {self.plan.mode.value}, "
            f"namespace {self.identity.namespace})"
        )
