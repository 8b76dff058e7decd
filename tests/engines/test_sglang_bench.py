"""The SGLang benchmark runs, verifies every byte and fills its table; no time is judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sglang

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
def test_bench_sglang_runs_at_tiny_size(tmp_path):
    out = tmp_path / "rows.json"
    command = [sys.executable, "scripts/bench_sglang.py", "--dir", str(tmp_path)]
    command += ["--mib", "1", "--total-mib", "4", "--rounds", "2", "--json", str(out)]
    for name in ("kvconnect nvme", "kvconnect memory", "file", "mooncake"):
        command += ["--only", name]
    done = subprocess.run(
        command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {(row["name"], row["round"]): row for row in json.loads(out.read_text())}
    for number in (0, 1):
        for name in ("kvconnect nvme", "file"):
            row = rows[name, number]
            assert {"put", "put_synced", "get_warm", "get_cold", "exists_ms"} <= row.keys(), row
        assert {"put", "get_warm"} <= rows["kvconnect memory", number].keys()
        peer = rows["mooncake", number]  # an optional package: it runs, or says why not
        assert "get_warm" in peer or "could not run: mooncake" in done.stdout
    assert "1 MiB put_synced:" in done.stdout
    assert list(tmp_path.iterdir()) == [out], "something was left behind"
