#!/usr/bin/env python3
"""Measure Mooncake through kvconnect against the library's own batch calls, in one run.

    scripts/bench_mooncake.py [--objects 128] [--rounds 7] [--threads 4] [--json FILE]

A master and an owner of a segment run as processes of their own on this host; all bytes cross
loopback TCP. Raw is `batch_put_from` and `batch_get_into` of 1 MiB objects from one registered
buffer; kvconnect moves the same memory in one batch, with and without checksums. Rounds
alternate; the ratio is the median of the rounds' own ratios, as a busy moment hits a round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]

import numpy as np  # noqa: E402

from kvconnect.backend import Batch, Op  # noqa: E402
from kvconnect.region import Region  # noqa: E402
from kvconnect_mooncake import library, open_backend  # noqa: E402
from kvconnect_mooncake.master import MasterProcess  # noqa: E402

SIZE = 1 << 20


def owner(address: str, nbytes: int) -> subprocess.Popen[str]:
    """Start a process that gives a segment to the store until its input ends."""
    code = (
        "import sys; from kvconnect_mooncake import library\n"
        "store = library.load('tcp').MooncakeDistributedStore()\n"
        f"code = store.setup('127.0.0.1', 'P2PHANDSHAKE', {nbytes}, 4 << 20, 'tcp', '', "
        f"{address!r})\n"
        "print('code', code, flush=True); sys.stdin.read(); store.close()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("code "):
            assert line.strip() == "code 0", line
            return process
    raise SystemExit("the owner of the segment did not start")


class Raw:
    """The library's own calls."""

    def __init__(self, client, config, base: int, count: int) -> None:
        self.store, self.config = client, config
        self.addresses = [base + i * SIZE for i in range(count)]
        self.sizes = [SIZE] * count

    def put(self, keys):
        """Store all objects."""
        assert set(self.store.batch_put_from(keys, self.addresses, self.sizes, self.config)) == {0}

    def get(self, keys):
        """Load all objects."""
        assert set(self.store.batch_get_into(keys, self.addresses, self.sizes)) == {SIZE}

    def drop(self, keys):
        """Remove all objects."""
        self.store.batch_remove(keys, True)


class Ours:
    """The same memory through a backend."""

    def __init__(self, backend, base: int, count: int) -> None:
        self.backend, self.count = backend, count
        self.address = np.arange(count, dtype=np.uint64) * np.uint64(SIZE) + np.uint64(base)
        self.nbytes = np.full(count, SIZE, dtype=np.uint64)
        self.first = np.arange(count + 1, dtype=np.int64)

    def _move(self, op, keys):
        batch = Batch(op, keys, self.address, self.nbytes, self.first)
        outcome = self.backend.submit(batch).wait(60)
        assert outcome.prefix == self.count, dict(outcome.causes)

    def put(self, keys):
        """Store all objects."""
        self._move(Op.STORE, keys)

    def get(self, keys):
        """Load all objects."""
        self._move(Op.LOAD, keys)

    def drop(self, keys):
        """Remove all objects."""
        self.backend.core.client.remove(self.backend.core.names.names(keys), force=True)


def measure(ways, count: int, rounds: int):
    """Return GB/s by way and direction, a list of one figure a round."""
    rates = {name: {"put": [], "get": []} for name in ways}
    for number in range(rounds + 1):
        order = list(ways) if number % 2 else list(reversed(ways))
        for name in order:
            keys = [f"{name.replace(' ', '-')}-{number}-{i}" for i in range(count)]
            for direction in ("put", "get"):
                begin = time.perf_counter()
                getattr(ways[name], direction)(keys)
                seconds = time.perf_counter() - begin
                if number:  # the first round touches the memory
                    rates[name][direction].append(count * SIZE / seconds / 1e9)
            ways[name].drop(keys)
    return rates


def table(rates) -> str:
    """Return medians, spreads and the ratio to raw as Markdown."""
    lines = ["| way | put GB/s | of raw | get GB/s | of raw |", "|---|---|---|---|---|"]
    for name, both in rates.items():
        cells = []
        for direction in ("put", "get"):
            median = statistics.median(both[direction])
            low, high = min(both[direction]), max(both[direction])
            pairs = zip(both[direction], rates["raw"][direction], strict=True)
            ratio = statistics.median(ours / raw for ours, raw in pairs)
            cells += [f"{median:.2f} [{low:.2f}..{high:.2f}]", f"{ratio:.2f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--objects", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", default="4")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    memory = np.random.default_rng(0).integers(0, 256, asked.objects * SIZE, dtype=np.uint8)
    region = Region("bench", int(memory.ctypes.data), memory.nbytes)
    with MasterProcess(None, lease=10.0) as master:
        process = owner(master.address, 6 * memory.nbytes + (64 << 20))
        try:
            with (
                open_backend(
                    master.address, {"checksum": "false", "threads": asked.threads}
                ) as plain,
                open_backend(master.address, {"threads": asked.threads}) as checked,
                plain.register([region]),
                checked.register([region]),
            ):
                module = library.load("tcp")
                client = plain.core.client._store  # noqa: SLF001 - the raw side of the comparison
                base, count = region.address, asked.objects
                ways = {
                    "raw": Raw(client, module.ReplicateConfig(), base, count),
                    "kvconnect": Ours(plain, base, count),
                    "kvconnect checksum": Ours(checked, base, count),
                }
                rates = measure(ways, count, asked.rounds)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(20)
    load = os.getloadavg()
    print(table(rates))
    print(f"{count} objects of 1 MiB, {asked.rounds} rounds; load before and during: {load}")
    if asked.json:
        asked.json.write_text(json.dumps({"load": load, "objects": count, "GB/s": rates}, indent=1))


if __name__ == "__main__":
    main()
