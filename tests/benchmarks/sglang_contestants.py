"""Worker of the SGLang benchmark: one storage backend through the real pool and controller.

``python sglang_contestants.py NAME FOLDER`` answers each line ``MIB PAGES ROUND`` on its standard
input with one JSON line: a fresh host pool, a fresh store, one put, one warm and one cold get of
all pages, 128 a call as SGLang's controller cuts them, every byte compared after each get. With
no pages it answers once it is ready.
"""

import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.benchmarks.peers import _alias_nixl
from tests.engines import sglang_pools
from tests.engines.sglang_rank import EXTRA, Rank, config, engine, keys

SHAPE = {"page_size": 64, "heads": 8, "dim": 128}
LAYER_BYTES = 2 * 64 * 8 * 128 * 2
SETTLE = 0.2
"""Seconds between passes, so that one does not pay for the write-back of another."""


class Driver(Rank):
    """A backend behind the controller, SGLang's own ones included; see `Rank` for the rest."""

    def __init__(self, pool, name, extra, *, in_place):
        self.pool = pool
        self.config = replace(config(pool, "", metrics=False), extra_config=dict(extra))
        self.backend = engine().factory.create_backend(name, self.config, pool)
        self.backend.register_mem_pool_host(pool)
        self.backend.on_host_pools_registered()
        self.config.extra_config["interface_v1"] = in_place
        self._controller = self._made(threads=False)

    def close(self):
        if hasattr(self.backend, "close"):
            self.backend.close()


class Contestant:
    """How a backend is opened on an empty folder that may come to hold `nbytes`."""

    files = True
    """Whether it keeps pages in files, which can be synced and read cold."""

    def __init__(self, folder):
        self.folder = folder

    def open(self, pool, nbytes):
        raise NotImplementedError

    def close(self):
        """Stop what was started for all rounds."""


class KVConnect(Contestant):
    options = ""

    def url(self, nbytes):
        room = nbytes * 5 // 4 + (64 << 20)
        return f"nvme://{self.folder}/store?capacity={room}{self.options}"

    def open(self, pool, nbytes):
        extra = EXTRA | {"url": self.url(nbytes), "interface_v1": 1, "weights": "bench"}
        return Driver(pool, "dynamic", extra, in_place=True)


class KVConnectIndex(KVConnect):
    options = "&durability=index"


class KVConnectCached(KVConnect):
    options = "&direct=off"


class KVConnectMemory(KVConnect):
    files = False

    def url(self, nbytes):
        return "memory://"


class File(Contestant):
    def open(self, pool, nbytes):
        return Driver(pool, "file", {"file_storage_path": self.folder}, in_place=False)


class Nixl(Contestant):
    extra = {}  # noqa: RUF012 - a constant

    def open(self, pool, nbytes):
        _alias_nixl()
        os.environ["SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"] = self.folder
        os.environ["SGLANG_HICACHE_NIXL_BACKEND_PLUGIN"] = "POSIX"
        return Driver(pool, "nixl", self.extra, in_place=True)


class NixlBuffered(Nixl):
    extra = {"use_direct_io": False}  # noqa: RUF012 - a constant


class Mooncake(Contestant):
    """One process and its own master on loopback: the library copies in memory."""

    files = False

    def __init__(self, folder):
        super().__init__(folder)
        program = shutil.which("mooncake_master", path=Path(sys.executable).parent)
        if program is None:
            raise FileNotFoundError("mooncake_master is not installed beside this Python")
        rpc, metrics = _free_port(), _free_port()
        self.master = subprocess.Popen(
            [program, f"--rpc_port={rpc}", f"--metrics_port={metrics}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.environ.update(
            MOONCAKE_MASTER=f"127.0.0.1:{rpc}", MOONCAKE_PROTOCOL="tcp",
            MOONCAKE_TE_META_DATA_SERVER="P2PHANDSHAKE", MOONCAKE_LOCAL_HOSTNAME="127.0.0.1",
        )  # fmt: skip
        _wait_for_port(rpc)

    def open(self, pool, nbytes):
        os.environ["MOONCAKE_GLOBAL_SEGMENT_SIZE"] = str(nbytes * 3 // 2 + (256 << 20))
        return Driver(pool, "mooncake", {}, in_place=True)

    def close(self):
        self.master.terminate()
        self.master.wait(10)


CONTESTANTS = {
    "kvconnect nvme": KVConnect,
    "kvconnect nvme durability=index": KVConnectIndex,
    "kvconnect nvme direct=off": KVConnectCached,
    "kvconnect memory": KVConnectMemory,
    "file": File,
    "nixl": Nixl,
    "nixl use_direct_io=false": NixlBuffered,
    "mooncake": Mooncake,
}
PEERS = {"file", "nixl", "nixl use_direct_io=false", "mooncake"}


def _free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _wait_for_port(port, seconds=20.0):
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def files_in(folder):
    return [path for path in Path(folder).rglob("*") if path.is_file()]


def sync(folder):
    """Make every file safe; what was synced already costs next to nothing."""
    for path in files_in(folder):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def forget(folder):
    """Drop these files, and no others, from the page cache."""
    for path in files_in(folder):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def timed(call):
    """Return (result, seconds, seconds of this process's CPU)."""
    cpu, started = time.process_time(), time.perf_counter()
    result = call()
    return result, time.perf_counter() - started, time.process_time() - cpu


def run_round(sg, contestant, mib, count, tag):
    """Return one row of figures: GB/s, and what they cost in CPU seconds a GB."""
    layers = (mib << 20) // LAYER_BYTES
    pool = sglang_pools.mha(sg, "page_first", pages=2 * count, layers=layers, **SHAPE)
    flat = pool.kv_buffer.view(sg.torch.uint8).reshape(2, 2 * count, -1).numpy()
    fill = np.random.SFC64(mib * 1000 + tag)
    for side in flat:
        for page in range(count):
            side[page] = fill.random_raw(side.shape[1] // 8).view(np.uint8)
    gigabytes = (mib << 20) * count / 1e9
    names, source, target = keys(f"{tag}", count), range(count), range(count, 2 * count)
    driver = contestant.open(pool, (mib << 20) * count)
    row = {"nbytes": mib << 20, "count": count}
    try:
        stored, seconds, cpu = timed(lambda: driver.put(names, source))
        _require(stored == count, f"{stored} of {count} pages were stored")
        row["put"], row["put_cpu"] = gigabytes / seconds, cpu / gigabytes
        if contestant.files:
            _, more, _ = timed(lambda: sync(contestant.folder))
            row["put_synced"] = gigabytes / (seconds + more)
        time.sleep(SETTLE)
        present, seconds, _ = timed(lambda: driver.exists(names))
        _require(present == count, f"{present} of {count} pages were found")
        row["exists_ms"] = seconds * 1e3
        for kind in ("get_warm", "get_cold") if contestant.files else ("get_warm",):
            flat[:, count:] = 0
            if kind == "get_cold":
                forget(contestant.folder)
            loaded, seconds, cpu = timed(lambda: driver.get(names, target))
            _require(loaded == count, f"{loaded} of {count} pages were loaded")
            _require(np.array_equal(flat[:, :count], flat[:, count:]), "bytes differ")
            row[kind] = gigabytes / seconds
            row[f"{kind}_cpu"] = cpu / gigabytes
    finally:
        driver.close()
    return row


def _require(fact, text):
    if not fact:
        raise RuntimeError(text)


def main():
    name, folder = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is not an answer
    contestant = None
    try:
        sg = sglang_pools.load()
        engine()
        sg.torch = sys.modules["torch"]
        sg.torch.set_num_threads(1)
        for line in sys.stdin:
            mib, count, tag = map(int, line.split())
            if not count:
                answers.write("{}\n")
                continue
            try:
                contestant = contestant or CONTESTANTS[name](folder)
                row = run_round(sg, contestant, mib, count, tag)
            except Exception as error:  # noqa: BLE001 - a peer that cannot run is a row, too
                row = {"nbytes": mib << 20, "error": f"{type(error).__name__}: {error}"[:300]}
            gc.collect()
            for path in list(Path(folder).iterdir()):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            answers.write(json.dumps({"name": name, **row}) + "\n")
    finally:
        if contestant is not None:
            contestant.close()


if __name__ == "__main__":
    main()
