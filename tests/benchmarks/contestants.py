"""Contestants of the store benchmark: one class each, the same objects, the same buffer.

Run as a script in the interpreter that has the peer installed; prints one JSON line:
``python contestants.py NAME --dir D --nbytes N --count C``. Every contestant puts all objects in
batches and makes them safe on disk (what it does not sync itself is synced for it inside
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
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

BATCH = 128
"""Pages in one call: what SGLang's HiCache controller hands over."""


class Buffer:
    """Page-aligned memory: the first half is the source, the second the destination."""

    def __init__(self, nbytes: int, count: int) -> None:
        self.nbytes, self.count, self.half = nbytes, count, nbytes * count
        self.map = mmap.mmap(-1, 2 * self.half)
        # Scattered small pages made calls up to twice as long, whoever made them.
        self.map.madvise(mmap.MADV_HUGEPAGE)
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
    """The limit: O_DIRECT on one preallocated file, as many threads as kvconnect uses.

    Each call's bytes are on disk when it returns, as those of a store must be.
    """

    syncs = True

    def __init__(self, folder: str, buffer: Buffer) -> None:
        super().__init__(folder, buffer)
        self.path = f"{folder}/raw.dat"
        self.fd = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.fd, 0, buffer.half)
        self.threads = ThreadPoolExecutor(8)

    def _each(self, call, items: range, *, source: bool) -> None:
        def one(i: int) -> None:
            view = memoryview(self.buffer.view(i, source=source))
            if call(self.fd, [view], i * self.buffer.nbytes) != self.buffer.nbytes:
                raise OSError("short transfer")

        list(self.threads.map(one, items))

    def put(self, items: range) -> None:
        self._each(os.pwritev, items, source=True)
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
    options = "io_threads=8"

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
        room = 8 * buffer.half
        self.store = kvconnect.open(f"nvme://{self.where(room)}capacity={room}&{self.options}")
        self.connector = kvconnect.Connector(
            pool, kvconnect.Placement.whole(layers=1, heads=1), identity, self.store,
            timeout=300.0)  # fmt: skip
        self.hashes = kvconnect.page_hashes(range(buffer.count), 1)

    def where(self, room: int) -> str:
        """Return the location, up to where options follow."""
        return f"{self.folder}/store?"

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

    options = "io_threads=8&durability=index"


class KVConnectThreads(KVConnect):
    """The same by threads."""

    options = "io_threads=8&io=threads"


class KVConnectAio(KVConnect):
    """The same by NIXL POSIX on Linux AIO."""

    options = "io_threads=8&io=nixl-posix&nixl_api=aio"


class KVConnectUring(KVConnect):
    """The same by NIXL POSIX on io_uring."""

    options = "io_threads=8&io=nixl-posix&nixl_api=uring"


class KVConnectUringPlain(KVConnect):
    """The same without checksums: nothing that raw NIXL does not do either."""

    options = f"{KVConnectUring.options}&checksum=false"


class KVConnectGusli(KVConnect):
    """The same by NIXL GUSLI on a loop device, through the page cache; root only."""

    options = "io_threads=8&io=nixl-gusli"

    def where(self, room: int) -> str:
        with Path(f"{self.folder}/disk.img").open("wb") as image:
            image.truncate(room + (2 << 20))
        command = ["losetup", "--find", "--show", f"{self.folder}/disk.img"]
        self.device = subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout.strip()
        return f"{self.device}?index={self.folder}/index&"

    def close(self) -> None:
        super().close()
        subprocess.run(["losetup", "--detach", self.device], check=True)


class RawNixl(Contestant):
    """The limit of NIXL POSIX: one transfer a batch, an object a descriptor, one O_DIRECT file.

    Each call's bytes are on disk when it returns, as those of a store must be.
    """

    syncs = True
    api = "aio"

    def __init__(self, folder: str, buffer: Buffer) -> None:
        super().__init__(folder, buffer)
        from kvconnect_nixl.agent import Agent
        from kvconnect_nixl.rows import device_ids, file_name, plain

        path = Path(f"{folder}/nixl.dat")
        self.fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        os.posix_fallocate(self.fd, 0, buffer.half)
        self.plain = plain
        self.agent = Agent({"POSIX": {f"use_{self.api}": "true"}})
        self.agent.register("POSIX", "DRAM", plain(buffer.address, 2 * buffer.half))
        ids = device_ids(1)
        names = [file_name(path, direct=True)]
        self.agent.register("POSIX", "FILE", plain(0, buffer.half, ids), names)
        self.file = int(ids[0])

    def _move(self, op, items: range, start: int) -> None:
        at = np.array(items, dtype=np.uint64) * np.uint64(self.buffer.nbytes)
        local = self.plain(at + np.uint64(self.buffer.address + start), self.buffer.nbytes)
        remote = self.plain(at, self.buffer.nbytes, self.file)
        self.agent.submit("POSIX", op, ("DRAM", local), ("FILE", remote)).wait(300)

    def put(self, items: range) -> None:
        from kvconnect.backend import Op

        self._move(Op.STORE, items, 0)
        os.fdatasync(self.fd)

    def get(self, items: range) -> None:
        from kvconnect.backend import Op

        self._move(Op.LOAD, items, self.buffer.half)

    def again(self) -> None:
        pass

    def close(self) -> None:
        self.agent.close()
        os.close(self.fd)


class RawNixlUring(RawNixl):
    """The same on io_uring."""

    api = "uring"


OWN = {
    "raw O_DIRECT": Raw,
    "kvconnect nvme": KVConnect,
    "kvconnect nvme durability=index": KVConnectIndex,
    "kvconnect io=threads": KVConnectThreads,
    "raw NIXL aio": RawNixl,
    "kvconnect io=nixl-posix aio": KVConnectAio,
    "raw NIXL uring": RawNixlUring,
    "kvconnect io=nixl-posix uring": KVConnectUring,
    "kvconnect io=nixl-posix uring, no checksum": KVConnectUringPlain,
    "kvconnect io=nixl-gusli": KVConnectGusli,
}


def find(name: str) -> type[Contestant]:
    """Return a contestant; peers are imported only where they run."""
    if name in OWN:
        return OWN[name]
    from tests.benchmarks.peers import PEERS

    return PEERS[name]


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
    store = find(name)(folder, buffer)
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
        # Twice: what is reserved but was never written is used first, and takes longer.
        for _ in range(2):
            store.again()
            out["put_again"] = put()
    store.close()
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
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


def _as_module() -> None:
    """Run under the module's own name, so that the peers inherit from these very classes.

    LMCache installs a top-level package called ``tests``, which would hide this one.
    """
    import sys
    from importlib import import_module
    from types import ModuleType

    package = ModuleType("tests")
    package.__path__ = [str(Path(__file__).resolve().parent.parent)]
    sys.modules["tests"] = package
    import_module("tests.benchmarks.contestants").main()


if __name__ == "__main__":
    _as_module()
