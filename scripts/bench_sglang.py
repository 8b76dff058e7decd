#!/usr/bin/env python3
"""L3 throughput of SGLang's storage backends through its real host pool and controller.

    scripts/bench_sglang.py --dir /mnt/nvme [--mib 1 4] [--rounds 5] [--json FILE]

Run it with the Python of scripts/setup-sglang; the nixl and mooncake backends need the packages
nixl-cu12 and mooncake-transfer-engine-non-cuda in there, and a peer that cannot run is named.
Each contestant is a process of its own; they take turns, round by round, so that the noise of the
machine spreads over all. A put counts as synced once all files of the contestant are on disk,
whether it syncs them itself or not; for a cold get its files are dropped from the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]
FIGURES = ["put", "put_synced", "get_warm", "get_cold"]
ROUND_SECONDS = 600.0


class Worker:
    """A contestant's process; it imports SGLang once and then runs a round when told."""

    def __init__(self, name: str, folder: str) -> None:
        paths = [str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p)}
        env["OMP_NUM_THREADS"] = "1"
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.sglang_contestants", name, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env=env,
        )

    def round(self, mib: int, count: int, number: int) -> dict:
        """Run one round; a process that dies or hangs is an error row."""
        return {"name": self.name, "nbytes": mib << 20} | self._ask(f"{mib} {count} {number}")

    def ready(self) -> None:
        """Wait until the process has imported SGLang, so that no round pays for another's."""
        self._ask("0 0 0")

    def _ask(self, line: str) -> dict:
        stop = threading.Timer(ROUND_SECONDS, self._process.kill)
        stop.start()
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())
        except (OSError, ValueError):
            return {"error": f"the process ended: {self._tail()}"}
        finally:
            stop.cancel()

    def _tail(self) -> str:
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1][:300] if lines else f"exit status {self._process.poll()}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.stdin.close()
            self._process.wait(60)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


def table(rows: list[dict]) -> str:
    lines = [f"{'backend':32} {'page':>6}" + "".join(f"{name:>22}" for name in FIGURES)]
    lines[0] += f"{'exists ms':>11}{'CPU s/GB put, get':>19}"
    for name, nbytes in dict.fromkeys((r["name"], r["nbytes"]) for r in rows):
        good = _good(rows, name, nbytes)
        if not good:
            continue
        text = f"{name:32} {nbytes >> 20:>2} MiB"
        for figure in FIGURES:
            values = [r[figure] for r in good if figure in r]
            if values:
                span = f"[{min(values):.2f}-{max(values):.2f}]"
                text += f"{statistics.median(values):>8.2f} {span:>13}"
            else:
                text += f"{'-':>8} {'':>13}"
        text += f"{statistics.median(r['exists_ms'] for r in good):>11.2f}"
        cpu = [statistics.median(r[f"{op}_cpu"] for r in good) for op in ("put", "get_warm")]
        lines.append(text + f"{cpu[0]:>11.2f}, {cpu[1]:.2f}")
    return "\n".join(lines)


def _good(rows: list[dict], name: str, nbytes: int) -> list[dict]:
    return [r for r in rows if (r["name"], r["nbytes"]) == (name, nbytes) and "error" not in r]


def ratios(rows: list[dict]) -> str:
    """Compare with the best peer that survives a restart, by medians of one run."""
    from tests.benchmarks.sglang_contestants import PEERS

    out = []
    for nbytes in dict.fromkeys(r["nbytes"] for r in rows):
        ours = _good(rows, "kvconnect nvme", nbytes)
        for figure in FIGURES[1:]:
            peers = {}
            for name in sorted(PEERS):
                values = [r[figure] for r in _good(rows, name, nbytes) if "put_synced" in r]
                if values:
                    peers[name] = statistics.median(values)
            if ours and peers:
                best = max(peers, key=peers.__getitem__)
                mine = statistics.median(r[figure] for r in ours)
                ratio = mine / peers[best]
                out.append(f"{nbytes >> 20} MiB {figure}: {ratio:.2f} x the best peer ({best})")
    return "\n".join(out)


def main() -> int:
    from tests.benchmarks.sglang_contestants import CONTESTANTS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default="/var/tmp", help="folder on the disk to measure")
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 4], help="page sizes")
    parser.add_argument("--total-mib", type=int, default=1024, help="of one pass")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", choices=CONTESTANTS, help="who takes part")
    parser.add_argument("--json", type=Path, help="write all rows here")
    a = parser.parse_args()
    rows = []
    with ExitStack() as stack:
        workers = []
        for name in a.only or CONTESTANTS:
            folder = tempfile.TemporaryDirectory(prefix="kvconnect-bench-", dir=a.dir)
            workers.append(stack.enter_context(Worker(name, stack.enter_context(folder))))
        for worker in workers:
            worker.ready()
        for mib in a.mib:
            for number in range(a.rounds):
                for worker in workers:
                    load = os.getloadavg()[0]
                    row = worker.round(mib, a.total_mib // mib, number) | {"load": load}
                    rows.append(row | {"round": number})
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    loads = [r["load"] for r in rows]
    print(f"{os.cpu_count()} CPU, load {min(loads):.2f} to {max(loads):.2f}, GB/s, medians [range]")
    print(table(rows))
    print(ratios(rows))
    for name, error in dict.fromkeys((r["name"], r["error"]) for r in rows if "error" in r):
        print(f"could not run: {name}: {error}")
    if a.json:
        a.json.write_text(json.dumps(rows, indent=1))
    ours = [r for r in rows if r["name"].startswith("kvconnect")]
    return 1 if any("error" in r for r in ours) else 0


if __name__ == "__main__":
    sys.exit(main())
