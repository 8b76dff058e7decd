#!/usr/bin/env python3
"""Measure ``nixl+s3://`` beside raw NIXL OBJ transfers and boto3, in one run.

    scripts/bench_s3.py                                 a moto server of its own
    scripts/bench_s3.py --endpoint URL --bucket NAME    a server that runs (AWS credentials
                                                        from the environment)

One line per object size: MB/s of the raw transfers (one request per object, `--threads` of them
at once), the store and boto3, writing and reading the same objects; the store's share of raw; and
ms of CPU per object. All run in turn in each round; the medians count. moto is written in
Python: with it the shares mean something, the MB/s do not.
"""

import argparse
import contextlib
import mmap
import os
import socket
import statistics
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]

from kvconnect.backend import Batch, Op  # noqa: E402
from kvconnect.region import Region  # noqa: E402
from kvconnect_nixl.rows import device_ids, plain  # noqa: E402
from kvconnect_nixl.s3 import open_backend  # noqa: E402

LIMIT = 120.0


@contextlib.contextmanager
def moto():
    """Start a server on a free port and stop it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "bench")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "bench")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if time.monotonic() > end:
                raise SystemExit("moto_server does not start; install moto[server]")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(10)


class Memory:
    """`count` objects of `nbytes` in one buffer."""

    def __init__(self, nbytes, count):
        self.nbytes, self.count = nbytes, count
        self.buffer = mmap.mmap(-1, nbytes * count)
        self.view = np.frombuffer(self.buffer, dtype=np.uint8)
        self.view[:] = np.random.default_rng(1).integers(0, 256, len(self.view), dtype=np.uint8)
        self.address = self.view.ctypes.data
        self.keys = [uuid.uuid4().hex * 2 for _ in range(count)]

    def piece(self, index):
        """Return the memory of one object."""
        return memoryview(self.view)[index * self.nbytes : (index + 1) * self.nbytes]

    def batch(self, op):
        """Describe all objects."""
        rows = np.arange(self.count + 1, dtype=np.int64)
        address = np.uint64(self.address) + rows[:-1].astype(np.uint64) * np.uint64(self.nbytes)
        return Batch(op, self.keys, address, np.full(self.count, self.nbytes, np.uint64), rows)


def by_store(store, memory, op):
    outcome = store.submit(memory.batch(op)).wait(LIMIT)
    assert outcome.prefix == memory.count, outcome


def by_raw(agent, memory, op, threads):
    """Keep `threads` transfers under way, one per object, straight from and to memory."""
    todo, flying = list(range(memory.count)), []
    while todo or flying:
        while todo and len(flying) < threads:
            index, device = todo.pop(), device_ids(1)
            name = f"raw/{memory.keys[index]}"
            held = agent.register("OBJ", "OBJ", plain(0, memory.nbytes, device), [name])
            local = plain(memory.address + index * memory.nbytes, memory.nbytes)
            remote = plain(0, memory.nbytes, device)
            flying.append((agent.submit("OBJ", op, ("DRAM", local), ("OBJ", remote)), held))
        ended = [one for one in flying if one[0].poll()]
        for posted, held in ended:
            posted.wait(0)
            held.close()
        flying = [one for one in flying if one not in ended]
        if not ended:
            time.sleep(2e-4)


def by_boto(client, pool, bucket, memory, op):
    def put(index):
        name = f"boto/{memory.keys[index]}"
        client.put_object(Bucket=bucket, Key=name, Body=bytes(memory.piece(index)))

    def get(index):
        body = client.get_object(Bucket=bucket, Key=f"boto/{memory.keys[index]}")["Body"]
        memory.piece(index)[:] = body.read()

    list(pool.map(put if op is Op.STORE else get, range(memory.count)))


def measure(ways, op, memory, rounds):
    """Run all ways in turn; return (MB/s, CPU ms per object) medians by name."""
    figures = {name: ([], []) for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            began, cpu = time.perf_counter(), time.process_time()
            run(op)
            seconds = time.perf_counter() - began
            figures[name][0].append(memory.nbytes * memory.count / seconds / 1e6)
            figures[name][1].append((time.process_time() - cpu) * 1e3 / memory.count)
    return {
        name: (statistics.median(speeds), statistics.median(cpus))
        for name, (speeds, cpus) in figures.items()
    }


def bench(endpoint, bucket, arguments):
    import boto3

    options = {"endpoint": endpoint, "threads": str(arguments.threads)}
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
        client.create_bucket(Bucket=bucket)
    pool = ThreadPoolExecutor(arguments.threads)
    print(
        f"{'object':>8} {'op':>5} {'raw':>8} {'store':>8} {'boto3':>8} {'share':>6}   CPU ms/object"
    )
    with pool, open_backend(bucket, options) as store:
        for nbytes in arguments.sizes:
            memory = Memory(nbytes, max(arguments.total // nbytes, 4))
            # Beside the store's own: its registration of the slots covers none of this memory.
            agent = store.core.wire._agent  # noqa: SLF001 - raw means the same agent
            region = Region("bench", memory.address, memory.nbytes * memory.count)
            held = agent.register("OBJ", "DRAM", plain(region.address, region.nbytes))
            with held, store.register([region]):
                ways = {
                    "raw": lambda op, m=memory, a=agent: by_raw(a, m, op, arguments.threads),
                    "store": lambda op, m=memory: by_store(store, m, op),
                    "boto3": lambda op, m=memory: by_boto(client, pool, bucket, m, op),
                }
                for op in Op:
                    report(op, nbytes, measure(ways, op, memory, arguments.rounds))
            store.remove(memory.keys)


def report(op, nbytes, found):
    speeds = " ".join(f"{speed:8.0f}" for speed, _ in found.values())
    cpus = ", ".join(f"{name} {cpu:.2f}" for name, (_, cpu) in found.items())
    share = found["store"][0] / found["raw"][0]
    print(f"{nbytes >> 10:>6}Ki {op.value:>5} {speeds} {share:6.2f}   {cpus}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--endpoint", help="of a server that runs; default: a moto server")
    parser.add_argument("--bucket", default="kvconnect-bench")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << 20, 4 << 20])
    parser.add_argument("--total", type=int, default=64 << 20, help="bytes per round and way")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.endpoint:
        bench(arguments.endpoint, arguments.bucket, arguments)
        return
    with moto() as endpoint:
        bench(endpoint, arguments.bucket, arguments)


if __name__ == "__main__":
    main()
