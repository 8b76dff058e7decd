"""One rank of SGLang on the CPU: a real host pool, the adapter, and the real controller around it.

The adapter comes from SGLang's own factory, and pages move through the methods (and, where
asked, the threads) of its real `HiCacheController`. Only the controller's constructor is left
out, which wants a GPU and process groups.
"""

import hashlib
import queue
import threading
import warnings
from types import SimpleNamespace

import numpy as np
import torch

EXTRA = {
    "backend_name": "kvconnect",
    "module_path": "kvconnect.engines.sglang",
    "class_name": "KVConnectStorage",
}


def engine():
    """SGLang's classes beyond the pools, imported once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.managers import cache_controller
        from sglang.srt.mem_cache import hicache_storage
        from sglang.srt.mem_cache.storage import StorageBackendFactory
    return SimpleNamespace(
        controller=cache_controller, storage=hicache_storage, factory=StorageBackendFactory
    )


def config(
    pool, url, *, tp=(0, 1), pp=(0, 1), mla=False, lcm=None, served="org/model", metrics=True,
    interface=1, cp=(0, 1), **extra,
):  # fmt: skip
    """What SGLang's controller would make of its own settings; `tp` and `pp` are (rank, size)."""
    split = bool(lcm) and not mla and pool.layout == "page_head" and lcm > tp[1]
    return engine().storage.HiCacheStorageConfig(
        tp_rank=tp[0],
        tp_size=tp[1],
        pp_rank=pp[0],
        pp_size=pp[1],
        attn_cp_rank=cp[0],
        attn_cp_size=cp[1],
        is_mla_model=mla,
        enable_storage_metrics=metrics,
        is_page_first_layout=pool.layout == "page_first",
        model_name=served,
        tp_lcm_size=lcm,
        should_split_heads=split,
        extra_config=EXTRA | {"interface_v1": interface, "url": url} | extra,
    )


class Rank:
    """A pool attached to a store, driven as SGLang drives it. A context manager."""

    def __init__(self, pool, url, *, threads=False, **settings):
        self.pool = pool
        self.config = config(pool, url, **settings)
        self.backend = engine().factory.create_backend("dynamic", self.config, pool)
        self.backend.register_mem_pool_host(pool)
        # SGLang hands the anchor over a second time.
        self.backend.register_mem_host_pool_v2(pool, engine().storage.PoolName.KV)
        self.backend.on_host_pools_registered()
        self._controller = self._made(threads)

    def _made(self, threads):
        kind = engine().controller.HiCacheController
        made = kind.__new__(kind)
        in_place = bool(self.config.extra_config["interface_v1"])
        made.__dict__.update(
            storage_backend=self.backend,
            storage_host_pool=self.pool,
            mem_pool_host=self.pool,
            page_size=self.pool.page_size,
            storage_config=self.config,
            prefetch_hits_sync_groups=[],
            prefetch_completion_sync_groups=[],
            storage_stop_event=threading.Event(),
            enable_storage=True,
            page_get_func=made._page_get_zero_copy if in_place else made._generic_page_get,
            page_set_func=made._page_set_zero_copy if in_place else made._generic_page_set,
            prefetch_sync_queue=queue.Queue(),
        )
        if threads:
            made._start_storage_threads()
        return made

    def put(self, keys, pages):
        """Back pages up through the controller's batch loop; return how many it counts."""
        if self._controller.backup_skip:
            return None
        operation = engine().controller.StorageOperation(
            tokens(self.pool, pages), [0] * (len(pages) * self.pool.page_size), hash_value=keys
        )
        self._controller._page_backup(operation)
        return operation.completed_tokens // self.pool.page_size

    def get(self, keys, pages):
        """Prefetch pages through the controller's batch loop; return the leading ones it got."""
        index = tokens(self.pool, pages)
        operation = engine().controller.PrefetchOperation("request", [0] * len(index))
        operation.hash_value, operation.host_indices = keys, index
        self._controller._page_transfer(operation)
        done = 0
        while not self._controller.prefetch_sync_queue.empty():
            done = self._controller.prefetch_sync_queue.get().completed_tokens
        return done // self.pool.page_size

    def exists(self, keys):
        return self.backend.batch_exists(keys)

    def close(self):
        if hasattr(self._controller, "backup_thread"):
            self._controller._stop_storage_threads()
        self.backend.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def keys(tag, count):
    """Page hashes as SGLang makes them: 64 hex characters, each chained to the one before."""
    out, last = [], tag
    for _ in range(count):
        last = hashlib.sha256(last.encode()).hexdigest()
        out.append(last)
    return out


def tokens(pool, pages):
    ids = torch.tensor(list(pages), dtype=torch.int64)
    return (ids[:, None] * pool.page_size + torch.arange(pool.page_size)).reshape(-1)


def buffers(pool):
    """The pool's tensors as raw bytes, each with its page axis brought to the front."""
    kv = pool.kv_buffer
    tensors = list(kv) if isinstance(kv, (tuple, list)) else [kv]
    return [_paged(pool, tensor) for tensor in tensors]


def _paged(pool, tensor):
    pages, raw = pool.page_num, tensor.view(torch.uint8)
    at = {
        "layer_first": raw.dim() - 3,
        "page_first": raw.dim() - 4,
        "page_first_direct": raw.dim() - 5,
        "page_head": raw.dim() - 5,
        "page_unified": 0,
    }[pool.layout]
    shape = list(raw.shape)
    if shape[at] != pages:
        shape[at : at + 1] = [pages, pool.page_size]
    return raw.reshape(shape).movedim(at, 0)


def fill(pool, seed):
    """Fill the whole pool with random bytes."""
    source = np.random.default_rng(seed)
    for tensor in buffers(pool):
        data = source.integers(0, 256, tensor.shape, dtype=np.uint8)
        tensor.copy_(torch.from_numpy(data))


def wipe(pool):
    for tensor in buffers(pool):
        tensor.zero_()


def content(pool, pages):
    """The bytes of pages, one value for each."""
    return [b"".join(t[page].numpy().tobytes() for t in buffers(pool)) for page in pages]


def heads(pool, page):
    """A page of an MHA pool as (component, layer, slot, head, dim) raw bytes."""
    kv = pool.kv_buffer
    dims, parts = (
        {
            "page_first": ("slot layer head dim", page * pool.page_size),
            "page_first_direct": ("layer slot head dim", page),
            "page_head": ("head slot layer dim", page),
            "layer_first": ("layer slot head dim", page * pool.page_size),
        }[pool.layout],
        [],
    )
    names, at = dims[0].split(), dims[1]
    for tensor in kv:
        if pool.layout == "layer_first":
            part = tensor[:, at : at + pool.page_size]
        elif pool.layout == "page_first":
            part = tensor[at : at + pool.page_size]
        else:
            part = tensor[at]
        order = [names.index(name) for name in ("layer", "slot", "head", "dim")]
        parts.append(part.permute(order).contiguous().view(torch.uint8))
    return parts


def served_by(monkeypatch, backend):
    """Let the adapter open `backend`, whatever the URL says."""
    monkeypatch.setattr("kvconnect.engines.sglang.storage.open_url", lambda url: backend)
    return backend
