"""The P/D demo end to end, small: real processes, and runs that must fail."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvconnect.cli.pd_demo_job import Held, Moved, Single, Token, job_of
from kvconnect.cli.pd_demo_state import State
from kvconnect.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
TEXT = "Prefill here, decode there: the pages move, layer by layer, and stay the same. " * 3


def command(tmp_path, *options):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    small = ["--layers", "3", "--tokens", "6", "--text", str(file)]
    return [sys.executable, "-m", "kvconnect.cli.main", "pd-demo", *small, *map(str, options)]


def environment(tmp_path):
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    return {
        **os.environ, "PYTHONPATH": path, "COLUMNS": "120", "NO_COLOR": "1",
        "TMPDIR": str(tmp_path),
    }  # fmt: skip


def demo(tmp_path, *options):
    return subprocess.run(
        command(tmp_path, *options), env=environment(tmp_path), cwd=tmp_path,
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def ranks_of(tmp_path):
    """Processes whose errors go to a file in this test's directory: the ranks."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd/2"):
        try:
            words = str(path.readlink())
        except OSError:
            continue
        if words.startswith(str(tmp_path)) and words.removesuffix(" (deleted)").endswith(".log"):
            found.append(int(path.parts[2]))
    return found


def nobody_is_left(tmp_path, seconds=5.0):
    deadline = time.monotonic() + seconds
    while ranks_of(tmp_path):
        assert time.monotonic() < deadline, ranks_of(tmp_path)
        time.sleep(0.05)


@pytest.mark.parametrize(
    "options",
    [
        (),
        (
            "--prefill-tp", 1, "--decode-tp", 2, "--pp-prefill", 2, "--layout-prefill",
            "layer_first", "--layout-decode", "page_unified", "--v-head-dim", 24,
            "--page-size-decode", 64, "--dtype", "float32",
        ),
        (
            "--prefill-tp", 2, "--decode-tp", 1, "--layout-prefill", "page_first_direct",
            "--layout-decode", "layer_first", "--page-size-prefill", 32, "--stage", "never",
        ),
        ("--prefill-tp", 1, "--decode-tp", 2, "--stage", "always", "--dtype", "float16"),
        ("--prefill-tp", 2, "--decode-tp", 1, "--transport", "nixl"),
        ("--prefill-tp", 1, "--decode-tp", 2, "--transport", "mooncake"),
        ("--bootstrap", "--decode-tp", 2, "--pp-prefill", 2),
    ],
)  # fmt: skip
def test_same_tokens_as_one_process(tmp_path, options):
    done = demo(tmp_path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same tokens as one process" in done.stdout
    assert ("ranks found by http://127.0.0.1:" in done.stdout) == ("--bootstrap" in options)
    for word in ("GB/s", "time to first token", "runs of" if not options else "MiB", "equal"):
        assert word in done.stdout, word
    nobody_is_left(tmp_path)
    assert not list(tmp_path.glob("kvconnect-*"))


def test_one_changed_value_fails_the_demo(tmp_path):
    done = demo(tmp_path, "--tamper", "--prefill-tp", 1, "--decode-tp", 2)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "decode 0: keys and values differ" in done.stdout
    assert "decode 1: keys and values differ" not in done.stdout
    nobody_is_left(tmp_path)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--transport", "shmm"), "--transport 'shmm' is not one of"),
        (("--prefill-tp", "3"), "one must divide the other"),
        (("--pp-prefill", "4"), "--pp-prefill 4 is more than --layers 3"),
        (("--stage", "sometimes"), "stage"),
        (("--layout-decode", "page_fist"), "page_fist"),
        (("--page-size-decode", "0"), "page-size-decode"),
    ],
)
def test_what_cannot_be_is_one_line_and_no_process_stays(tmp_path, options, word):
    done = demo(tmp_path, *options)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert word in done.stderr
    nobody_is_left(tmp_path)


def test_a_run_that_takes_too_long_is_ended(tmp_path):
    began = time.monotonic()
    done = demo(tmp_path, "--timeout", "0.2")
    assert time.monotonic() - began < 30
    assert done.returncode == 2
    assert "did not end in 0.2 s" in done.stderr
    nobody_is_left(tmp_path)


@pytest.mark.parametrize("victim", ["parent", "rank"])
def test_a_kill_leaves_no_process_behind(tmp_path, victim):
    with subprocess.Popen(
        command(tmp_path, "--bootstrap"), env=environment(tmp_path), cwd=tmp_path,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            deadline = time.monotonic() + 30
            while len(ranks_of(tmp_path)) < 4:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            if victim == "rank":
                os.kill(ranks_of(tmp_path)[0], signal.SIGKILL)
                assert process.wait(30) == 2
                assert "ended with code -9" in process.stderr.read()
        finally:
            process.kill()
    # An orphan sees the end of its stdin once Python has started.
    nobody_is_left(tmp_path, 20.0)


def job(**changes):
    values = {
        "scratch": "x", "text_file": "y", "limit": 9, "layout_prefill": "page_first",
        "layout_decode": "page_head", "page_size_prefill": 16, "page_size_decode": 24,
        "prefill_tp": 1, "decode_tp": 2, "pp_prefill": 3, "layers": 7, "head_dim": 8,
        "v_head_dim": 8, "dtype": "float16", "transport": "shm", "stage": "auto",
        "new_tokens": 2, "timeout": 9.0,
    }  # fmt: skip
    return job_of(**values | changes)


def test_stages_take_all_layers_and_pages_hold_all_slots():
    j = job()
    spans = [j.placement("prefill", n).layers for n in range(3)]
    assert [(s.start, s.stop) for s in spans] == [(0, 2), (2, 4), (4, 7)]
    assert [j.slots(n) for n in (1, 8, 9, 50)] == [8, 8, 16, 56]
    assert [(j.pages("prefill", n), j.pages("decode", n)) for n in (1, 25, 50)] == [
        (1, 1), (2, 2), (4, 3),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="stage"):
        job(stage="x")


def test_nothing_that_differs_goes_unsaid():
    state = State(job(pp_prefill=1, decode_tp=1))
    assert len(state.problems()) == 3
    state.take("prefill 0", Token(65, 0.1))
    state.take("decode 0", Token(66, 0.2))
    state.take("decode 0", Held(0.1, 1, "aa"))
    state.take("single 0", Single([65, 66], ["aa"], 0.3))
    assert state.problems() == []
    state.take("single 0", Single([65, 67], ["ab"], 0.3))
    assert len(state.problems()) == 2
    state.take("prefill 0", Moved("decode 0", (0, 1), 10, 0.1, True, "why", ""))
    lane = state.lanes["prefill 0", "decode 0"]
    assert (lane.layers, lane.nbytes, lane.packed, lane.why) == (1, 10, {True}, "why")
