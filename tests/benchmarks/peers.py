"""The peers of the store benchmark: SGLang's and LMCache's own classes, driven as they are."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import ClassVar

from tests.benchmarks.contestants import Buffer, Contestant


class SGLangFile(Contestant):
    """SGLang's HiCacheFile: one file per page, through its own batch calls."""

    def __init__(self, folder: str, buffer: Buffer) -> None:
        super().__init__(folder, buffer)
        _prepare_sglang()
        import torch
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile

        self.store = HiCacheFile(_sglang_config(), file_path=folder)
        flat = torch.from_numpy(buffer.array)
        self.tensors = flat.view(2, buffer.count, buffer.nbytes)
        self.keys = [f"{i:064x}" for i in range(buffer.count)]

    def put(self, items: range) -> None:
        part = slice(items.start, items.stop)
        if not self.store.batch_set(self.keys[part], list(self.tensors[0, part])):
            raise RuntimeError("set failed")

    def get(self, items: range) -> None:
        part = slice(items.start, items.stop)
        out = self.store.batch_get(self.keys[part], list(self.tensors[1, part]))
        if any(t is None for t in out):
            raise RuntimeError("get failed")

    def exists(self) -> None:
        if self.store.batch_exists(self.keys) != self.buffer.count:
            raise RuntimeError("missing pages")


class SGLangNixl(Contestant):
    """SGLang's HiCacheNixl (POSIX, O_DIRECT), zero-copy from a page_first host pool."""

    def __init__(self, folder: str, buffer: Buffer) -> None:
        super().__init__(folder, buffer)
        _prepare_sglang()
        os.environ["SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"] = folder
        os.environ["SGLANG_HICACHE_NIXL_BACKEND_PLUGIN"] = "POSIX"
        import torch
        from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

        self.torch = torch
        self.pool = _sglang_pool(buffer)
        self.store = HiCacheNixl(_sglang_config(), folder)
        self.store.register_mem_pool_host(self.pool)
        self.keys = [f"{i:064x}" for i in range(buffer.count)]

    def _index(self, items: range, shift: int):
        first = (self.torch.tensor(list(items)) + shift) * 64
        return (first[:, None] + self.torch.arange(64)).reshape(-1)

    def put(self, items: range) -> None:
        done = self.store.batch_set_v1(
            self.keys[items.start : items.stop], self._index(items, 0))  # fmt: skip
        if not all(done):
            raise RuntimeError("set failed")

    def get(self, items: range) -> None:
        done = self.store.batch_get_v1(
            self.keys[items.start : items.stop], self._index(items, self.buffer.count))  # fmt: skip
        if not all(done):
            raise RuntimeError("get failed")

    def exists(self) -> None:
        if self.store.batch_exists(self.keys) != self.buffer.count:
            raise RuntimeError("missing pages")


class LMCacheFs(Contestant):
    """An LMCache L2 adapter, through the interface its controllers use."""

    config: ClassVar[dict] = {"type": "fs"}

    def __init__(self, folder: str, buffer: Buffer) -> None:
        super().__init__(folder, buffer)
        import torch
        from lmcache.v1.distributed.internal_api import L1MemoryDesc
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter
        from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

        spec = json.dumps({**self.config, "base_path": folder})
        parsed = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[spec]))
        memory = L1MemoryDesc(ptr=buffer.address, size=2 * buffer.half, align_bytes=4096)
        self.adapter = create_l2_adapter(parsed.adapters[0], l1_memory_desc=memory)
        self.flat = torch.from_numpy(buffer.array)

    def _objects(self, items: range, shift: int) -> list:
        import torch
        from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

        size, out = self.buffer.nbytes, []
        for i in items:
            at = i * size + shift
            meta = MemoryObjMetadata(
                shape=torch.Size([size]), dtype=torch.uint8, address=at, phy_size=size,
                fmt=MemoryFormat.KV_2LTD, ref_count=1)  # fmt: skip
            raw = self.flat[at : at + size]
            out.append(TensorMemoryObj(raw_data=raw, metadata=meta, parent_allocator=None))
        return out

    def _keys(self, items: range) -> list:
        from lmcache.v1.distributed.api import ObjectKey

        return [
            ObjectKey(chunk_hash=i.to_bytes(16, "big"), model_name="bench", kv_rank=0x01000100)
            for i in items
        ]

    def _poll(self, query):
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if (found := query()) is not None:
                return found
            time.sleep(0.0002)
        raise TimeoutError("no completion in 120 s")

    def put(self, items: range) -> None:
        task = self.adapter.submit_store_task(self._keys(items), self._objects(items, 0))
        done: dict = {}

        def query():
            done.update(self.adapter.pop_completed_store_tasks())
            return done.get(task)

        if not self._poll(query).is_successful():
            raise RuntimeError("store failed")

    def get(self, items: range) -> None:
        objects = self._objects(items, self.buffer.half)
        task = self.adapter.submit_load_task(self._keys(items), objects)
        found = self._poll(lambda: self.adapter.query_load_result(task))
        if len(set(found.get_indices_list())) != len(items):
            raise RuntimeError("load failed")

    def close(self) -> None:
        self.adapter.close()


class LMCacheFsNative(LMCacheFs):
    """LMCache's C++ file adapter with four workers and O_DIRECT."""

    config: ClassVar[dict] = {"type": "fs_native", "num_workers": 4, "use_odirect": True}


def _sglang_config():
    _prepare_sglang()
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    fields = HiCacheStorageConfig.__dataclass_fields__
    values = {
        "tp_rank": 0, "tp_size": 1, "dp_rank": 0, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": False,
        "is_page_first_layout": True, "model_name": "bench", "tp_lcm_size": None,
        "should_split_heads": False, "extra_config": {},
    }  # fmt: skip
    return HiCacheStorageConfig(**{k: v for k, v in values.items() if k in fields})


def _sglang_pool(buffer: Buffer):
    """A real page_first pool of 64-token pages, filled with the benchmark's source bytes."""
    import torch

    from tests.engines import sglang_pools

    layers = buffer.nbytes // (2 * 64 * 8 * 128 * 2)
    pool = sglang_pools.mha(
        sglang_pools.load(), "page_first", pages=2 * buffer.count, page_size=64, layers=layers,
        heads=8, dim=128)  # fmt: skip
    flat = pool.kv_buffer.view(torch.uint8).reshape(2, 2 * buffer.count, -1)
    half = buffer.nbytes // 2
    source = torch.from_numpy(buffer.array[: buffer.half]).view(buffer.count, 2, half)
    flat[:, : buffer.count].copy_(source.transpose(0, 1))
    buffer.ok = lambda: torch.equal(flat[:, : buffer.count], flat[:, buffer.count :])
    buffer.clear = lambda: flat[:, buffer.count :].fill_(0xA5)
    return pool


def _prepare_sglang() -> None:
    from tests.engines import sglang_pools

    sglang_pools.load()
    _alias_nixl()


def _alias_nixl() -> None:
    """Let `import nixl` find the wheel that is installed under its CUDA major."""
    import importlib

    for name in ("nixl_cu12", "nixl_cu13"):
        try:
            sys.modules.setdefault("nixl", importlib.import_module(name))
            sys.modules.setdefault("nixl._api", importlib.import_module(name + "._api"))
        except ImportError:
            continue
        return


PEERS = {
    "sglang file": SGLangFile,
    "sglang nixl": SGLangNixl,
    "lmcache fs": LMCacheFs,
    "lmcache fs_native direct": LMCacheFsNative,
}
