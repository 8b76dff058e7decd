"""Side pools of SGLang beside an anchor: how to make them, their bytes, and the real controller.

The bytes of a page are taken from SGLang's own tensors by the axis orders that SGLang
documents; nothing here asks kvconnect where they lie.
"""

import queue
import threading
import warnings
from types import SimpleNamespace

import numpy as np
import torch

from tests.engines import sglang_pools as pools
from tests.engines.sglang_rank import Rank, buffers, tokens


def index_of(sg, layout):
    """A DSA index beside its MLA anchor."""
    return pools.indexer(sg, pools.mla(sg, layout))


def state(sg, layout, *, pages=6, page_size=4, layers=3, ring=2, width=10):
    """Compression states of DeepSeek-V4: `ring` slots to a page."""
    device = [
        SimpleNamespace(
            ring_size=ring,
            kv_score_buffer=SimpleNamespace(kv_score=torch.zeros(2 * ring, width)),
        )
        for _ in range(layers)
    ]
    with pools.budget(sg):
        return sg.paged.DeepSeekV4StateHostPool(
            "state", device, pages, page_size, layout, pin_memory=False
        )


# Case -> (pool name, whether the anchor's KV is latent, how to make the pool).
KINDS = {
    "SWA": ("swa", False, lambda sg, _: pools.mha(sg, "page_first")),
    "SWA page_head": ("swa", False, lambda sg, _: pools.mha(sg, "page_head")),
    "SWA, K and V apart": ("swa", False, lambda sg, _: pools.mha(sg, "page_first", v_dim=8)),
    "SWA mxfp8": ("swa", False, pools.mxfp8),
    "second SWA": ("auxiliary_swa", False, lambda sg, _: pools.mha(sg, "layer_first")),
    "Mamba": ("mamba", False, lambda sg, _: pools.mamba(sg, "page_first")),
    "Mamba beside MLA": ("mamba", True, lambda sg, _: pools.mamba(sg, "page_first_direct")),
    "Mamba, side states": (
        "mamba",
        False,
        lambda sg, _: pools.mamba(sg, "page_first", extra=(torch.zeros(6, 5),)),
    ),
    "Mamba, conv only": (
        "mamba",
        False,
        lambda sg, _: pools.mamba(sg, "page_first", temporal=(0,), convs=((6, 3),)),
    ),
    "DSA index": ("indexer", True, lambda sg, _: index_of(sg, "page_first")),
    "DSA index, direct": ("indexer", True, lambda sg, _: index_of(sg, "page_first_direct")),
    "DSA index, by layer": ("indexer", True, lambda sg, _: index_of(sg, "layer_first")),
    "keys only": ("indexer", False, lambda sg, _: pools.k_only(sg, "page_first")),
    "NVFP4 index": ("indexer", False, lambda sg, _: pools.nvfp4(sg, "page_first", main=False)),
    "draft MHA": ("draft", False, lambda sg, _: pools.mha(sg, "page_first", layers=1, heads=2)),
    "draft MLA": ("draft", True, lambda sg, _: pools.mla(sg, "page_first", layers=1)),
    "draft SWA": ("draft_swa", False, lambda sg, _: pools.mha(sg, "page_first_direct", layers=1)),
    "draft index": ("draft_indexer", True, lambda sg, _: index_of(sg, "page_first")),
    "DeepSeek-V4 rows": ("deepseek_v4_c4", True, lambda sg, _: pools.paged(sg, "page_first")),
    "DeepSeek-V4 by layer": (
        "deepseek_v4_c128_rope",
        True,
        lambda sg, _: pools.paged(sg, "layer_first"),
    ),
    "DeepSeek-V4 state": ("deepseek_v4_c4_state", True, lambda sg, _: state(sg, "page_first")),
    "DeepSeek-V4 state by layer": (
        "deepseek_v4_c4_indexer_state",
        True,
        lambda sg, _: state(sg, "layer_first"),
    ),
}


def pages_of(pool):
    """How many pages the pool has; a Mamba page is one slot."""
    return pool.size // pool.page_size


def parts(pool):
    """The pool's tensors as raw bytes, each with its page axis first."""
    by_page = pool.layout.startswith("page_first")
    if hasattr(pool, "temporal_buffer"):
        states = [t for t in (pool.temporal_buffer, *pool.conv_buffer) if t.numel()]
        found = [t if by_page else t.movedim(1, 0) for t in states]
        found += list(pool.slot_state_buffers)
    elif hasattr(pool, "index_k_with_scale_buffer"):
        tensor = pool.index_k_with_scale_buffer
        found = [(tensor if by_page else tensor.movedim(1, 0))[: pages_of(pool)]]
    elif isinstance(getattr(pool, "kv_buffer", None), list):
        found = pool.kv_buffer
    elif any(hasattr(pool, name) for name in ("row_bytes", "item_bytes", "state_page_bytes")):
        found = [pool.kv_buffer if by_page else pool.kv_buffer.movedim(1, 0)]
    elif hasattr(pool, "kv_buffer"):
        found = [*buffers(pool), *scales(pool)]
    else:
        found = [pool.k_buffer.unflatten(0, (-1, pool.page_size))]
    return [tensor.view(torch.uint8) for tensor in found]


def scales(pool):
    named = (getattr(pool, f"{name}_scale_host", None) for name in "kv")
    return [tensor for tensor in named if tensor is not None]


def fill(pool, seed):
    """Fill the whole pool with random bytes."""
    source = np.random.default_rng(seed)
    for part in parts(pool):
        part.copy_(torch.from_numpy(source.integers(0, 256, part.shape, dtype=np.uint8)))


def content(pool, pages):
    """The bytes of pages, one value for each."""
    return [b"".join(part[page].numpy().tobytes() for part in parts(pool)) for page in pages]


def transfer(sg, name, pool, keys, pages, policy="all_pages", **fields):
    """A transfer between host and storage, as SGLang's components make them."""
    return sg.storage.PoolTransfer(
        name=sg.storage.PoolName(name),
        host_indices=None if pages is None else tokens(pool, pages),
        keys=None if keys is None else list(keys),
        hit_policy=sg.storage.PoolHitPolicy(policy),
        **fields,
    )


def asked(sg, name, policy="all_pages", window=None, **fields):
    """A transfer as it is when SGLang asks for hits: placeholders for keys, no indices."""
    keys = None if window is None else ["__placeholder__"] * window
    return transfer(sg, name, None, keys, None, policy, **fields)


def anchor_of(sg, mla, **sizes):
    return pools.mla(sg, "page_first", **sizes) if mla else pools.mha(sg, "page_first", **sizes)


def registered(rank, sg, name, pool):
    rank.backend.register_mem_host_pool_v2(pool, sg.storage.PoolName(name))
    return pool


class Hybrid(Rank):
    """A rank with side pools, driven by the real `HybridCacheController`."""

    def __init__(self, sg, anchor, sides, url, **settings):
        self.sg, self.sides = sg, dict(sides)
        super().__init__(anchor, url, **settings)
        for name, pool in self.sides.items():
            self.backend.register_mem_host_pool_v2(pool, sg.storage.PoolName(name))

    def _made(self, threads):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller as hybrid
            from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
        self.engine = hybrid
        names = {"kv": self.pool, **self.sides}
        entries = [
            PoolEntry(self.sg.storage.PoolName(name), pool, None, lambda layer: layer, name == "kv")
            for name, pool in names.items()
        ]
        made = hybrid.HybridCacheController.__new__(hybrid.HybridCacheController)
        made.__dict__.update(
            storage_backend=self.backend,
            storage_backend_type="dynamic",
            storage_host_pool=self.pool,
            mem_pool_host=HostPoolGroup(entries),
            page_size=self.pool.page_size,
            storage_config=self.config,
            prefetch_hits_sync_groups=[],
            prefetch_completion_sync_groups=[],
            storage_stop_event=threading.Event(),
            enable_storage=True,
            page_get_func=made._page_get_zero_copy,
            page_set_func=made._page_set_zero_copy,
            prefetch_sync_queue=queue.Queue(),
            pp_prefetch_command_group=None,
            extra_host_mem_release_queues={name: queue.Queue() for name in self.sides},
            pp_prefetch_command_thread=None,
        )
        if threads:
            made._start_storage_threads()
        return made

    def backup(self, keys, pages, transfers):
        """Store side pools first and then KV, as the backup thread does; return the operation."""
        index = tokens(self.pool, pages)
        operation = self.engine.StorageOperation(
            index, [0] * len(index), hash_value=keys, pool_transfers=transfers
        )
        self._controller._page_backup(operation)
        return operation

    def query(self, token_ids, transfers, reduce=None):
        """Ask for hits and agree on them, as the prefetch thread does; return the operation."""
        if reduce is not None:
            self._controller._all_reduce = reduce
        handle = SimpleNamespace(rid="request")
        operation = self.engine.PrefetchOperation(handle, token_ids, pool_transfers=transfers)
        hashes, count = self._controller._storage_hit_query(operation)
        count = self._controller._sync_prefetch_hit_query(operation, count)
        operation.hash_value = hashes[: count // self.pool.page_size]
        operation.storage_hit_count = count
        return operation

    def load(self, operation, pages):
        """Fetch what a query agreed on, as the I/O thread does; return (KV pages, pool hits)."""
        operation.host_indices = tokens(self.pool, pages)
        self._controller._page_transfer(operation)
        done, hits = 0, None
        while not self._controller.prefetch_sync_queue.empty():
            ack = self._controller.prefetch_sync_queue.get()
            if ack.completed_tokens is not None:
                done = ack.completed_tokens // self.pool.page_size
            hits = hits if ack.pool_hits is None else ack.pool_hits
        return done, hits

    def write(self, keys, pages, transfers):
        """Hand a backup to the controller's thread."""
        index = tokens(self.pool, pages)
        self._controller.write_storage(index, [0] * len(index), keys, extra_pools=transfers)

    def ask(self, name, token_ids, transfers):
        """Hand a prefetch to the controller's thread; return the operation."""
        return self._controller.prefetch(
            SimpleNamespace(rid=name), token_ids, extra_pools=transfers
        )

    def fetch(self, operation, pages):
        """Let the I/O thread load what a query agreed on, as the scheduler does."""
        operation.host_indices = tokens(self.pool, pages)
        self._controller._resolve_sidecar_kv_derived_pool_transfers(operation)
        self._controller.prefetch_buffer.put(operation)

    def acknowledged(self, name):
        """Return the next thing that a thread says is done; fail after 30 s."""
        return getattr(self._controller, name).get(timeout=30)
