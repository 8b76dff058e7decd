"""`kvconnect cluster`: exit codes, what a failed run prints, and that a replay is the same run."""

import re

import pytest
from typer.testing import CliRunner

from kvconnect.cli.main import app
from kvconnect.testing.cluster import catalog, report

SMALL = """
name = "small"
about = "one request after the other, too few of them"
hosts = 2
disk_mib = 16
seconds = {short = 6, full = 12}
limits = {calls = 1000000, pages = 1, recover = 5.0}
[[pairs]]
name = "pd"
transport = "shm"
batch = 4
deadline = 0.5
prefill = {hosts = [0], pages = 24}
decode = {hosts = [0], pages = 24}
[[faults]]
kind = "kill"
at = 0.5
for = 0.2
workers = ["pd-decode-0"]
effect = "ended"
"""


def invoke(*words):
    return CliRunner().invoke(app, ["cluster", *map(str, words)])


def test_list_tells_of_every_scenario():
    done = invoke("list")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [one.name for one in catalog.everything()]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "pd-nixel"), "no scenario 'pd-nixel'; did you mean pd-nixl"),
        (("run", "l3-share", "--hosts", "9"), "hosts=9: scenario l3-share takes 3 to 5"),
        (("run", "power-cut", "--inventory", "x.toml"), "hosts over ssh cannot do power_cut"),
        (("run", "power-cut", "--hosts", "x.toml"), "hosts over ssh cannot do power_cut"),
        (("run", "power-cut", "--duration", "3"), "none of its faults is over within 3 s"),
        (("replay", "nowhere.json"), "nowhere.json is no result of a cluster run"),
        (("table", "nowhere.json"), "nowhere.json is no result of a cluster run"),
    ],
)
def test_what_cannot_be_run_is_refused(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = invoke(*words)
    assert said in str(done.exception)


@pytest.mark.parametrize(
    "words", [("--hosts", "0"), ("--hosts", "x"), ("--hosts", "x.toml", "--inventory", "y.toml")]
)
def test_hosts_are_a_number_or_a_file(words):
    done = invoke("run", "pd-nixl", *words)
    assert done.exit_code == 2
    assert "is neither a number above 0 nor the only" in done.output


def test_a_length_is_one_or_the_other():
    done = invoke("run", "pd-nixl", "--full", "--duration", "20")
    assert done.exit_code == 2
    assert "--full is a length of its own" in done.output


def test_a_run_that_fails_tells_why_and_how_to_repeat_it(tmp_path):
    (tmp_path / "small.toml").write_text(SMALL)
    done = invoke("run", tmp_path / "small.toml", "--seed", "5", "--out", tmp_path / "runs")
    assert done.exit_code == 1, done.output
    assert "0.50 s  for   0.20 s  kill pd-decode-0" in done.stdout
    assert re.search(r"FAILED load at 0.00 s: \d+ calls, at least 1000000", done.stdout)
    again = re.search(r"again: kvconnect cluster replay (\S+)", done.stdout)
    first = report.read(tmp_path / "runs" / again[1])
    assert [one.invariant for one in first.findings] == ["load"]
    assert (first.seed, first.seconds, first.passed) == (5, 6.0, False)
    assert (tmp_path / "runs" / again[1]).with_name("events.jsonl").exists()
    repeated = invoke("replay", again[1], "--out", tmp_path / "again")
    assert repeated.exit_code == 1
    second = report.read(next((tmp_path / "again").glob("*/RESULT.json")))
    assert (second.plan, second.seed, second.scenario) == (first.plan, 5, first.scenario)


def test_a_run_that_passes_ends_with_0(tmp_path):
    (tmp_path / "small.toml").write_text(SMALL.replace("1000000", "10"))
    done = invoke("run", tmp_path / "small.toml", "--duration", "6", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "small passed" in done.stdout
    summed = invoke("table", *tmp_path.glob("small-*"))
    assert summed.exit_code == 0
    assert "| small | 2 | 6 s | kill pd-decode-0 | 1 |" in summed.stdout
