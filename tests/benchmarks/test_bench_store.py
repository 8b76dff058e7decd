"""The store benchmark runs, verifies every byte and fills its table; it judges no time here."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_bench_store_runs_at_tiny_size(tmp_path):
    out = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, "scripts/bench_store.py", "--dir", str(tmp_path), "--mib", "1",
         "--total-mib", "4", "--rounds", "1", "--engines", "--json", str(out)],
        check=False, cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    names = {row["name"] for row in rows}
    assert names >= {"raw O_DIRECT", "kvconnect nvme", "kvconnect nvme durability=index"}
    assert names >= {f"{who} {api}" for who in ("raw NIXL", "kvconnect io=nixl-posix")
                     for api in ("aio", "uring")}  # fmt: skip
    for row in rows:
        assert {"put", "put_again", "get_cold", "get_warm"} <= row.keys(), row
        assert row["name"] in done.stdout
    assert "put / raw:" in done.stdout
    assert "get_cold / raw NIXL uring" in done.stdout
