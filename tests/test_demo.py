"""The main job end to end, small: real processes, a real store, and runs that must fail."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvconnect.cli.demo_job import Job, Read, Written, problems

ROOT = Path(__file__).resolve().parents[1]
TEXT = "Prefill once, decode anywhere: pages are named by what fixes their bytes. " * 4


def demo(tmp_path, *options, text=TEXT):
    file = tmp_path / "text.txt"
    file.write_text(text)
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    command = [sys.executable, "-m", "kvconnect.cli.main", "demo", "--text", str(file)]
    small = ["--layers", "2", "--tokens", "8"]
    return subprocess.run(
        [*command, *small, *map(str, options)],
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "120", "NO_COLOR": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("layout", "tp_write", "tp_read", "options"),
    [
        ("page_head", 4, 2, ()),
        ("page_head", 2, 8, ("--v-head-dim", 24)),
        ("page_head", 16, 1, ("--dtype", "float32")),
        ("layer_first", 1, 4, ("--v-head-dim", 16)),
        ("page_first", 4, 2, ("--page-size", 8)),
        ("page_first_direct", 2, 2, ("--head-dim", 48)),
        ("page_unified", 4, 2, ("--dtype", "float16")),
    ],
)
def test_same_tokens_from_the_store(tmp_path, layout, tp_write, tp_read, options):
    done = demo(
        tmp_path, "--layout", layout, "--tp-write", tp_write, "--tp-read", tp_read, *options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    size = dict(zip(options[::2], options[1::2], strict=True)).get("--page-size", 16)
    pages = (len(TEXT) - 1) // size
    assert f"{pages} hits of {pages}" in done.stdout
    assert "decoded the same tokens" in done.stdout
    for word in ("GB/s", "first token with the store", "descriptors:", "objects:", layout):
        assert word in done.stdout, word


def test_a_flipped_stored_bit_is_refused_and_fails_the_demo(tmp_path):
    done = demo(tmp_path, "--tamper", "store")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "flipped one bit" in done.stdout
    assert "CHECKSUM" in done.stdout
    assert "tokens differ" not in done.stdout, "the damaged page must be computed instead"


def test_a_changed_loaded_value_fails_the_demo(tmp_path):
    done = demo(tmp_path, "--tamper", "memory")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 loaded values differ" in done.stdout


def test_a_second_run_on_the_same_directory_works(tmp_path):
    for _ in range(2):
        done = demo(tmp_path, "--dir", tmp_path / "a store")
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--tp-write", 3), "tp size 3"),
        (("--page-size", 4096), "--page-size"),
        (("--tamper", "everything"), "everything"),
        (("--layout", "page_frist"), "page_frist"),
        (("--dtype", "int3"), "int3"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(tmp_path, options, word):
    done = demo(tmp_path, *options)
    assert done.returncode == 2, done.stdout + done.stderr
    assert word in done.stderr
    assert "Traceback" not in done.stderr


JOB = Job(
    url="nvme:///x",
    text_file="x",
    limit=100,
    layout="page_head",
    page_size=16,
    layers=1,
    head_dim=2,
    v_head_dim=2,
    dtype="bfloat16",
    tp_write=4,
    tp_read=2,
    new_tokens=2,
)
WRITTEN = Written(
    tokens=40,
    pages=2,
    objects=8,
    statuses={"OK": 8, "NOT_WRITER": 4},
    causes=[],
    nbytes=1,
    seconds=1,
    prefill_seconds=1,
    attach_seconds=1,
    explain="",
    sample=b"",
)
READ = Read(
    pages=2,
    hits=2,
    loaded=2,
    misses=[],
    nbytes=1,
    seconds=1,
    attach_seconds=1,
    first_token_with=1,
    first_token_without=1,
    tokens_with=[65, 66],
    tokens_without=[65, 66],
    wrong_values=0,
    explain="",
    head_group=2,
    strips=[],
)


def test_a_perfect_run_has_no_problems():
    assert problems(JOB, WRITTEN, READ) == []


@pytest.mark.parametrize(
    ("written", "read", "word"),
    [
        ({"statuses": {"OK": 7, "NO_SPACE": 1}}, {}, "NO_SPACE"),
        ({}, {"hits": 1, "loaded": 1}, "1 of 2 pages were found"),
        ({}, {"loaded": 1}, "could be loaded"),
        ({}, {"wrong_values": 3}, "3 loaded values"),
        ({}, {"tokens_with": [65, 67]}, "tokens differ"),
        ({}, {"tokens_with": [65], "tokens_without": [65]}, "1 of 2 tokens"),
        ({}, {"misses": ["rank 1, page 0: CHECKSUM"]}, "CHECKSUM"),
    ],
)
def test_every_difference_is_a_problem(written, read, word):
    found = problems(
        JOB, msgspec.structs.replace(WRITTEN, **written), msgspec.structs.replace(READ, **read)
    )
    assert word in " ".join(found)
