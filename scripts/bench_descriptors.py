#!/usr/bin/env python3
"""Page metadata: kvconnect against SGLang's own calls, side by side in one run.

    PYTHONPATH=.:backends .venv-sglang/bin/python scripts/bench_descriptors.py [--json FILE]

Both are called on the same real host pool with the same int64 tensor of token indices, in
random page order, in alternating blocks of calls; what is compared is thread CPU time
(medians), which other processes disturb least. "cold" is a kvconnect call right after one of
SGLang's, which leaves a million Python ints in the caches where the indices were. kvconnect's
figures include looking at every index (whole, aligned, contiguous, inside the pool, no page
twice), which SGLang does not do.
The pools have 8192 pages of 80 layers x 8 heads x 128 in bf16 (61 x 576 for MLA): address
space that is never touched. Without SGLang only kvconnect is measured, on its own pools.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvconnect.foreign import wrap
from kvconnect.hostpool import HostPool

PAGES = (128, 1024, 8192)
TARGET = 50
BLOCKS = 5


@dataclass(frozen=True)
class Case:
    """A pool and a call on it."""

    name: str
    layout: str
    kind: str = "mha"
    split: int | None = None
    v_dim: int | None = None


CASES = (
    Case("page_first", "page_first"),
    Case("page_head", "page_head"),
    Case("page_head split x2", "page_head", split=2),
    Case("page_head split x8", "page_head", split=8),
    Case("layer_first", "layer_first"),
    Case("K 128, V 64 page_first", "page_first", v_dim=64),
    Case("MLA page_first", "page_first", kind="mla"),
)


@dataclass(frozen=True)
class Row:
    """What one case took, in milliseconds of thread CPU time."""

    case: str
    page_size: int
    pages: int
    pointers: int
    kvconnect_ms: float
    kvconnect_cold_ms: float | None
    sglang_ms: float | None
    ratio: float | None


def load_sglang() -> Any:
    """Return (modules, builders) of the real SGLang with an allocator that reserves nothing."""
    if importlib.util.find_spec("sglang") is None:
        return None
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.engines import sglang_pools  # imports nothing without SGLang

    modules = sglang_pools.load()
    for module in (modules.mha, modules.mla):
        module.ALLOC_MEMORY_FUNCS = {"cpu": sglang_pools.untouched}
    return modules, sglang_pools


def engine_pool(sglang: Any, case: Case, pages: int, page_size: int) -> Any:
    modules, builders = sglang
    size = {"pages": pages, "page_size": page_size}
    if case.kind == "mla":
        return builders.mla(modules, case.layout, layers=61, lora=512, rope=64, **size)
    return builders.mha(modules, case.layout, layers=80, dim=128, v_dim=case.v_dim, **size)


def own_pool(case: Case, pages: int, page_size: int) -> Any:
    """Describe a pool of our own; fewer layers, so that it fits where memory is counted."""
    mla = case.kind == "mla"
    return HostPool.allocate(
        layout=case.layout,
        pages=pages,
        page_size=page_size,
        layers=80 if case.layout == "layer_first" else 1,
        heads=1 if mla else 8,
        head_dim=8,
        v_head_dim=0 if mla else case.v_dim,
        dtype="uint8",
    )


def calls(case: Case, pool: Any) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """Return kvconnect's call and the engine's (None for a pool of our own)."""
    ours = wrap(pool)
    theirs = None if ours is pool else pool
    if case.split is None:
        return ours.page_buffer_meta, theirs and theirs.get_page_buffer_meta
    split = case.split
    engine = theirs and (lambda index: theirs.get_split_heads_page_buffer_meta(index, split))
    return lambda index: ours.split_heads_page_buffer_meta(index, split), engine


def cpu_ms(call: Callable[[], Any]) -> float:
    start = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - start) / 1e6


def measure(case: Case, pool: Any, capacity: int, page_size: int, pages: int, repeats: int) -> Row:
    order = np.random.default_rng(pages).permutation(capacity)[:pages]
    index = torch.from_numpy((order[:, None] * page_size + np.arange(page_size)).reshape(-1))
    ours, theirs = calls(case, pool)
    address, nbytes = ours(index)
    if theirs is not None:
        expected = theirs(index)
        same = address.tolist() == expected[0] and nbytes.tolist() == expected[1]
        if not same:
            raise SystemExit(f"{case.name}: kvconnect and SGLang disagree")
        del expected
    mine, cold, other = [], [], []
    for _ in range(BLOCKS):
        if theirs is not None:
            other += [cpu_ms(lambda: theirs(index)) for _ in range(repeats)]
            cold.append(cpu_ms(lambda: ours(index)))
        mine += [cpu_ms(lambda: ours(index)) for _ in range(repeats)]
    ms = statistics.median(mine)
    engine = statistics.median(other) if other else None
    return Row(
        case.name,
        page_size,
        pages,
        len(address),
        ms,
        statistics.median(cold) if cold else None,
        engine,
        engine / ms if engine is not None else None,
    )


def run(capacity: int, pages: tuple[int, ...], sizes: tuple[int, ...], repeats: int) -> list[Row]:
    sglang, rows = load_sglang(), []
    for page_size in sizes:
        for case in CASES:
            make = own_pool if sglang is None else lambda *args: engine_pool(sglang, *args)
            pool = make(case, capacity, page_size)
            rows += [measure(case, pool, capacity, page_size, n, repeats) for n in pages]
            del pool
    return rows


def table(rows: list[Row]) -> str:
    lines = [
        "| case | page size | pages | pointers | SGLang ms | kvconnect ms | cold ms | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cold = "-" if r.kvconnect_cold_ms is None else f"{r.kvconnect_cold_ms:.3f}"
        engine = "-" if r.sglang_ms is None else f"{r.sglang_ms:.3f}"
        ratio = "-" if r.ratio is None else f"{r.ratio:.0f}x"
        lines.append(
            f"| {r.case} | {r.page_size} | {r.pages} | {r.pointers} | {engine} | "
            f"{r.kvconnect_ms:.3f} | {cold} | {ratio} |"
        )
    return "\n".join(lines)


def verdict(rows: list[Row]) -> str:
    """Say where the target is met, and name every row it is asked of that falls short."""
    asked = [r for r in rows if r.ratio and r.pages >= 1024 and r.page_size > 1]
    short = [r for r in asked if r.ratio and r.ratio < TARGET]
    words = [f"{r.case}, {r.pages} pages: {r.ratio:.0f}x" for r in short]
    met = f"{len(asked) - len(short)} of {len(asked)} rows of 1024 pages and more are {TARGET}x"
    return met + (f"; short: {'; '.join(words)}" if words else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    parser.add_argument("--repeats", type=int, default=9, help="calls a block")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all?")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.quick:
        # SGLang's page_head pools need at least as many pages as layers.
        rows = run(96, (4, 16), (4, 1), 2)
    else:
        rows = run(max(PAGES), PAGES, (64, 1), options.repeats)
    machine = (
        f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, numpy {np.__version__}, torch {torch.__version__}"
    )
    print(f"{machine}; thread CPU time, medians of {BLOCKS} x {options.repeats}\n")
    print(table(rows))
    print(f"\n{verdict(rows)}")
    if options.json:
        options.json.write_text(
            json.dumps({"machine": machine, "rows": [asdict(r) for r in rows]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
