"""Reports: figures against values worked out here, a page that stands alone, a replay's data."""

import re
from html.parser import HTMLParser

import msgspec
import pytest

from kvconnect.errors import ConfigError
from kvconnect.testing.cluster import catalog, journal, report, running
from kvconnect.testing.cluster.figures import latencies, percentile, slices
from kvconnect.testing.cluster.invariants import Run, judge
from kvconnect.testing.cluster.runner import Ended
from kvconnect.testing.cluster.summing import table
from tests.cluster.test_invariants import LIMITS, MEMBERS, PLAN, changed, heard, story
from tests.cluster.test_scenario_files import GOOD


@pytest.fixture
def ended():
    entries = sorted(changed(story(), 3.2, "r-0", wrong=(5,)), key=lambda e: e.at)
    run = Run(MEMBERS, LIMITS, PLAN, entries)
    return Ended(catalog.parse(GOOD, "mine"), 9, 20.0, run, judge(run))


def test_percentiles_are_values_that_were_seen():
    values = [float(n) for n in range(100, 0, -1)]
    assert [percentile(values, p) for p in (0, 1, 50, 99, 100)] == [1, 1, 50, 99, 100]
    assert percentile([], 50) == 0
    assert percentile([3.0], 99) == 3.0


def test_slices_say_what_was_asked_for_got_and_moved():
    entries = [
        heard(0.1, "r-0", asked=8, hits=(1, 2), nbytes=100, misses={"ABSENT": 6}, seconds=0.5),
        heard(0.2, "r-0", asked=2, hits=(3, 4), nbytes=50, seconds=0.1),
        heard(0.2, "w-0", asked=2, acked=(3, 4), nbytes=7, seconds=0.2),
        heard(-1.0, "r-0", asked=99, hits=(1,), nbytes=5),
        heard(1.9, "r-0", asked=4, misses={"TIMEOUT": 4}),
    ]
    found = slices(MEMBERS, entries, 2.0)
    assert [one.at for one in found] == [n / 4 for n in range(8)]
    first, last = found[0], found[-1]
    assert (first.asked, first.hits, first.hit_rate) == (10, 4, 0.4)
    assert first.nbytes == {"host1": 150, "host0": 7}
    assert (first.p50, first.p99) == ({"load": 0.1, "store": 0.2}, {"load": 0.5, "store": 0.2})
    assert (last.asked, last.hit_rate) == (4, 0.0)
    assert all(one.hit_rate is None for one in found[1:-1])
    by_op = {one.op: (one.calls, one.bad, one.most) for one in latencies(entries)}
    assert by_op == {"load": (3, 1, 0.5), "store": (1, 0, 0.2)}


class Page(HTMLParser):
    """Checks that what is opened is closed, and keeps the tags."""

    VOID = frozenset({"meta", "rect", "line", "path", "br"})

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_a_report_is_one_page_of_its_own_and_a_document_that_can_be_read_again(ended, tmp_path):
    made = report.make(ended, ended.scenario, 2)
    entries = list(ended.run.entries)
    result = report.write(made, entries, tmp_path / "a run")
    html = (tmp_path / "a run" / "report.html").read_text()
    page = Page()
    page.feed(html)
    assert page.open == []
    assert page.tags.count("svg") == 4
    assert not re.search(r"(src|href)=|url\(|@import|<script", html)
    assert "prefers-color-scheme: dark" in html
    assert "r-0 was handed wrong bytes in pages 5" in page.text
    assert "cut host0" in page.text
    assert journal.read(tmp_path / "a run" / "events.jsonl") == entries
    assert report.read(result) == made
    assert made.invariants == dict.fromkeys(made.invariants, True) | {"bytes": False}
    assert made.verified == {"w": (8, 0, 0)}


def test_runs_in_one_table_with_a_row_for_each_fault_over_its_rounds(ended):
    made = report.make(ended, ended.scenario, 2)
    first = made.traces[0]
    again = [(0, (), None, None), (9, ("w-0",), 0.25, 4.0), (2, ("w-0",), 3.0, None)]
    traces = [
        msgspec.structs.replace(first, bad=bad, hit=hit, detect=detect, outage=outage)
        for bad, hit, detect, outage in again
    ]
    other = msgspec.structs.replace(first, words="kill x | y")
    many = msgspec.structs.replace(made, traces=[*traces, other], verified={"a": (7, 1, 0)})
    calm = msgspec.structs.replace(made, traces=[], verified={}, passed=True)
    lines = table([many, calm]).split("\n")
    rows = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert {len(row) for row in rows} == {10}
    assert rows[2:] == [
        ["mine", "2", "20 s", "cut host0", "3", "0-9", "0.2-3.0 s", "4.0 s", "1 of 8", "NO"],
        ["mine", "2", "20 s", "kill x \\| y", "1", "6", "1.2 s", "3.2 s", "1 of 8", "NO"],
        ["mine", "2", "20 s", "none", "0", "6", "-", "-", "-", "yes"],
    ]


def test_a_result_is_all_that_a_replay_needs(ended, tmp_path):
    result = report.write(report.make(ended, ended.scenario, 2), [], tmp_path)
    wanted = running.again(result)
    assert (wanted.scenario, wanted.seed, wanted.seconds, wanted.hosts) == (
        ended.scenario, 9, 20.0, 2,
    )  # fmt: skip
    lines = running.summary(running.Done(report.read(result), result))
    failed = next(line for line in lines if line.startswith("FAILED"))
    assert failed == "FAILED bytes at 3.20 s: r-0 was handed wrong bytes in pages 5"
    assert lines[-1] == f"again: kvconnect cluster replay {result}"
    assert any("cut host0: 6 bad calls from 1.2 s, well again after 3.2 s" in x for x in lines)


def test_what_is_no_result_or_of_another_version_is_refused(ended, tmp_path):
    path = tmp_path / "RESULT.json"
    with pytest.raises(ConfigError, match="is no result of a cluster run"):
        report.read(path)
    path.write_text('{"version": 2}')
    with pytest.raises(ConfigError, match="is version 2, this kvconnect reads 1"):
        report.read(path)
    made = msgspec.to_builtins(report.make(ended, ended.scenario, 2)) | {"seed": "x"}
    path.write_bytes(msgspec.json.encode(made))
    with pytest.raises(ConfigError, match=r"Expected `int`, got `str` - at `\$.seed`"):
        report.read(path)
