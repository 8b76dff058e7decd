"""One host pool of SGLang on the store: what KV and every side pool have in common.

`attach` is the single way from a host pool to a connector: read the pool, derive identity and
placement, plan, register, self-test. It raises typed errors and leaves nothing behind.
`Attached` speaks SGLang's language (page hashes and token indices, one truth value per key)
and raises nothing on the data path: SGLang would log a trace for every batch.
"""

# ruff: noqa: BLE001 - what a store raises against its contract is a miss like any other

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Backend, Closing, Outcome, Status
from kvconnect.connector import Connector
from kvconnect.engines.sglang.duplicates import rounds_of
from kvconnect.engines.sglang.identity import KV, Identified, identify
from kvconnect.engines.sglang.model_facts import ModelFacts
from kvconnect.engines.sglang.notices import Notices
from kvconnect.engines.sglang.options import Options
from kvconnect.errors import KVConnectError, PageIndexError, TransferTimeoutError
from kvconnect.explain import size
from kvconnect.foreign import wrap
from kvconnect.page_index import token_pages
from kvconnect.pool import U64, Pool
from kvconnect.selftest import self_test

log = logging.getLogger("kvconnect.sglang")

Bools = NDArray[np.bool_]

QUIET_STEP = 0.002
"""Seconds between two looks whether a late transfer has let go of its pages."""

SILENT = (Status.OK, Status.ABSENT, Status.PARTIAL, Status.NOT_WRITER)
"""What is no fault: stored, loaded, not there, or the duty of another replica."""


@dataclass(frozen=True, slots=True)
class Context:
    """What all pools of one attach share; `backend` is open, and its owner closes it last."""

    backend: Backend
    options: Options
    storage_config: Any
    """SGLang's HiCacheStorageConfig: ranks, sizes and the model's served name."""
    facts: ModelFacts
    in_use: threading.Event = field(default_factory=threading.Event)
    """Set once requests may use the pools: from then on a page must be borrowed to test it."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What a call did: `ok` is (keys,) bool in the order asked, `nbytes` the bytes it moved."""

    ok: Bools
    nbytes: int


def attach(host_pool: Any, name: str, context: Context) -> Attached:
    """Attach `host_pool` under the pool name `name` (SGLang's PoolName value, "kv" the anchor).

    Raises `KVConnectError` (layout, identity, registration, a failed self-test) with nothing
    left registered.
    """
    options = context.options
    pool = wrap(host_pool, name)
    found = identify(pool, host_pool, name, context.storage_config, options, context.facts)
    with _test_page(host_pool, pool, name, context) as page:
        connector = connect(pool, found, context, page)
    return announced(Attached(name, connector, options, _attributes(host_pool)), found)


def _attributes(host_pool: Any) -> dict[str, Any]:
    return dict(getattr(host_pool, "__dict__", {}))


@contextmanager
def _test_page(host_pool: Any, pool: Pool, name: str, context: Context) -> Iterator[int | None]:
    """Give a page that the self-test may write, None where there is none.

    The engine's own allocator must give it away: bytes that are put back a moment later are
    wrong if a copy from the GPU came in between, and a load that outlasts a failed test writes
    them at any time. Of side pools only the anchor's allocator is known to rule, or their own,
    so that they are tested before requests come, and not later.
    """
    lends = name == KV and hasattr(host_pool, "alloc")
    if not context.options.self_test or (context.in_use.is_set() and not lends):
        yield None
    elif not lends:
        try:
            yield pool.pages - 1
        finally:
            _wait_until_let_go(host_pool, name)
    elif (taken := host_pool.alloc(pool.index_step or pool.page_size)) is None:
        yield None
    else:
        page = int(pool.page_ids(taken)[0])
        try:
            yield page
        finally:
            if is_held(host_pool, page):
                log.error("kvconnect: page %d of pool %s is lost: the store holds it", page, name)
            else:
                host_pool.free(taken)


def _wait_until_let_go(host_pool: Any, name: str) -> None:
    """Hold on to a pool whose test may still write: its page is anybody's once requests come."""
    for connector in [one for one in _held if one.pool.owner is host_pool]:
        while connector in _held:
            try:
                connector.close()
                _held.remove(connector)
            except TransferTimeoutError as error:
                log.warning("kvconnect: pool %s: %s", name, error)


def connect(pool: Pool, found: Identified, context: Context, test_page: int | None) -> Connector:
    """Make the connector of a pool as `identify` found it; None leaves the self-test out.

    Where it raises, `is_held` says whether the store still holds memory of the pool's owner.
    """
    options = context.options
    connector = Connector(
        pool,
        found.placement,
        found.identity,
        context.backend,
        # A mode that is forced is meant for the anchor; side pools have shapes of their own.
        want=options.want if found.identity.pool == KV else "auto",
        object_layout=found.object_layout,
        tp_sizes=found.tp_sizes,
        head_group=found.head_group,
        layer_chunk=found.layer_chunk,
        timeout=options.timeout,
        batch_bytes=options.batch_bytes,
        staging=options.staging,
        retries=options.retries,
        negative_ttl=options.negative_ttl,
        self_test=False,
        self_test_page=test_page,
        elect_writer=found.elect_writer,
    )
    if test_page is not None:
        _test(connector)
    return connector


def _test(connector: Connector) -> None:
    try:
        said = self_test(connector)
    except BaseException as error:
        try:
            connector.close()
        except KVConnectError as left:
            _held.append(connector)
            error.add_note(f"detaching failed too: {left}")
        raise
    log.info("kvconnect: pool %s: %s", connector.pool.label, said)


_held: list[Connector] = []
"""Connectors that could not be closed: what they keep alive may be written at any time."""


def is_held(owner: Any, page: int | None = None) -> bool:
    """Tell whether a failed attach left a transfer that still holds memory of `owner`.

    With `page`, whether it is that page.
    """
    for connector in list(_held):
        with suppress(TransferTimeoutError):
            connector.close(0)
            _held.remove(connector)
    of_owner = [one for one in _held if one.pool.owner is owner]
    return any(page in {None, one.options.self_test_page} for one in of_owner)


def announced(attached: Attached, found: Identified) -> Attached:
    """Log what was attached, in one line, and what its operator should know; return it."""
    for warning in found.warnings:
        log.warning("kvconnect: pool %s: %s", attached.name, warning)
    log.info("kvconnect: %s", attached.summary())
    return attached


class Attached(Closing):
    """One host pool on the store; safe to use from SGLang's threads at once.

    A call that ran out of time does not return before the store has let go of its pages:
    SGLang hands pages to other requests as soon as a call is over, and a transfer that is
    still under way would then write, or store, what is another request's by now.
    """

    def __init__(
        self, name: str, connector: Connector, options: Options, memory: object = None
    ) -> None:
        """Take over `connector`, which is closed with this object; `memory` is kept until then.

        On its way out SGLang lets go of a pool's buffers while its storage threads still store
        pages from them.
        """
        self.name = name
        self._memory = memory
        self.connector = connector
        self._options = options
        self._notices = Notices(f"pool {name} on {connector.backend.name}")

    @property
    def pool(self) -> Pool:
        """The pool as kvconnect sees it."""
        return self.connector.pool

    @property
    def page_nbytes(self) -> int:
        """Bytes stored for one page."""
        return self.connector.plan.page_nbytes

    def exists(self, keys: Sequence[str]) -> Bools:
        """Tell which pages could be loaded: (keys,) bool. A store that fails has none."""
        try:
            return self.connector.exists(keys).pages
        except Exception as error:
            self._failed("exists", error)
            return np.zeros(len(keys), dtype=np.bool_)

    def get(self, keys: Sequence[str], host_indices: Any) -> Moved:
        """Load pages into the token slots `host_indices`, (keys * page_size,) int64.

        A list that is not whole pages inside the pool, one for each key, means that the
        engine's own books are wrong: nothing of it is trusted, and no byte moves.
        """
        return self._move("get", self.connector.get, keys, host_indices, every_page=True)

    def set(self, keys: Sequence[str], host_indices: Any) -> Moved:
        """Store the pages in the token slots `host_indices`; arguments as for `get`.

        `ok` is true as well where another replica of this rank stores the page.
        """
        return self._move("set", self._put, keys, host_indices, every_page=False)

    def _put(self, keys: Sequence[str], ids: U64) -> Outcome:
        return self.connector.put(keys, ids, ttl=self._options.ttl)

    def _move(
        self,
        what: str,
        call: Callable[[Sequence[str], U64], Outcome],
        keys: Sequence[str],
        host_indices: Any,
        *,
        every_page: bool,
    ) -> Moved:
        ok, nbytes = np.zeros(len(keys), dtype=np.bool_), 0
        try:
            ids = self._page_ids(keys, host_indices)
            if len(set(keys)) == len(keys):
                outcome = self._settled(what, call, keys, ids)
                return Moved(_served(outcome), outcome.nbytes)
            parts = rounds_of(keys, ids.tolist(), every_page=every_page)
            each = [np.array(places, dtype=np.intp) for places in parts.rounds]
            # Over all rounds no page may be named twice: a later one would overwrite it.
            self.pool.check_page_ids(ids[np.concatenate(each)].astype(np.int64))
            for places in each:
                outcome = self._settled(what, call, [keys[i] for i in places], ids[places])
                ok[places] = _served(outcome)
                nbytes += outcome.nbytes
        except Exception as error:
            self._failed(what, error)
            return Moved(np.zeros(len(keys), dtype=np.bool_), 0)
        for place, earlier in parts.same_as.items():
            ok[place] = ok[earlier]
        return Moved(ok, nbytes)

    def _page_ids(self, keys: Sequence[str], host_indices: Any) -> U64:
        pool = self.pool
        ids = token_pages(host_indices, pool.index_step or pool.page_size)
        if len(ids) != len(keys):
            raise PageIndexError(
                f"{len(keys)} keys for {len(ids)} pages of {pool.page_size} token slots"
            )
        if pool.translate is not None:
            ids = pool.translate(ids)
        return ids.view(np.uint64)

    def _settled(
        self,
        what: str,
        call: Callable[[Sequence[str], U64], Outcome],
        keys: Sequence[str],
        ids: U64,
    ) -> Outcome:
        try:
            outcome = call(keys, ids)
        finally:
            self._wait_until_quiet(what, ids)
        self._report(what, outcome)
        return outcome

    def _wait_until_quiet(self, what: str, ids: U64) -> None:
        """Hold on to pages that a late transfer may still touch.

        The one wait without a deadline: giving up would hand the pages to other requests.
        It ends when the store answers or fails, and is reported as long as it lasts.
        """
        started = time.monotonic()
        while held := self._held_of(ids):
            self._notices.say(
                "late",
                f"{what}: {len(held)} pages are held back, {time.monotonic() - started:.1f} s "
                f"after the deadline of {self._options.timeout:g} s; the store has not let go "
                f"of their memory",
            )
            time.sleep(QUIET_STEP)

    def _held_of(self, ids: U64) -> frozenset[int]:
        late = self.connector.quarantined()
        return frozenset(late).intersection(ids.tolist() if late else ())

    def _report(self, what: str, outcome: Outcome) -> None:
        for status in np.unique(outcome.status).tolist():
            if status not in SILENT:
                places = np.flatnonzero(outcome.status == status)
                cause = next(
                    (outcome.causes[i] for i in places.tolist() if i in outcome.causes), ""
                )
                self._notices.say(
                    f"{what} {status}",
                    f"{what}: {len(places)} of {len(outcome.status)} pages "
                    f"{Status(status).name}{': ' if cause else ''}{cause}",
                )

    def _failed(self, what: str, error: Exception) -> None:
        self.connector.metrics.add(f"{what}.refused")
        words = error if isinstance(error, KVConnectError) else repr(error)
        self._notices.say(f"{what} {type(error).__name__}", f"{what} refused: {words}")

    def clear(self) -> int:
        """Remove every page of this identity, and nothing else; return objects removed."""
        return self.connector.clear()

    def stats(self) -> dict[str, float]:
        """Return the connector's counters."""
        return self.connector.stats()

    def explain(self) -> str:
        """Return pool, plan and key record in words."""
        return self.connector.explain()

    def summary(self) -> str:
        """Return one line: what is stored, how, and under which namespace."""
        plan, pool = self.connector.plan, self.pool
        return (
            f"pool {self.name} on {self.connector.backend.name}: {pool.pages} pages of "
            f"{pool.page_size} tokens, {size(plan.page_nbytes)} each in {plan.objects} objects, "
            f"layers {plan.placement.layers}, heads {plan.placement.heads}, {pool.dtype}, "
            f"{plan.mode.value}, {plan.object_layout} order, weights "
            f"{self.connector.identity.weights!r}, namespace {self.connector.identity.namespace}"
        )

    def close(self, timeout: float | None = None) -> None:
        """Detach the pool; `TransferTimeoutError` (call again) while pages are in flight."""
        self.connector.close(timeout)
        self._memory = None

    def __repr__(self) -> str:
        return f"Attached({self.name!r}, {self.connector!r})"


def _served(outcome: Outcome) -> Bools:
    return np.asarray(outcome.ok | (outcome.status == Status.NOT_WRITER))
