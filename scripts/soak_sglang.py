#!/usr/bin/env python3
"""Random load on kvconnect through SGLang's own controller threads, every page verified.

    scripts/soak_sglang.py --seconds 600 [--url URL] [--json FILE]

Needs the environment of scripts/setup-sglang. Two engines share one store: backups, hit
queries and prefetches run at once, pool pages are reused all the time, the store evicts when it
is small. Exit code 1 on any error, any wrong byte, and when open files, threads or memory grow.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--url", help="store; by default a temporary nvme one that has to evict")
    parser.add_argument("--capacity", default="256MiB", help="of the temporary store")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--pages", type=int, default=256, help="pages of each host pool")
    parser.add_argument("--json", type=Path, help="write the report here as well")
    a = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "backends")]
    warnings.simplefilter("ignore")  # what SGLang and its dependencies say on import
    from tests.engines import sglang_pools
    from tests.engines.sglang_soak import soak

    with tempfile.TemporaryDirectory(prefix="kvconnect-soak-", dir="/var/tmp") as folder:
        url = a.url or f"nvme://{folder}/store?capacity={a.capacity}"
        report = soak(
            sglang_pools.load(),
            url,
            seconds=a.seconds,
            seed=a.seed,
            engines=a.engines,
            pages=a.pages,
        )
    report["load"] = os.getloadavg()[0]
    show(report)
    if a.json:
        a.json.write_text(json.dumps(report, indent=1))
    return 1 if report["errors"] else 0


def show(report: dict) -> None:
    print(f"{report['seconds']:g} s, seed {report['seed']}, {report['url']}, load {report['load']}")
    for name, count in report["counts"].items():
        print(f"  {name}: {count}")
    first, last = report["first"], report["last"]
    print("  " + ", ".join(f"{name} {first[name]} -> {last[name]}" for name in first))
    for text in report["errors"]:
        print(f"ERROR {text}")
    print("FAILED" if report["errors"] else "no error")
    print(json.dumps(report))


if __name__ == "__main__":
    sys.exit(main())
