"""The ranks of one fleet in a process of their own, on a real store.

What every byte must be follows from the page and the place in the whole model alone, so that
processes that never met can check each other's pages.

python -m tests.backends.mooncake_rank OPTIONS    answers a line of JSON for each command
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from kvconnect.connector import Connector
from kvconnect.placement import Placement, Span
from kvconnect_mooncake import open_backend
from tests.unit.held_pools import held, identity_of

LAYERS, SLOTS, DIMS = 3, 4, (32, 16)
PAGES = 6
WRITE, READ = [4, 0, 2], [1, 3, 5]
HASHES = [f"page{number}" for number in range(len(WRITE))]


def model(heads):
    """Return the whole model's bytes of every page: {component: (page, l, s, h, d, 2)}."""
    shape = len(WRITE), LAYERS, SLOTS, heads
    out = {}
    for number, (name, dim) in enumerate(zip("kv", DIMS, strict=True)):
        page, layer, slot, head, at, byte = np.indices((*shape, dim, 2), dtype=np.uint32)
        mixed = ((((page * 31 + layer) * 37 + slot) * 41 + head) * 43 + at) * 47 + byte
        out[name] = ((mixed * 2654435761 + number * 97) >> 13).astype(np.uint8)
    return out


class Rank:
    """One rank's pool and connector."""

    def __init__(self, store, number, size, heads, order="phsld", **options):
        self.placement = Placement.tensor_parallel(
            layers=Span(0, LAYERS, LAYERS), heads=heads, rank=number, size=size
        )
        self.one = held(
            order, pages=PAGES, size=SLOTS, layers=LAYERS,
            heads=self.placement.heads.extent, dims=DIMS,
        )  # fmt: skip
        identity = identity_of(self.one.pool, self.placement)
        self.connector = Connector(
            self.one.pool, self.placement, identity, store, **({"self_test": False} | options)
        )

    def mine(self):
        span = self.placement.heads
        return {n: v[:, :, :, span.start : span.stop] for n, v in model(span.total).items()}

    def mode(self):
        return self.connector.plan.mode.value

    def why(self):
        return self.connector.why(HASHES[0])

    def put(self):
        self.one.write(WRITE, self.mine())
        return self.connector.put(HASHES, WRITE).counts()

    def get(self):
        """Load into other pages; return hits, counts, and whether every byte is right."""
        for buffer in self.one.buffers:
            buffer.view[:] = 0xEE
        before = self.one.snapshot()
        hits = self.connector.exists(HASHES).prefix
        outcome = self.connector.get(HASHES, READ)
        got, want = self.one.read(READ), self.mine()
        right = all((got[name] == want[name]).all() for name in want)
        untouched = bool(self.one.untouched_outside(READ, before))
        return [hits, outcome.counts(), bool(right), untouched]


class Fleet:
    """Ranks of one TP size in a process of their own; killed at the end."""

    def __init__(self, master, size, heads, store=(), **options):
        given = {
            "address": master.address, "size": size, "heads": heads, "options": options,
            "store": {"admin": master.admin, "lease": str(master.lease), **dict(store)},
        }  # fmt: skip
        root = Path(__file__).parents[2]
        path = os.pathsep.join([str(root), *(p for p in sys.path if p)])
        self.words = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `kill`
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.backends.mooncake_rank", json.dumps(given)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.words, text=True,
            env={**os.environ, "PYTHONPATH": path}, cwd=root,
        )  # fmt: skip

    def ask(self, command):
        print(command, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            self.words.seek(0)
            raise AssertionError(f"it ended, {self.process.wait(10)}: {self.words.read()[-4000:]}")
        return json.loads(line)

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.words.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.kill()


def main(text):
    given = json.loads(text)
    with open_backend(given["address"], given["store"]) as store:
        size = given["size"]
        ranks = [Rank(store, n, size, given["heads"], **given["options"]) for n in range(size)]
        for line in sys.stdin:
            print(json.dumps([getattr(rank, line.strip())() for rank in ranks]), flush=True)
        for rank in ranks:
            rank.connector.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
