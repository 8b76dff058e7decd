#!/usr/bin/env python3
"""How the nvme index behaves as a store grows: bytes per object, open, and `exists`.

scripts/bench_index.py --objects 10000 1000000 10000000 --dir /var/tmp

The objects are simulated (their payload is never written), the index is real.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]


def probe(folder: str, objects: int) -> dict:
    """Open the store in this fresh process and ask."""
    import numpy as np

    import kvconnect
    from kvconnect_nvme.simulate import simulated_key

    rng = np.random.default_rng(1)
    started = time.perf_counter()
    store = kvconnect.open(f"nvme://{folder}?durability=none")
    out = {"objects": objects, "open_s": time.perf_counter() - started}
    with store:
        asked = [simulated_key(int(i)) for i in rng.integers(0, objects, 8192)]
        absent = [simulated_key(objects + int(i)) for i in rng.integers(0, objects, 8192)]
        for name, keys, hits in (("hit", asked, True), ("miss", absent, False)):
            times = []
            for _ in range(9):
                started = time.perf_counter()
                found = store.exists(keys, [4096] * len(keys))
                times.append((time.perf_counter() - started) * 1e3)
                if found.any() != hits or found.all() != hits:
                    raise RuntimeError("wrong answers")
            out[f"exists_8192_{name}_ms"] = statistics.median(times)
            out[f"exists_8192_{name}_first_ms"] = times[0]
        stats = store.stats()
        out["presence"] = stats["presence"]
        out["presence_bytes_per_object"] = stats["presence_bytes"] / objects
        # The index is mapped: its pages belong to the page cache and are shared by all.
        lines = Path("/proc/self/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        out["own_memory_mib"] = int(status["RssAnon"].split()[0]) / 1024
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--dir", default="/var/tmp")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.probe:
        print(json.dumps(probe(a.probe, a.objects[0])))
        return 0
    from kvconnect_nvme.simulate import fill

    for objects in a.objects:
        folder = tempfile.mkdtemp(prefix="bench-index-", dir=a.dir)
        try:
            started = time.perf_counter()
            each = fill(folder, objects)
            seconds = time.perf_counter() - started
            command = [sys.executable, __file__, "--probe", folder, "--objects", str(objects)]
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
            row = json.loads(done.stdout)
            row |= {"index_bytes_per_object": each, "fill_s": seconds}
            row = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
            print(json.dumps(row), flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
