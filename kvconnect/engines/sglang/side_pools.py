"""Side pools: what SGLang keeps beside KV, and its v2 calls on them.

Sliding-window KV, Mamba states, sparse indexes, draft KV, the parts of DeepSeek-V4: each is a
host pool of its own on the same store, under its own identity. A prefix can be restored only
where every gating pool allows it, so the answer to a query is a set of lengths
(`kvconnect.engines.sglang.hits`).

SGLang does not roll back when one of these is refused, and takes a pool that a result leaves
out for one that has everything. So nothing here raises on registration or on the data path,
and every transfer gets its answer: a pool that cannot be served has no hits.
"""

# ruff: noqa: BLE001 - one failing pool, whatever fails in it, must not fail the others

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sglang.srt.mem_cache.hicache_storage import PoolTransfer, PoolTransferResult

from kvconnect.backend import Closing
from kvconnect.engines.sglang.attached import Attached, Bools, Context, attach
from kvconnect.engines.sglang.hits import ALL_PAGES, BLOCK_GROUPS, Side, joint
from kvconnect.engines.sglang.identity import KV, MAMBA
from kvconnect.engines.sglang.notices import Notices
from kvconnect.errors import ClosedError, ConfigError, KVConnectError, PageIndexError
from kvconnect.outcome import Hits

log = logging.getLogger("kvconnect.sglang")


class SidePools(Closing):
    """The side pools of one rank, by name; safe to use from SGLang's threads at once.

    A name is served by one pool or refused; a refused one is logged once with its reason, and
    from then on it has no hits and nothing of it is stored.
    """

    def __init__(self, context: Context) -> None:
        """Start without pools; `context` is shared with the anchor."""
        self._context = context
        self._pools: dict[str, Attached] = {}
        self._refused: dict[str, str] = {}
        self._notices = Notices("side pools")
        self._closed = False

    @property
    def refused(self) -> dict[str, str]:
        """The pools that cannot be served, each with its reason."""
        return dict(self._refused)

    def register(self, name: str, host_pool: Any) -> None:
        """Attach `host_pool` under the pool name `name`; never raises.

        The same pool may be given again. Another one under a name that is taken ends the
        serving of that name: SGLang's indices would be those of the new pool.
        """
        try:
            if self._is_new(name, host_pool):
                self._pools[name] = attach(host_pool, name, self._context)
                self._warn_if_nobody_stores(name)
        except Exception as error:
            self._refuse(name, error)

    def _refuse(self, name: str, error: Exception) -> None:
        self._refused[name] = str(error)
        # A refusal says all there is to say; what nobody meant to raise needs its trace.
        trace = None if isinstance(error, KVConnectError) else error
        log.error(
            "kvconnect: pool %s is not served (no hits, nothing stored): %s",
            name,
            error,
            exc_info=trace,
        )

    def _is_new(self, name: str, host_pool: Any) -> bool:
        if self._closed:
            raise ClosedError("the side pools are closed")
        known = self._pools.get(name)
        if known is not None and known.pool.owner is not host_pool:
            raise ConfigError("another pool has this name; detach and attach the storage")
        return known is None

    def _warn_if_nobody_stores(self, name: str) -> None:
        """Say that SGLang lets no rank but the first store a pool that every rank holds a part of.

        With latent KV the other ranks back up Mamba states only.
        """
        config, placement = self._context.storage_config, self._pools[name].connector.plan.placement
        lone = config.is_mla_model and config.tp_rank != 0 and name != MAMBA
        if lone and placement.replicas < config.tp_size:
            log.warning(
                "kvconnect: pool %s is cut over %d TP ranks and SGLang stores it on the first "
                "alone: this rank %d has no hits in it, and without them none in KV",
                name,
                config.tp_size,
                config.tp_rank,
            )

    def _pool(self, name: str) -> Attached:
        if name in self._refused:
            raise ConfigError(f"it was refused: {self._refused[name]}")
        try:
            return self._pools[name]
        except KeyError:
            raise ConfigError(
                f"it is not registered; registered are {sorted(self._pools)}"
            ) from None

    def exists(
        self,
        keys: Sequence[str],
        kv: Bools,
        transfers: Sequence[PoolTransfer],
        extra_info: Any = None,  # noqa: ARG002 - a page's key fixes its prefix
    ) -> PoolTransferResult:
        """Return the prefix that KV and the pools of `transfers` can serve together.

        `kv`: (keys,) bool, the pages that the anchor has. The keys of a transfer count, they do
        not name: SGLang puts placeholders there, as many as the window has pages.
        """
        pages = Hits(kv).prefix
        sides, hopeless = list[Side](), pages == 0
        for transfer in transfers:
            gates = _text(transfer.hit_policy) != BLOCK_GROUPS
            if gates and hopeless:
                continue
            side = self._side(transfer, keys[:pages] if gates else keys)
            if side is not None:
                sides.append(side)
                hopeless |= gates and not side.present.any()
        found = joint(kv, sides)
        return PoolTransferResult(found.kv_hit_pages, {KV: pages} | found.pools, found.lengths)

    def _side(self, transfer: PoolTransfer, keys: Sequence[str]) -> Side | None:
        """Ask one pool; None for one that does not gate and cannot be asked."""
        name, policy = _text(transfer.name), _text(transfer.hit_policy)
        try:
            return Side(
                name,
                policy,
                self._pool(name).exists(keys),
                window=max(len(transfer.keys or ()), 1),
                block_pages=transfer.block_pages,
                group_pages=transfer.group_pages,
            )
        except Exception as error:
            self._failed("exists", name, error)
        none = np.zeros(len(keys), dtype=np.bool_)
        return None if policy == BLOCK_GROUPS else Side(name, ALL_PAGES, none)

    def get(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: Any = None,  # noqa: ARG002 - as in `exists`
    ) -> dict[str, list[bool]]:
        """Load the pages of each transfer; per pool, True for each key that was loaded."""
        return self._each("get", Attached.get, transfers)

    def set(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: Any = None,  # noqa: ARG002 - as in `exists`
    ) -> dict[str, list[bool]]:
        """Store the pages of each transfer; per pool, True for each key that is stored."""
        return self._each("set", Attached.set, transfers)

    def _each(
        self, what: str, move: Callable[..., Any], transfers: Sequence[PoolTransfer]
    ) -> dict[str, list[bool]]:
        results: dict[str, list[bool]] = {}
        for transfer in transfers:
            name, keys = _text(transfer.name), list(transfer.keys or ())
            ok = [False] * len(keys)
            try:
                if keys:
                    ok = move(self._pool(name), keys, _indices(transfer)).ok.tolist()
            except Exception as error:
                self._failed(what, name, error)
            # Two transfers of one pool in a call are answered one after the other.
            results.setdefault(name, []).extend(ok)
        return results

    def _failed(self, what: str, name: str, error: Exception) -> None:
        words = error if isinstance(error, KVConnectError) else repr(error)
        kind = f"{what} {name} {type(error).__name__}"
        self._notices.say(kind, f"{what} on pool {name}: {words}")

    def clear(self) -> int:
        """Remove every page of every pool's identity and no others; return objects removed.

        Raises the first error after all pools were tried.
        """
        removed, errors = 0, list[Exception]()
        for attached in list(self._pools.values()):
            try:
                removed += attached.clear()
            except Exception as error:
                errors.append(error)
        log.info("kvconnect: clear removed %d objects of side pools", removed)
        _raise_first(errors)
        return removed

    def stats(self) -> dict[str, float]:
        """Return the counters of all pools, each name led by its pool's."""
        return {
            f"{name}.{counter}": value
            for name, attached in list(self._pools.items())
            for counter, value in attached.stats().items()
        }

    def close(self) -> None:
        """Detach all pools; the second call does nothing.

        Raises the first error after all were tried; what is left can be closed again.
        """
        self._closed, errors = True, list[Exception]()
        for name, attached in list(self._pools.items()):
            try:
                attached.close()
                del self._pools[name]
            except Exception as error:
                errors.append(error)
        _raise_first(errors)

    def __repr__(self) -> str:
        words = [f"{name} refused" for name in sorted(self._refused)]
        return f"SidePools({', '.join([*sorted(self._pools), *words])})"


def _text(value: Any) -> str:
    """Return the text of a name or policy, which SGLang keeps in an enum."""
    return str(getattr(value, "value", value))


def _indices(transfer: PoolTransfer) -> Any:
    if transfer.host_indices is None:
        raise PageIndexError(f"{len(transfer.keys)} keys without host_indices")
    return transfer.host_indices


def _raise_first(errors: Sequence[Exception]) -> None:
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"and another pool: {other}")
        raise errors[0]
