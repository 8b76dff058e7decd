"""scripts/judge_sglang.py runs a judge of this shape, with the damage done inside the slabs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sglang

ROOT = Path(__file__).resolve().parents[2]

COMMON = """
import numpy as np, torch
from tests.engines import sglang_pools
from tests.engines.sglang_rank import Rank, content, keys, tokens

SG = sglang_pools.load()

class Control(Rank):
    backup = lambda self, keys, index: self.put(keys, pages(index))
    prefetch = lambda self, keys, index: self.get(keys, pages(index))

pages = lambda index: [int(i) // 4 for i in index[::4]]
pool = lambda: sglang_pools.mha(SG, "page_first", pages=30)
keys_for = keys
page_idx = lambda ids, size: torch.tensor([i * size + slot for i in ids for slot in range(size)])
page_bytes = lambda pool, page: content(pool, [page])[0]
raw_pages = lambda pool: [part.view(torch.uint8).reshape(30, -1).numpy() for part in pool.kv_buffer]

def fill_random(pool, ids, seed):
    rng = np.random.default_rng(seed)
    for part in raw_pages(pool):
        part[list(ids)] = rng.integers(0, 256, (len(ids), part.shape[1]), dtype=np.uint8)
"""

JUDGE = """
import argparse, json, os
import common as C

RES, A = [], None
class Refused(Exception): pass
def _trunc(path): raise SystemExit("the judge's own damage")
def _zero(path): _trunc(path)
def _flip(path): _trunc(path)
def _grow(path): _trunc(path)
def _damage(how): how(None)
def tag(text): return f"{text}-{len(RES)}"
def pool(): return C.pool()
def opened(pool): return C.Control(pool, **json.loads(A.extra))
def shut(*controls): [one.close() for one in controls]
def zero(pool, ids):
    for part in C.raw_pages(pool): part[ids] = 0

def main():
    global A
    parser = argparse.ArgumentParser()
    for name in ("--backend", "--extra", "--dir", "--json"): parser.add_argument(name)
    A = parser.parse_args()
    for how in (_trunc, _zero, _flip, _grow):
        try: verdict, text = _damage(how)
        except Refused as error: verdict, text = "REFUSED", str(error)
        RES.append({"verdict": verdict, "text": text})
    with open(A.json, "w") as file: json.dump({"arguments": vars(A), "results": RES}, file)

main()
"""


def run(tmp_path, *arguments):
    (tmp_path / "common.py").write_text(COMMON)
    (tmp_path / "judge.py").write_text(JUDGE)
    out = tmp_path / "out.json"
    command = [sys.executable, "scripts/judge_sglang.py", "--harness", str(tmp_path)]
    command += [*arguments, "--json", str(out)]
    done = subprocess.run(
        command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert out.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(out.read_text())


def test_damage_is_done_where_the_page_lies(tmp_path):
    code, report = run(tmp_path)
    assert code == 0
    loaded = [result["text"].partition("loaded ")[2][0] for result in report["results"]]
    assert [result["verdict"] for result in report["results"]] == ["PASS"] * 4
    assert loaded == ["3", "3", "3", "6"]
    assert report["arguments"]["dir"].startswith("/var/tmp/kvconnect-judge-")
    assert not Path(report["arguments"]["dir"]).exists()


def test_a_store_without_files_keeps_the_judges_answer(tmp_path):
    code, report = run(tmp_path, "--url", "memory://judge", "--extra", '{"salt": "s"}')
    assert code == 0
    assert {result["verdict"] for result in report["results"]} == {"REFUSED"}
    assert json.loads(report["arguments"]["extra"]) == {"url": "memory://judge", "salt": "s"}
