"""The matrix of shapes: all of it on shm, a third of it per network transport.

Each case is moved by push and by pull, checksums on, and compared with what is computed from
global indices alone (`fleet`).
"""

import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvconnect.disagg.transports import open_transport
from tests.disagg.endpoints import Cluster
from tests.disagg.fleet import Fleet, fill, u64

SIZES = (1, 2, 3, 4, 6, 8)
LAYOUTS = ("page_first", "page_head", "page_first_direct", "layer_first")
STAGES = (((3,), (1, 2)), ((2, 1), (3,)), ((3,), (3,)), ((1, 1, 1), (1, 2)))
TOKENS = 20
WAYS = ("auto", "never", "always")
WIDE = (192, 128)
"""K and V of different widths, as they are in models."""


@dataclasses.dataclass(frozen=True)
class Case:
    prefill: Fleet
    decode: Fleet
    stage: str
    tokens: int = TOKENS

    def __str__(self):
        sides = "-".join(
            f"{s.layout}.{s.page_size}.tp{s.tp}.pp{'+'.join(map(str, s.stages))}"
            for s in (self.prefill, self.decode)
        )
        k, v = self.prefill.dims
        return f"{sides}.h{self.prefill.heads}.{k}-{k if v is None else v}.{self.stage}"


def cases(third):
    """Every third pair of TP sizes; layouts, page sizes, dims and stages go round with them."""
    out = []
    for number, (p, d) in enumerate((p, d) for p in SIZES for d in SIZES):
        if number % 3 != third:
            continue
        turn = number // 3
        heads = next(h for h in (2, 4, 8, 12, 24) if all(not h % t or not t % h for t in (p, d)))
        stages = STAGES[turn % 4] if p * d <= 8 else ((3,), (3,))
        dims = (6, 4) if turn % 2 else (8, None)
        out.append(
            Case(
                Fleet(LAYOUTS[turn % 4], p, 4, 6, stages[0], heads, dims),
                Fleet(
                    LAYOUTS[(turn * 3 + 1) % 4], d, (4, 8, 2)[turn % 3], 11, stages[1], heads, dims
                ),
                WAYS[turn % 3],
            )
        )
    # Few ranks first: transports are opened as they are needed, and those of NIXL all poll.
    return sorted([*out, *special()[third::3]], key=lambda case: case.prefill.tp + case.decode.tp)


def everything():
    """Every pair of TP sizes with 8, 4 and 2 heads (12 and 24 where 3 or 6 ranks share them).

    Layouts go round so that each meets each; widths, page sizes and stages with periods of
    their own.
    """
    out = []
    for heads in (8, 4, 2, 12, 24):
        for p, d in ((p, d) for p in SIZES for d in SIZES):
            odd = bool({p, d} & {3, 6})
            if any(heads % tp and tp % heads for tp in (p, d)) or odd != (heads in {12, 24}):
                continue
            number = len(out)
            stages = STAGES[number // 2 % 4] if p * d <= 8 else ((2,), (2,))
            dims = ((8, None), (6, 4), WIDE)[number % 3]
            sizes = ((4, 11), (8, 6), (2, 20))[number // 3 % 3]
            source = Fleet(LAYOUTS[number % 4], p, 4, 6, stages[0], heads, dims)
            target = Fleet(LAYOUTS[number // 4 % 4], d, *sizes, stages[1], heads, dims)
            out.append(Case(source, target, WAYS[number % 5 % 3]))
    return [*out, *special()]


def special():
    """What the sizes of TP do not bring along: latent rows, pages of 16 and 64, wide K, deep PP."""
    latent = (24, 0)
    small, large = (16, 14), (64, 5)
    return [
        Case(Fleet("page_first", 2, 4, 6, (3,), 1, latent), Fleet(
            "layer_first", 3, 8, 6, (1, 2), 1, latent), "auto"),
        Case(Fleet("page_first", 2, *small, (2,), 12, (8, 4)), Fleet(
            "page_head", 3, *large, (2,), 12, (8, 4)), "never", 192),
        Case(Fleet("page_head", 1, *large, (1, 2), 2, WIDE), Fleet(
            "page_first_direct", 2, *small, (3,), 2, WIDE), "always", 176),
        Case(Fleet("layer_first", 1, *small, (1, 1, 1), 1, latent), Fleet(
            "page_first_direct", 2, *large, (2, 1), 1, latent), "always", 192),
        Case(Fleet("page_first_direct", 2, 4, 6, (2, 1), 4, WIDE), Fleet(
            "page_first", 1, 4, 6, (1, 1, 1), 4, WIDE), "auto"),
        Case(Fleet("layer_first", 2, *large, (3,), 2, (16, None)), Fleet(
            "page_head", 4, *small, (1, 2), 2, (16, None)), "never", 128),
    ]  # fmt: skip


class Fleetful:
    """Transports that are opened once and lent to one cluster after another."""

    def __init__(self, name):
        self.name, self.free, self.all = name, [], []

    @contextlib.contextmanager
    def lend(self):
        if not self.free:
            self.free.append(open_transport(self.name))
            self.all.append(self.free[-1])
        transport = self.free.pop()
        try:
            yield transport
            assert not transport.regions
        finally:
            self.free.append(transport)

    def close(self):
        # A second each, one after the other.
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda transport: transport.close(), self.all))


def check(transports, case):
    """Move tokens there by push, then by pull; every byte of every pool is looked at."""
    rng = np.random.default_rng(case.tokens)
    src, dst = (
        u64(rng.permutation(fleet.pages)[: -(-case.tokens // fleet.page_size)])
        for fleet in (case.prefill, case.decode)
    )
    # Nobody dies here: a busy machine may keep ranks from talking for longer than usual.
    patience = {"timeout": 30.0, "peer_timeout": 30.0}
    options = {"stage": case.stage, "staging": 1 << 20, "slot": 64 << 10} | patience
    with Cluster(case.prefill, case.decode, transport=transports.lend, **options) as cluster:
        for side in cluster.sources:
            fill(side, src, case.tokens)
        cluster.connect()
        for way in ("push", "pull"):
            cluster.blank()
            going = [p.send(way, src) for p in cluster.prefills]
            going += [
                d.receive(way, dst, slots=case.tokens, way=way, checksum=True)
                for d in cluster.decodes
            ]
            outcomes = [r.wait(30) for r in going]
            assert all(o.ok for o in outcomes), outcomes
            assert all(cluster.holds(dst, case.tokens))
            assert all(r.quiet(10) for r in going)
