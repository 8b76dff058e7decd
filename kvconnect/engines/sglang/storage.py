"""`KVConnectStorage`: the class that SGLang's ``dynamic`` storage backend loads.

Everything that can be refused is refused in the constructor and in `register_mem_pool_host`,
because SGLang rolls an attach back for these two only. After that no call raises for what a
store does: a page is served or it is a miss, and the log says why.

Threads: SGLang calls from its prefetch, prefetch I/O, backup and scheduler threads at once.
"""

# ruff: noqa: ARG002 - the signatures are SGLang's, and not all of their arguments matter here

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    PoolTransfer,
    PoolTransferResult,
)

from kvconnect.engines.sglang.attached import Attached, Bools, Context, Moved, attach
from kvconnect.engines.sglang.flat import FlatPages
from kvconnect.engines.sglang.hits import BLOCK_GROUPS
from kvconnect.engines.sglang.identity import KV
from kvconnect.engines.sglang.options import parse
from kvconnect.engines.sglang.rates import Rates
from kvconnect.engines.sglang.served import find_facts
from kvconnect.engines.sglang.side_pools import SidePools
from kvconnect.errors import CapabilityError, ClosedError, ConfigError, KVConnectError
from kvconnect.outcome import Hits
from kvconnect.registry import open_url

log = logging.getLogger("kvconnect.sglang")


class KVConnectStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is untyped
    """One rank's host pools on the store that the option ``url`` names.

    Lifecycle: constructor opens the store, `register_mem_pool_host` attaches the KV pool (the
    anchor), `register_mem_host_pool_v2` each side pool, `close` detaches all and closes the
    store. A logical anchor (DeepSeek-V4) has no bytes: its pages are what the side pools say.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        """Open the store; `ConfigError` on an option, and what the store raises.

        `kwargs` is what SGLang passes on from its factory, always empty.
        """
        if kwargs:
            raise ConfigError(
                f"KVConnectStorage takes its options from the extra config, not {dict(kwargs)!r}"
            )
        options = parse(storage_config.extra_config)
        facts = find_facts(options)
        self._anchor: Attached | None = None
        self._flat: FlatPages | None = None
        self._logical = False
        self._open: list[Any] = []
        self._rates = Rates() if storage_config.enable_storage_metrics else None
        self._context = Context(open_url(options.url), options, storage_config, facts)
        self._open = [self._context.backend]
        self._side = SidePools(self._context)
        self._open.insert(0, self._side)
        if not options.interface_v1:
            log.warning(
                "kvconnect: interface_v1 is 0: every page is copied twice more on its way; write "
                '"interface_v1": 1 in the extra config to move pages in place'
            )

    # -- attach ------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Attach the KV pool; on failure everything is closed and the typed error raised."""
        self._require_open("register_mem_pool_host")
        if self._anchor or self._flat or self._logical:
            raise ConfigError(
                "a KV pool is attached already; detach (close) and make a new KVConnectStorage"
            )
        try:
            self._attach(mem_pool_host)
        except BaseException as error:
            try:
                self.close()
            except KVConnectError as left:
                error.add_note(f"closing failed too: {left}")
            raise
        super().register_mem_pool_host(mem_pool_host)

    def _attach(self, pool: Any) -> None:
        in_place = self._context.options.interface_v1
        if _is_used(pool):
            self._context.in_use.set()
        if _is_logical(pool):
            if not in_place:
                raise CapabilityError(
                    f"{type(pool).__name__} has no flat pages: write "
                    '"interface_v1": 1 in the extra config to store what its side pools hold'
                )
            self._logical = True
            log.info("kvconnect: the KV anchor is logical: side pools hold all bytes")
        elif in_place:
            self._anchor = attach(pool, KV, self._context)
            self._open.insert(0, self._anchor)
        else:
            self._flat = FlatPages(pool, self._context)
            self._open.insert(0, self._flat)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Attach a side pool; one that cannot be served is logged and has no hits."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(getattr(host_pool_name, "value", host_pool_name))
        # SGLang hands the anchor over a second time under its own name.
        if name != KV:
            self._side.register(name, host_pool)

    def on_host_pools_registered(self) -> None:
        """Say that the attach is complete; pools that come later find the others in use."""
        self._context.in_use.set()
        # Options of the URL may be credentials, which have no place in a log.
        log.info("kvconnect: attached to %s", self._context.options.url.partition("?")[0])

    # -- keys --------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Tell whether one page could be loaded."""
        return self.batch_exists([key]) == 1

    def batch_exists(
        self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Return how many leading pages could be loaded; 0 under a logical anchor alone."""
        return 0 if self._logical else Hits(self._present(keys)).prefix

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return the prefix that KV and all side pools can serve together."""
        transfers = pool_transfers or []
        if self._logical and all(t.hit_policy == BLOCK_GROUPS for t in transfers):
            return PoolTransferResult.empty()  # no pool says that there is anything to load
        return self._side.exists(keys, self._present(keys), transfers, extra_info)

    def _present(self, keys: Sequence[str]) -> Bools:
        """Tell which pages the anchor has: (keys,) bool; all of them where it is logical."""
        if self._logical:
            return np.ones(len(keys), dtype=np.bool_)
        return self._pages().exists(keys)

    def _pages(self) -> Attached:
        self._require_open("a call")
        found = self._flat.attached if self._flat else self._anchor
        if found is None:
            raise ConfigError("no KV pool is attached: call register_mem_pool_host first")
        return found

    # -- pages in place ----------------------------------------------------------------------

    def batch_get_v1(
        self,
        keys: Sequence[str],
        host_indices: Any,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Load pages into token slots, `host_indices` (keys * page_size,); True where loaded."""
        if self._logical:
            return [True] * len(keys)
        started = time.perf_counter()
        return self._noted("get", self._in_place().get(keys, host_indices), started)

    def batch_set_v1(
        self,
        keys: Sequence[str],
        host_indices: Any,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages from token slots; True where stored, by this rank or by a replica."""
        if self._logical:
            return [True] * len(keys)
        started = time.perf_counter()
        return self._noted("set", self._in_place().set(keys, host_indices), started)

    def _in_place(self) -> Attached:
        if self._flat:
            raise CapabilityError(
                'pages in place need "interface_v1": 1 in the extra config; this attach has 0'
            )
        return self._pages()

    def batch_get_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Load pages of side pools: per pool, True for each key loaded."""
        return self._side.get(transfers, extra_info)

    def batch_set_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Store pages of side pools: per pool, True for each key stored."""
        return self._side.set(transfers, extra_info)

    # -- flat pages --------------------------------------------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Load one flat page into a tensor (a new one where none is given); None on a miss."""
        targets = None if target_location is None else [target_location]
        return self.batch_get([key], targets, target_sizes)[0]

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """Load flat pages; for each key its tensor, or None on a miss."""
        flat, started = self._flat_pages(), time.perf_counter()
        targets = [flat.new_page() for _ in keys] if target_locations is None else target_locations
        ok = self._noted("get", flat.get(keys, targets), started)
        return [target if loaded else None for target, loaded in zip(targets, ok, strict=True)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store one flat page; True if it is stored."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store flat pages; True if all are stored."""
        flat, started = self._flat_pages(), time.perf_counter()
        return all(self._noted("set", flat.set(keys, values or []), started))

    def _flat_pages(self) -> FlatPages:
        self._require_open("a call")
        if self._flat is None:
            raise CapabilityError(
                'flat pages need "interface_v1": 0 in the extra config; this attach has 1'
            )
        return self._flat

    # -- the rest ----------------------------------------------------------------------------

    def _noted(self, operation: str, moved: Moved, started: float) -> list[bool]:
        if self._rates is not None and moved.ok.all():
            pages = moved.nbytes // self._pages().page_nbytes
            self._rates.note(operation, pages, moved.nbytes, time.perf_counter() - started)
        each: list[bool] = moved.ok.tolist()
        return each

    def get_stats(self) -> Any:
        """Return SGLang's `StorageMetrics` since the last call, None where metrics are off."""
        if self._rates is None:
            return None
        from sglang.srt.observability.metrics_collector import (  # noqa: PLC0415 - prometheus
            StorageMetrics,
        )

        taken = self._rates.take()
        metrics = StorageMetrics()
        if "get" in taken:
            metrics.prefetch_pgs = taken["get"].pages
            metrics.prefetch_bandwidth = taken["get"].bandwidth
        if "set" in taken:
            metrics.backup_pgs = taken["set"].pages
            metrics.backup_bandwidth = taken["set"].bandwidth
        return metrics

    def clear(self) -> None:
        """Remove the pages of this model and configuration, KV and side pools, and no others."""
        self._require_open("clear")
        if not self._logical:
            removed = self._pages().clear()
            log.info("kvconnect: clear removed %d objects of the KV pool", removed)
        self._side.clear()

    def close(self) -> None:
        """Detach all pools and close the store; the second call does nothing.

        Raises `TransferTimeoutError` while pages are in flight: what could not be closed stays
        open, its memory must stay allocated, and close can be called again.
        """
        left, failed = list[Any](), list[KVConnectError]()
        for part in self._open:
            if failed and part is self._context.backend:
                left.append(part)  # its connectors are not all closed: it still moves bytes
                continue
            try:
                part.close()
            except KVConnectError as error:
                failed.append(error)
                left.append(part)
        self._open = left
        if failed:
            log.error("kvconnect: close: %s", "; ".join(map(str, failed)))
            raise failed[0]

    def _require_open(self, what: str) -> None:
        if not self._open:
            raise ClosedError(f"{what} on a closed KVConnectStorage")


def _is_logical(pool: Any) -> bool:
    """Tell an anchor that only counts pages from one whose memory is gone."""
    return getattr(pool, "kv_buffer", pool) is None and not getattr(pool, "_destroyed", False)


def _is_used(pool: Any) -> bool:
    """Tell whether a host pool has given pages away: the server has been running for a while."""
    free = getattr(pool, "available_size", None)
    return free is not None and free() < getattr(pool, "logical_size", pool.size)
