#!/usr/bin/env python3
"""Throughput between hosts on shaped links, as a share of the line rate.

    sudo PYTHONPATH=.:backends .venv/bin/python scripts/bench_cluster.py [--json FILE] [--quick]

Two hosts of `Cluster.local`, whose links let so much through each way. Measured are loads from a
Mooncake store whose memory lies on the other host, and transfers from a prefill to a decode rank;
bytes and seconds of whole calls, so that planning, confirmation and checksums count, and what the
tests do themselves (filling and comparing pages) does not. "-" is a link without a limit: what
two network namespaces of this machine can do, with sender, receiver and kernel on its CPUs.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]

MODEL = """
[model]
layers = 16
heads = 8
head_dim = 128
v_head_dim = 128
dtype = "bfloat16"
unit = 64
"""
HEAD = """
name = "bench"
about = "throughput of one link"
hosts = 2
disk_mib = 32
seconds = {{short = {seconds}, full = {seconds}}}
limits = {{calls = 1, pages = 1, rss_mib = 4096}}
"""
PAIR = """
[[pairs]]
name = "pd"
transport = "{transport}"
batch = {batch}
deadline = 30.0
prefill = {{hosts = [0], layout = "page_first", page_size = 64, pages = 40}}
decode = {{hosts = [1], layout = "page_first", page_size = 64, pages = 40}}
endpoint = {{ping = 0.5, peer_timeout = 10.0}}
"""
STORE = """
[[services]]
name = "master"
kind = "mooncake-master"
host = 0
[[services]]
name = "owner"
kind = "mooncake-owner"
host = 0
of = "master"
options = {{mib = 512}}
[[groups]]
name = "reader"
hosts = [1]
layout = "page_first"
store = "master"
pages = 40
universe = {batch}
batch = {batch}
deadline = 30.0
roles = ["write", "read"]
"""
WAYS = {
    "P/D, Mooncake": (PAIR, "mooncake", "prefill"),
    "P/D, NIXL (UCX)": (PAIR, "nixl", "prefill"),
    "L3 load, Mooncake": (STORE, "", "read"),
}
RATES = {"1gbit": 125e6, "10gbit": 1250e6, None: None}


def measure(way: str, rate: str | None, seconds: float, batch: int) -> dict:
    """Return bytes a second of one way over one link, best call and all calls."""
    from kvconnect.testing.cluster import catalog
    from kvconnect.testing.cluster.cluster import Cluster
    from kvconnect.testing.cluster.recovery import calls, good
    from kvconnect.testing.cluster.runner import Runner

    body, transport, role = WAYS[way]
    text = HEAD.format(seconds=seconds) + MODEL + body.format(transport=transport, batch=batch)
    scenario = catalog.parse(text, way)
    with (
        tempfile.TemporaryDirectory() as logs,
        Cluster.local(2, disk=32 << 20, rate=rate, directory=Path(logs)) as cluster,
    ):
        ended = Runner(scenario, cluster, seed=1, seconds=seconds).run()
    if ended.findings:
        raise SystemExit(f"{way}, {rate}: {ended.findings[0].words}")
    names = {member.name for member in ended.run.members if role in member.roles}
    made = [
        one.event
        for name, ones in calls(ended.run.entries).items()
        if name in names
        for one in ones
        if one.at >= 0 and one.event.op in {"load", "transfer"} and good(one.event)
    ]
    line = RATES[rate]
    mean = sum(call.nbytes for call in made) / sum(call.seconds for call in made)
    best = max(call.nbytes / call.seconds for call in made)
    return {
        "way": way,
        "rate": rate or "-",
        "calls": len(made),
        "mib_a_call": made[0].nbytes / 2**20,
        "gb_per_s": mean / 1e9,
        "best_gb_per_s": best / 1e9,
        "of_line": None if line is None else mean / line,
        "best_of_line": None if line is None else best / line,
    }


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    parser.add_argument("--seconds", type=float, default=12.0, help="of load, for each row")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--quick", action="store_true", help="does it run at all?")
    options = parser.parse_args()
    seconds, batch = (2.0, 2) if options.quick else (options.seconds, 16)
    rates = ["1gbit"] if options.quick else list(RATES)
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}\n")
    print("| way | link | calls | MiB a call | GB/s | of the line | best call | of the line |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for way in options.ways:
        for rate in rates:
            row = measure(way, rate, seconds, batch)
            rows.append(row)
            print(
                f"| {way} | {row['rate']} | {row['calls']} | {row['mib_a_call']:.0f} | "
                f"{row['gb_per_s']:.3f} | {share(row['of_line'])} | {row['best_gb_per_s']:.3f} | "
                f"{share(row['best_of_line'])} |",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
