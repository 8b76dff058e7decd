"""A third of the matrix of shapes per transport, each moved by push and by pull, checksums on."""

import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor

from kvconnect.disagg.transports import open_transport
from tests.disagg.endpoints import Cluster
from tests.disagg.fleet import Fleet, fill, u64

SIZES = (1, 2, 3, 4, 6, 8)
LAYOUTS = ("page_first", "page_head", "page_first_direct", "layer_first")
STAGES = (((3,), (1, 2)), ((2, 1), (3,)), ((3,), (3,)), ((1, 1, 1), (1, 2)))
TOKENS = 20


@dataclasses.dataclass(frozen=True)
class Case:
    prefill: Fleet
    decode: Fleet
    stage: str

    def __str__(self):
        sides = "-".join(
            f"{s.layout}.{s.page_size}.tp{s.tp}.pp{len(s.stages)}"
            for s in (self.prefill, self.decode)
        )
        return f"{sides}.h{self.prefill.heads}.{self.stage}"


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
                ("auto", "never", "always")[turn % 3],
            )
        )
    # Few ranks first: transports are opened as they are needed, and those of NIXL all poll.
    return sorted(out, key=lambda case: case.prefill.tp + case.decode.tp)


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
    """Move twenty tokens there by push, then by pull; every byte of every pool is looked at."""
    src = u64([3, 0, 5, 1, 2])
    size = case.decode.page_size
    dst = u64([7, 2, 5, 0, 8, 1, 9, 3, 6, 4][: -(-TOKENS // size)])
    # Nobody dies here: a busy machine may keep ranks from talking for longer than usual.
    patience = {"timeout": 30.0, "peer_timeout": 30.0}
    options = {"stage": case.stage, "staging": 1 << 20, "slot": 64 << 10} | patience
    with Cluster(case.prefill, case.decode, transport=transports.lend, **options) as cluster:
        for side in cluster.sources:
            fill(side, src, TOKENS)
        cluster.connect()
        for way in ("push", "pull"):
            cluster.blank()
            going = [p.send(way, src) for p in cluster.prefills]
            going += [
                d.receive(way, dst, slots=TOKENS, way=way, checksum=True) for d in cluster.decodes
            ]
            outcomes = [r.wait(30) for r in going]
            assert all(o.ok for o in outcomes), outcomes
            assert all(cluster.holds(dst, TOKENS))
            assert all(r.quiet(10) for r in going)
