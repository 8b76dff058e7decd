"""What the core adds in memory: under 64 MiB beside the pool and the bounded buffers."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT = 64 << 20
PAGES = 2000

CODE = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "backends")!r}]

def anonymous():
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return int(lines["RssAnon"].split()[0]) << 10

import numpy
before = anonymous()
import kvconnect
from kvconnect import Connector, HostPool, Identity, Placement, page_hashes

pool = HostPool.allocate(layout="page_head", pages={PAGES}, page_size=16, layers=4, heads=4,
                         head_dim=32)
identity = Identity(model="m", weights="w", dtype="bfloat16", page_size=16, layers=4, heads=4,
                    head_dim=32, v_head_dim=32)
memory = sum(region.nbytes for region in pool.regions)
with kvconnect.open(f"nvme://{{sys.argv[1]}}?capacity=1GiB") as store:
    with Connector(pool, Placement.whole(layers=4, heads=4), identity, store,
                   tp_sizes=(1, 2, 4)) as connector:
        hashes = page_hashes(range({PAGES} * 16), 16)
        assert connector.put(hashes, range({PAGES})).prefix == {PAGES}
        assert connector.exists(hashes).prefix == {PAGES}
        assert connector.get(hashes, range({PAGES})).prefix == {PAGES}
        bounce = store.stats()["bounce_bytes"]
        print(anonymous() - before - memory - bounce)
"""


def test_the_core_adds_little_memory(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "store")],
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < LIMIT, f"{int(done.stdout) / 2**20:.1f} MiB"
