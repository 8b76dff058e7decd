#!/usr/bin/env python3
"""Peer transports: how near transfers between pools of different TP come to the raw library.

scripts/bench_peers.py --transports mooncake nixl shm --rounds 5 --json peers.json

One prefill rank of TP4 and two decode ranks of TP8 in this process; pushes, no checksums. Each
contestant takes turns with 2 MiB runs by the raw library, so that a busy moment hits both.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]

import numpy as np  # noqa: E402

from kvconnect.disagg.carry import carry  # noqa: E402
from kvconnect.disagg.conform import Side  # noqa: E402
from kvconnect.disagg.decode import DecodeEndpoint  # noqa: E402
from kvconnect.disagg.options import EndpointOptions  # noqa: E402
from kvconnect.disagg.pair_plan import plan_pair  # noqa: E402
from kvconnect.disagg.pairs import share_of  # noqa: E402
from kvconnect.disagg.prefill import PrefillEndpoint  # noqa: E402
from kvconnect.disagg.transport import Runs, Way  # noqa: E402
from kvconnect.disagg.transports import open_transport  # noqa: E402
from kvconnect.hostmem import allocate  # noqa: E402
from kvconnect.hostpool import HostPool  # noqa: E402
from kvconnect.identity import Identity  # noqa: E402
from kvconnect.placement import Placement, Span  # noqa: E402
from kvconnect.region import Region  # noqa: E402
from kvconnect_nixl.peers_agent import UCX_DEFAULTS  # noqa: E402

RUN = 2 << 20
HEADS, DIM, PAGE = 8, 128, 64
WAIT = 120.0


def seconds(work):
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextlib.contextmanager
def as_it_comes():
    """Undo what our agents set of UCX's variables while one is made that is not ours."""
    ours = {name: os.environ.pop(name) for name in UCX_DEFAULTS if name in os.environ}
    try:
        yield
    finally:
        os.environ |= ours


def memory(stack, nbytes, label, value):
    """Return the address of `nbytes` bytes that are there, not only mapped."""
    held = stack.enter_context(allocate(nbytes, label, pin=False))
    ctypes.memset(held.address, value, nbytes)
    return held.address


class RawMooncake:
    """Two engines, one call with a run per entry."""

    def __init__(self, stack, nbytes):
        from kvconnect_mooncake.library import load

        module = load("tcp", "mooncake.engine")
        self.here, self.there = (module.TransferEngine() for _ in range(2))
        at = []
        for engine, value in ((self.here, 1), (self.there, 0)):
            if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
                raise RuntimeError("the engine does not start")
            at.append(memory(stack, nbytes, "raw", value))
            engine.register_memory(at[-1], nbytes)
        self.session = f"127.0.0.1:{self.there.get_rpc_port()}"
        self.rows = [[a + i for i in range(0, nbytes, RUN)] for a in at]

    def __call__(self):
        """Move everything once."""
        sizes = [RUN] * len(self.rows[0])
        if self.here.batch_transfer_sync_write(self.session, *self.rows, sizes):
            raise RuntimeError("the raw transfer failed")


class RawNixl:
    """Two agents, one transfer with a descriptor per run."""

    def __init__(self, stack, nbytes):
        from kvconnect_nixl.library import load

        library = load()
        self.here, self.there = library.agent("bench-here"), library.agent("bench-there")
        self.rows, self.held = [], []
        for agent, value in ((self.here, 1), (self.there, 0)):
            with as_it_comes():
                agent.create_backend("UCX", {})
            at = memory(stack, nbytes, "raw", value)
            whole = np.array([[at, nbytes, 0]], dtype=np.uint64)
            self.held.append(agent.register_memory(whole, "DRAM", ["UCX"]))
            starts = np.arange(at, at + nbytes, RUN, dtype=np.uint64)
            columns = [starts, np.full_like(starts, RUN), np.zeros_like(starts)]
            self.rows.append(np.ascontiguousarray(np.stack(columns, axis=1)))
        self.here.add_remote_agent(self.there.get_agent_metadata())

    def __call__(self):
        """Move everything once."""
        agent = self.here
        lists = [agent.get_xfer_descs(rows, "DRAM") for rows in self.rows]
        handle = agent.initialize_xfer("WRITE", *lists, "bench-there", b"", ["UCX"])
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(state)


class RawShm:
    """One memmove per run."""

    def __init__(self, stack, nbytes):
        at = [memory(stack, nbytes, "raw", value) for value in (1, 0)]
        self.rows = [[a + i for i in range(0, nbytes, RUN)] for a in at]

    def __call__(self):
        """Move everything once."""
        for a, b in zip(*self.rows, strict=True):
            ctypes.memmove(b, a, RUN)


RAW = {"mooncake": RawMooncake, "nixl": RawNixl, "shm": RawShm}


class Carried:
    """The same runs by `kvconnect.disagg.carry`."""

    def __init__(self, stack, name, nbytes):
        self.here, there = (stack.enter_context(open_transport(name)) for _ in range(2))
        at = []
        for transport in (self.here, there):
            held = stack.enter_context(transport.allocate(nbytes, "carried"))
            ctypes.memset(held.address, 1, nbytes)
            region = Region("carried", held.address, nbytes)
            stack.enter_context(transport.register([region]))
            at.append(np.arange(held.address, region.end, RUN, dtype=np.uint64))
        self.runs = Runs(*at, np.full(len(at[0]), RUN, dtype=np.uint64))
        self.peer = stack.enter_context(self.here.connect(there.describe(), WAIT))

    def __call__(self):
        """Move everything once."""
        done = carry(
            self.here, self.peer, Way.PUSH, self.runs, batch_bytes=64 << 20,
            until=time.monotonic() + WAIT, stop=threading.Event(),
        )  # fmt: skip
        if done.failure is not None:
            raise RuntimeError(done.failure.cause)


class Pools:
    """A prefill rank of TP4 and both decode ranks of TP8 that it sends to."""

    def __init__(self, stack, name, layout, stage, layers, tokens):
        pages = -(-tokens // PAGE)
        identity = Identity(
            model="bench", weights="w", dtype="bfloat16", page_size=PAGE, layers=layers,
            heads=HEADS, head_dim=DIM, v_head_dim=DIM,
        )  # fmt: skip
        ends = []
        for kind, tp, rank in (
            (PrefillEndpoint, 4, 0),
            (DecodeEndpoint, 8, 0),
            (DecodeEndpoint, 8, 1),
        ):
            place = Placement.tensor_parallel(
                layers=Span(0, layers, layers), heads=HEADS, rank=rank, size=tp
            )
            pool = stack.enter_context(
                HostPool.allocate(
                    layout=layout, pages=pages, page_size=PAGE, layers=layers,
                    heads=place.heads.extent, head_dim=DIM, dtype="bfloat16",
                )
            )  # fmt: skip
            ctypes.memset(pool.memory.address, rank + 1, pool.memory.nbytes)
            options = EndpointOptions(
                name=f"{kind.role}{rank}", ranks=2 if kind is DecodeEndpoint else 1, stage=stage,
                timeout=WAIT, staging=64 << 20,
            )  # fmt: skip
            carrier = stack.enter_context(open_transport(name))
            ends.append(stack.enter_context(kind(pool, place, identity, carrier, options=options)))
        self.prefill, *self.decodes = ends
        address = self.prefill.listen()
        for decode in self.decodes:
            decode.connect([address])
        self.pages = np.arange(pages, dtype=np.uint64)
        # Neither side's pages are in one piece.
        self.targets = np.random.default_rng(5).permutation(pages).astype(np.uint64)
        self.nbytes = tokens * layers * (HEADS // 4) * DIM * 2 * 2
        self.turn = 0

    def __call__(self):
        """Move everything once."""
        self.turn += 1
        name = f"r{self.turn}"
        going = [self.prefill.send(name, self.pages)]
        going += [d.receive(name, self.targets, checksum=False) for d in self.decodes]
        for request in going:
            if not (outcome := request.wait(WAIT)).ok:
                raise RuntimeError(str(outcome))


def planning(rounds):
    """Milliseconds, warm, to list the runs of 4096 tokens x 80 layers of one pair of ranks."""
    out = {}
    for layout in ("page_head", "page_first"):
        sides = []
        for tp in (4, 8):
            place = Placement.tensor_parallel(layers=Span(0, 80, 80), heads=HEADS, rank=0, size=tp)
            pool = HostPool.allocate(
                layout=layout, pages=4096 // PAGE, page_size=PAGE, layers=80,
                heads=place.heads.extent, head_dim=DIM, dtype="bfloat16",
            )  # fmt: skip
            sides.append(Side(pool, place))
        plan = plan_pair(*sides, share_of(*(side.placement for side in sides)))
        pages = np.arange(4096 // PAGE, dtype=np.uint64)
        times = [seconds(lambda p=plan, ids=pages: p.expand(ids, ids)) for _ in range(rounds + 2)]
        out[layout] = {
            "runs": len(plan.expand(pages, pages)[0]),
            "expand_ms": statistics.median(times[2:]) * 1e3,
            "plan_ms": seconds(lambda s=sides: plan_pair(*s, share_of(*(x.placement for x in s))))
            * 1e3,
        }
    return out


def compare(name, args, nbytes, build):
    """Rates of one contestant and of the raw library, in turns; nothing else is open."""
    size = args.mib << 20
    rates, cores = ([], []), ([], [])
    with contextlib.ExitStack() as stack:
        works = (RAW[name](stack, size), size), (build(stack), nbytes)
        for turn in range(args.rounds + 1):
            for (work, count), found, busy in zip(works, rates, cores, strict=True):
                cpu = time.process_time()
                took = seconds(work)
                cpu = time.process_time() - cpu
                if turn:
                    # The first turn touches memory and opens connections.
                    found.append(count / took / 1e9)
                    busy.append(cpu / took)
    (raw, own), (raw_cores, own_cores) = (
        [statistics.median(found) for found in each] for each in (rates, cores)
    )
    pairs = [b / a for a, b in zip(*rates, strict=True)]
    return {
        "gb_per_s": own, "raw_gb_per_s": raw, "of_raw": statistics.median(pairs), "all": rates,
        "cores": own_cores, "raw_cores": raw_cores,
    }  # fmt: skip


def measure(name, args):
    """Compare each contestant with the raw library."""
    size, layers = args.mib << 20, args.layers
    per_token = layers * (HEADS // 4) * DIM * 4
    tokens = size // per_token // PAGE * PAGE
    cases = {"carry 2 MiB runs": (size, lambda s: Carried(s, name, size))}
    for label, layout, stage, count in (
        ("page_head TP4-TP8", "page_head", "auto", tokens),
        ("page_first TP4-TP8", "page_first", "auto", tokens),
        ("page_first TP4-TP8 packed", "page_first", "always", tokens),
        ("page_first TP4-TP8 direct", "page_first", "never", args.direct_tokens),
    ):
        cases[label] = (
            count * per_token,
            lambda s, a=layout, b=stage, n=count: Pools(s, name, a, b, layers, n),
        )
    return {
        label: compare(name, args, *case)
        for label, case in cases.items()
        if not args.only or label in args.only
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transports", nargs="+", default=sorted(RAW), choices=sorted(RAW))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=128, help="bytes of a transfer")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--direct-tokens", type=int, default=64)
    parser.add_argument("--only", action="append", metavar="WHAT", help="lines to measure")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = {"load_before": os.getloadavg(), "planning": planning(args.rounds), "rates": {}}
    for name in args.transports:
        report["rates"][name] = measure(name, args)
    report["load_after"] = os.getloadavg()
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    print(f"load {report['load_before'][0]:.1f} before, {report['load_after'][0]:.1f} after")
    for layout, row in report["planning"].items():
        print(
            f"planning 4096 tokens x 80 layers, {layout}: {row['expand_ms']:.2f} ms warm for "
            f"{row['runs']} runs ({row['plan_ms']:.2f} ms for the pair, once)"
        )
    words = "GB/s", "raw", "of raw", "cores", "raw"
    print(f"{'transport':10} {'what':28} " + "".join(f"{word:>8}" for word in words))
    for name, rows in report["rates"].items():
        for label, row in rows.items():
            print(
                f"{name:10} {label:28} {row['gb_per_s']:8.2f}{row['raw_gb_per_s']:8.2f}"
                f"{row['of_raw']:8.3f}{row['cores']:8.2f}{row['raw_cores']:8.2f}"
            )


if __name__ == "__main__":
    main()
