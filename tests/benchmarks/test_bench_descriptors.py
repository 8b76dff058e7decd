"""The descriptor benchmark runs, at a size that says nothing about speed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(tmp_path):
    out = tmp_path / "rows.json"
    command = [sys.executable, "scripts/bench_descriptors.py", "--quick", "--json", str(out)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    environment = os.environ | {"PYTHONPATH": path}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=240)
    return json.loads(out.read_text())["rows"]


def test_it_measures_every_case(tmp_path):
    rows = run(tmp_path)
    assert len(rows) == 7 * 2 * 2
    assert all(row["kvconnect_ms"] > 0 for row in rows)


@pytest.mark.sglang
def test_it_measures_sglang_beside(tmp_path):
    pytest.importorskip("sglang")
    assert all(row["ratio"] for row in run(tmp_path))
