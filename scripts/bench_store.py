#!/usr/bin/env python3
"""Put and get throughput of the nvme store beside the raw limit and the peers, in one run.

    scripts/bench_store.py --dir /mnt/nvme --engines --peer sglang=PY --peer lmcache=PY

Every contestant runs in a process of its own, interleaved over the rounds so that the noise of
the machine spreads over all; medians are printed with their range, as a table and as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]
WORKER = ROOT / "tests" / "benchmarks" / "contestants.py"
OWN = ["raw O_DIRECT", "kvconnect nvme", "kvconnect nvme durability=index"]
ENGINES = [
    "kvconnect io=threads",
    "raw NIXL aio",
    "kvconnect io=nixl-posix aio",
    "raw NIXL uring",
    "kvconnect io=nixl-posix uring",
    "kvconnect io=nixl-posix uring, no checksum",
]
GUSLI = "kvconnect io=nixl-gusli"
PEERS = {
    "sglang": ["sglang file", "sglang nixl"],
    "lmcache": ["lmcache fs", "lmcache fs_native direct"],
}
FIGURES = ["put", "put_again", "get_cold", "get_warm"]


def run_one(python: str, name: str, nbytes: int, count: int, folder: str) -> dict:
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'backends'}", "LMCACHE_LOG_LEVEL": "ERROR"}
    command = [python, str(WORKER), name, "--dir", folder]
    command += ["--nbytes", str(nbytes), "--count", str(count)]
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    tail = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return {"name": name, "nbytes": nbytes, "error": tail}


def table(rows: list[dict]) -> str:
    lines = [f"{'contestant':42} {'object':>8}  " + "".join(f"{f:>24}" for f in FIGURES)]
    lines[0] += f"{'exists ms':>11}{'CPU s/GB':>10}"
    for name, nbytes in dict.fromkeys((r["name"], r["nbytes"]) for r in rows):
        mine = [r for r in rows if (r["name"], r["nbytes"]) == (name, nbytes)]
        good = [r for r in mine if "error" not in r]
        text = f"{name:42} {nbytes >> 10:>4} KiB  "
        if not good:
            lines.append(text + mine[0]["error"])
            continue
        for figure in FIGURES:
            values = [r[figure] for r in good if figure in r]
            if not values:
                text += f"{'-':>10} {'':>13}"
                continue
            span = f"[{min(values):.2f}-{max(values):.2f}]"
            text += f"{statistics.median(values):>10.2f} {span:>13}"
        asked = [r["exists_ms"] for r in good if "exists_ms" in r]
        text += f"{statistics.median(asked):>11.2f}" if asked else f"{'-':>11}"
        text += f"{statistics.median(r['put_cpu_s_per_gb'] for r in good):>10.2f}"
        lines.append(text)
    return "\n".join(lines)


def ratios(rows: list[dict]) -> str:
    """Say what the project promises of itself, as ratios within each round."""
    out = []
    for nbytes in sorted({r["nbytes"] for r in rows}):
        good = [r for r in rows if r["nbytes"] == nbytes and "error" not in r]
        by_name = {n: [r for r in good if r["name"] == n] for n in {r["name"] for r in good}}
        ours, raw = by_name.get("kvconnect nvme", []), by_name.get("raw O_DIRECT", [])
        for figure in ("put", "put_again", "get_cold"):
            base = "get_cold" if figure == "get_cold" else figure
            pairs = [o[figure] / r[base] for o, r in zip(ours, raw, strict=False)]
            if pairs:
                out.append(f"{nbytes >> 10} KiB {figure} / raw: {statistics.median(pairs):.2f}")
        out += _against_nixl(by_name, nbytes)
        peers = {n: statistics.median(r["put"] for r in v) for n, v in by_name.items()
                 if n.startswith(("sglang", "lmcache")) and v}  # fmt: skip
        if peers and ours:
            best = max(peers, key=lambda n: peers[n])
            mine = statistics.median(r["put"] for r in ours)
            out.append(f"{nbytes >> 10} KiB put / best peer ({best}): {mine / peers[best]:.2f}")
    return "\n".join(out)


def _against_nixl(by_name: dict[str, list[dict]], nbytes: int) -> list[str]:
    """Compare each NIXL engine with the same descriptors given to NIXL directly."""
    out = []
    for api in ("aio", "uring", "uring, no checksum"):
        ours = by_name.get(f"kvconnect io=nixl-posix {api}", [])
        raw = by_name.get(f"raw NIXL {api.partition(',')[0]}", [])
        for figure in FIGURES:
            pairs = [o[figure] / r[figure] for o, r in zip(ours, raw, strict=False)]
            if pairs:
                text = f"{nbytes >> 10} KiB {figure} / raw NIXL {api}"
                out.append(f"{text}: {statistics.median(pairs):.2f}")
    return out


def descriptors(count: int = 10_000) -> str:
    """Time building and posting `count` scattered descriptors, and where the time goes."""
    import mmap

    import numpy as np

    from kvconnect.backend import Op
    from kvconnect_nixl.agent import Agent
    from kvconnect_nixl.rows import device_ids, file_name, plain

    nbytes = 4096
    total = 2 * count * nbytes
    memory = np.frombuffer(mmap.mmap(-1, total), dtype=np.uint8)
    order = np.random.default_rng(1).permutation(2 * count)[:count].astype(np.uint64)
    build, post = [], []
    with tempfile.NamedTemporaryFile() as file, Agent({"POSIX": {"use_uring": "true"}}) as agent:
        os.posix_fallocate(file.fileno(), 0, total)
        agent.register("POSIX", "DRAM", plain(memory.ctypes.data, total))
        ids = device_ids(1)
        names = [file_name(Path(file.name), direct=False)]
        agent.register("POSIX", "FILE", plain(0, total, ids), names)
        for _ in range(7):
            start = time.perf_counter()
            offset = order * np.uint64(nbytes)
            local = plain(offset + np.uint64(memory.ctypes.data), nbytes)
            remote = plain(offset[::-1], nbytes, ids[0])
            built = time.perf_counter()
            posted = agent.submit("POSIX", Op.LOAD, ("DRAM", local), ("FILE", remote))
            build.append((built - start) * 1e3)
            post.append((time.perf_counter() - built) * 1e3)
            posted.wait(60)
    both = [f"{statistics.median(times):.2f} ms" for times in (build, post)]
    return f"{count} descriptors: built in {both[0]}, posted in {both[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", default="/var/tmp", help="folder on the disk to measure")
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 4], help="object sizes")
    parser.add_argument("--total-mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--engines", action="store_true", help="every engine that runs here")
    parser.add_argument("--only", action="append", help="contestants to run")
    parser.add_argument("--json", help="write all rows here")
    a = parser.parse_args()
    own = OWN + (ENGINES if a.engines else [])
    if a.engines and os.geteuid() == 0 and Path("/dev/loop-control").exists():
        own.append(GUSLI)
    contestants = [(sys.executable, name) for name in own]
    for peer in a.peer:
        name, _, python = peer.partition("=")
        contestants += [(python, each) for each in PEERS[name]]
    rows = []
    for _ in range(a.rounds):
        for mib in a.mib:
            for python, name in contestants:
                if a.only and name not in a.only:
                    continue
                row = run_one(python, name, mib << 20, a.total_mib // mib, a.dir)
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
    print(f"load {os.getloadavg()[0]:.2f}, {os.cpu_count()} CPU, GB/s, medians [range]")
    print(table(rows))
    print(ratios(rows))
    if a.engines:
        print(descriptors())
    if a.json:
        Path(a.json).write_text(json.dumps(rows, indent=1))
    return 1 if any("error" in r for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
