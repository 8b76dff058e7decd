"""Contestants of the store benchmark: one class each, the same objects, the same buffer.

Run as a script in the interpreter that has the peer installed; prints one JSON line:
``python contestants.py NAME --dir D --nbytes N --count C``. Every contestant puts all objects
in batches and makes them safe on disk (what it does not sync itself is synced for it inside
the timed part), then reads them cold and warm and compares every byte.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import resource
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np

BATCH = 64


class Buffer:
    """Page-aligned memory: the first half is the source, the second the destination."""

    def __init__(self, nbytes: int, count: int) -> None:
        self.nbytes, self.count, self.half = nbytes, count, nbytes * count
        self.map = mmap.mmap(-1, 2 * self.half)
        self.array = np.frombuffer(self.map, dtype=np.uint8)
        self.address = self.array.ctypes.data
        rng = np.random.default_rng(7)
        for start in range(0, self.half, 64 << 20):
            part = self.array[start : min(start + (64 << 20), self.half)]
            part[:] = rng.integers(0, 256, len(part), dtype=np.uint8)
        self.clear()

    def clear(self) -> None:
        self.array[self.half :] = 0xA5

    def ok(self) -> bool:
        return bool(np.array_equal(self.array[: self.half], self.array[self.half :]))

    def view(self, i: int, *, source: bool) -> np.ndarray:
        start = i * self.nbytes + (0 if source else self.half)
        return self.array[start : start + self.nbytes]


class Contestant:
    """What the benchmark needs of a store."""

    syncs = False
    """Whether `put` returns only when the bytes are safe."""

    def __init__(self, folder: str, buffer: Buffer) -> None:
        self.folder, self.buffer = folder, buffer

    def put(self, items: range) -> None: ...

    def get(self, items: range) -> None: ...

    def exists(self) -> None:
        raise NotImplementedError

    def again(self) -> None:
        """Forget everything, so that a second put rewrites what is allocated already."""
        raise NotImplementedError

    def close(self) -> None: ...


class Raw(Contestant):
    """The limit: O_DIRECT on one preallocated file, as many threads as kvconnect uses."""

    syncs = True

    def __init__(self, folder: str, buffer: Buffer) -> None:
        super().__init__(folder, buffer)
        self.path = f"{folder}/raw.dat"
        self.fd = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.fd, 0, buffer.half)
        self.threads = ThreadPoolExecutor(4)

    def _each(self, call, items: range, *, source: bool) -> None:
        def one(i: int) -> None:
            view = memoryview(self.buffer.view(i, source=source))
            if call(self.fd, [view], i * self.buffer.nbytes) != self.buffer.nbytes:
                raise OSError("short transfer")

        list(self.threads.map(one, items))

    def put(self, items: range) -> None:
        self._each(os.pwritev, items, source=True)
        if items.stop == self.buffer.count:
            os.fdatasync(self.fd)

    def get(self, items: range) -> None:
        self._each(os.preadv, items, source=False)

    def again(self) -> None:
        pass

    def close(self) -> None:
        os.close(self.fd)


class KVConnect(Contestant):
    """The whole connector on the nvme backend: keys, checksum, sync and index included."""

    syncs = True
    options = "io_threads=4"

    def __init__(self, folder: str, buffer: Buffer) -> None:
        super().__init__(folder, buffer)
        import kvconnect
        from kvconnect.layout import Layout
        from kvconnect.pool import Plane, Pool
        from kvconnect.region import Region

        region = Region("bench", buffer.address, 2 * buffer.half)
        half = buffer.nbytes // 2
        layout = Layout.packed(
            {"page": 2 * buffer.count, "component": 2, "layer": 1, "slot": 1, "head": 1,
             "dim": half // 2}, 2)  # fmt: skip
        pool = Pool(
            (Plane(region, layout, ("k", "v")),), page_size=1, layers=1, heads=1,
            head_dim=half // 2, v_head_dim=half // 2, dtype="bfloat16", label="bench")  # fmt: skip
        identity = kvconnect.Identity(
            model="bench", weights="none", dtype="bfloat16", page_size=1, layers=1, heads=1,
            head_dim=half // 2, v_head_dim=half // 2)  # fmt: skip
        room = int(buffer.half * 1.25) + (64 << 20)
        self.store = kvconnect.open(f"nvme://{folder}/store?capacity={room}&{self.options}")
        self.connector = kvconnect.Connector(
            pool, kvconnect.Placement.whole(layers=1, heads=1), identity, self.store,
            timeout=300.0)  # fmt: skip
        self.hashes = kvconnect.page_hashes(range(buffer.count), 1)

    def put(self, items: range) -> None:
        out = self.connector.put([self.hashes[i] for i in items], np.array(items))
        if not out.ok.all():
            raise RuntimeError(f"{out} {out.causes}")

    def get(self, items: range) -> None:
        ids = np.array(items) + self.buffer.count
        out = self.connector.get([self.hashes[i] for i in items], ids)
        if not out.ok.all():
            raise RuntimeError(f"{out} {out.causes}")

    def exists(self) -> None:
        if self.connector.exists(self.hashes).prefix != self.buffer.count:
            raise RuntimeError("missing pages")

    def again(self) -> None:
        self.connector.clear()

    def close(self) -> None:
        self.connector.close()
        self.store.close()


class KVConnectIndex(KVConnect):
    """The same with durability=index: key and payload on disk before put returns."""

    options = "io_threads=4&durability=index"


class SGLangFile(Contestant):
    """SGLang's HiCacheFile: one file per page, through its own batch calls."""

    def __init__(self, folder: str, buffer: Buffer) -> None:
        super().__init__(folder, buffer)
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


CONTESTANTS = {
    "raw O_DIRECT": Raw,
    "kvconnect nvme": KVConnect,
    "kvconnect nvme durability=index": KVConnectIndex,
    "sglang file": SGLangFile,
    "sglang nixl": SGLangNixl,
    "lmcache fs": LMCacheFs,
    "lmcache fs_native direct": LMCacheFsNative,
}


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
    """A real page_first pool of 64-token pages whose memory is the benchmark's buffer."""
    from sglang_pools import make_mha_pool

    layers = buffer.nbytes // (2 * 64 * 8 * 128 * 2)
    pool = make_mha_pool("page_first", pages=2 * buffer.count, page_size=64, layers=layers)
    import torch

    flat = pool.kv_buffer.view(torch.uint8).reshape(2, 2 * buffer.count, -1)
    half = buffer.nbytes // 2
    source = torch.from_numpy(buffer.array[: buffer.half]).view(buffer.count, 2, half)
    flat[:, : buffer.count].copy_(source.transpose(0, 1))

    def ok() -> bool:
        return bool(torch.equal(flat[:, : buffer.count], flat[:, buffer.count :]))

    buffer.ok = ok
    buffer.clear = lambda: flat[:, buffer.count :].fill_(0xA5)
    return pool


def _prepare_sglang() -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "engines"))
    from sglang_pools import prepare

    prepare()


def _files(folder: str) -> list[str]:
    return [f"{d}/{f}" for d, _, names in os.walk(folder) for f in names]


def sync(folder: str) -> None:
    for path in _files(folder):
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.close(fd)


def drop(folder: str) -> None:
    """Evict this store's files, and only these, from the page cache."""
    for path in _files(folder):
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def measure(name: str, folder: str, nbytes: int, count: int) -> dict:
    buffer = Buffer(nbytes, count)
    store = CONTESTANTS[name](folder, buffer)
    batches = [range(i, min(i + BATCH, count)) for i in range(0, count, BATCH)]
    total, out = buffer.half / 1e9, {"name": name, "nbytes": nbytes, "count": count}

    def timed(call) -> float:
        start = time.perf_counter()
        for batch in batches:
            call(batch)
        return time.perf_counter() - start

    def put() -> float:
        seconds = timed(store.put)
        if not store.syncs:
            start = time.perf_counter()
            sync(folder)
            seconds += time.perf_counter() - start
        return total / seconds

    cpu = resource.getrusage(resource.RUSAGE_SELF)
    out["put"] = put()
    used = resource.getrusage(resource.RUSAGE_SELF)
    out["put_cpu_s_per_gb"] = (used.ru_utime + used.ru_stime - cpu.ru_utime - cpu.ru_stime) / total
    for key in ("get_cold", "get_warm"):
        if key == "get_cold":
            drop(folder)
        buffer.clear()
        out[key] = total / timed(store.get)
        if not buffer.ok():
            raise RuntimeError(f"{name}: bytes differ after {key}")
    # Not every contestant can be asked, and a peer that skips keys it has would win put_again.
    with contextlib.suppress(NotImplementedError):
        start = time.perf_counter()
        store.exists()
        out["exists_ms"] = (time.perf_counter() - start) * 1e3
    with contextlib.suppress(NotImplementedError):
        store.again()
        out["put_again"] = put()
    store.close()
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=list(CONTESTANTS))
    parser.add_argument("--dir", required=True)
    parser.add_argument("--nbytes", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    a = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="bench-", dir=a.dir)
    try:
        print("RESULT " + json.dumps(measure(a.name, folder, a.nbytes, a.count)), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    # Some peers leave threads that keep the interpreter alive.
    os._exit(0)


if __name__ == "__main__":
    main()
