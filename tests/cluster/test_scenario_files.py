"""Scenario files and schedules: what is refused, with which words, and what a seed fixes."""

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from kvconnect.errors import ConfigError
from kvconnect.testing.cluster import catalog
from kvconnect.testing.cluster.faults import schedule
from kvconnect.testing.cluster.topology import spread

GOOD = """
name = "mine"
about = "a test"
hosts = 2
[seconds]
short = 20
full = 100
[[services]]
name = "disk"
kind = "nvme"
[[groups]]
name = "writer"
hosts = [0]
tp = 2
store = "disk"
spread = true
[[faults]]
kind = "cut"
at = 2
for = 3
hosts = [1]
"""


def parse(text):
    return catalog.parse(text, "mine.toml")


def test_the_catalogue_reads_and_every_file_has_its_name():
    found = catalog.everything()
    assert len({one.name for one in found}) == len(found)
    assert {"pd-mooncake", "pd-nixl"} <= {one.name for one in found}
    for one in found:
        assert one.hosts <= 5
        assert catalog.find(one.name) == one


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("at = 2", "att = 2", "unknown field `att` - at `$.faults[0]`"),
        ("hosts = 2", "hosts = 0", "Expected `int` >= 1 - at `$.hosts`"),
        ("at = 2", "att = 2", "there are kind, at, for, hosts, peers, services, workers, groups"),
        ("short = 20", "shortest = 20", "at `$.seconds`; there are short, full, round"),
        ('kind = "cut"', 'kind = "burn"', "Invalid enum value 'burn' - at `$.faults[0].kind`"),
        ('kind = "cut"', 'kind = "burn"', "must be one of 'cut', 'drop', 'fill_disk', "),
        ('kind = "cut"', 'kind = "cut"\neffect = "gone"', "one of 'dropped', 'ended', 'miss', 'no"),
        ('kind = "cut"', 'kind = "cut"\neffect = "ended"', "faults[0]: effect is 'ended'; that"),
        ('kind = "cut"', 'kind = "stop"\neffect = "dropped"', "one of cut, partition, drop alone"),
        ("tp = 2", "tp = 3", "writer: layout and tp cannot be: tp size 3 and total KV heads 4"),
        ("tp = 2", 'layout = "pages"', "writer: layout and tp cannot be: layout 'pages' is"),
        ('kind = "nvme"', 'kind = "disk"', "service disk: kind is 'disk'; it must be one of etcd"),
        ("hosts = [1]", "hosts = [2]", r"faults[0]: host 2 is not in 0..1"),
        ("hosts = [1]", "", "faults[0]: hosts is missing; a cut needs it"),
        ('kind = "cut"', 'kind = "shape"', "faults[0]: rate is missing; a shape needs it"),
        ('kind = "cut"', 'kind = "kill"\nworkers = ["w"]', "workers has 'w'; the workers: ['writ"),
        ('kind = "cut"', 'kind = "kill"\nservices = ["s"]', "services has 's'; the services: ['d"),
        ("at = 2", "at = 18", "faults[0]: at and for end at 21 s, when the round of 20 s is"),
        ('store = "disk"', 'store = "disc"', "group writer: store is 'disc'; the services: ['disk"),
        ('name = "writer"', 'name = "disk"', "name 'disk' is taken twice"),
        ('kind = "nvme"', 'kind = "nvme"\nof = "disk"', "service disk: of is 'disk'"),
        ("hosts = 2", "hosts = 2\nmost = 1", "most is 1, fewer than hosts=2"),
        ('kind = "cut"', 'kind = "shape"\nrate = "fast"', "rate cannot be: rate='fast' is none"),
        ('kind = "cut"', 'kind = "drop"\npercent = 101.0', "percent cannot be: percent=101"),
    ],
)
def test_a_file_that_cannot_be_run_is_refused_by_field_and_value(old, new, words):
    assert parse(GOOD).name == "mine"
    text = GOOD.replace(old, new)
    assert text != GOOD
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert words in str(caught.value)


def test_a_scenario_without_any_load_is_refused():
    text = GOOD[: GOOD.index("[[groups]]")] + GOOD[GOOD.index("[[faults]]") :]
    with pytest.raises(ConfigError, match="nothing would be tested"):
        parse(text)


def test_a_file_whose_name_is_not_the_scenarios_and_a_name_nobody_has(tmp_path):
    (tmp_path / "other.toml").write_text(GOOD)
    with pytest.raises(ConfigError, match="name is 'mine', the file says other"):
        catalog.find(str(tmp_path / "other.toml"))
    (tmp_path / "mine.toml").write_text(GOOD)
    assert catalog.find(str(tmp_path / "mine.toml")) == parse(GOOD)
    with pytest.raises(ConfigError, match="no scenario 'pd-mooncak'; did you mean pd-mooncake"):
        catalog.find("pd-mooncak")


def test_a_list_of_faults_is_repeated_as_often_as_whole_rounds_fit():
    scenario = parse(GOOD.replace("short = 20", "short = 20\nround = 15"))
    assert [one.at for one in schedule(scenario, 1, 20.0)] == [2.0]
    assert [one.at for one in schedule(scenario, 1, 47.0)] == [2.0, 17.0, 32.0]
    assert [one.number for one in schedule(scenario, 1, 47.0)] == [0, 1, 2]
    assert [one.at for one in schedule(scenario, 1, 5.0)] == [2.0]
    assert schedule(scenario, 1, 4.0) == ()


def test_a_rolling_restart_is_one_restart_of_each_service_and_worker_in_turn():
    text = GOOD.replace(
        'kind = "cut"\nat = 2\nfor = 3\nhosts = [1]', "kind = 'rolling'\nat=1\nfor=6"
    )
    plan = schedule(parse(text), 1, 20.0)
    assert [one.words for one in plan] == ["restart disk", "restart writer-0", "restart writer-1"]
    assert [one.at for one in plan] == [1.0, 3.0, 5.0]
    assert {one.fault.shows for one in plan} == {"ended"}


RANDOM = (
    GOOD[: GOOD.index("[[faults]]")]
    + """
[random]
every = 2.0
quiet = 10
[[random.faults]]
kind = "cut"
at = 0
for = 4
hosts = [1]
[[random.faults]]
kind = "stop"
at = 0
for = 2
workers = ["writer-0"]
"""
)


def test_a_seed_fixes_the_drawn_faults_and_they_follow_each_other():
    scenario = parse(RANDOM)
    plan = schedule(scenario, 7, 300.0)
    assert plan == schedule(parse(RANDOM), 7, 300.0)
    assert plan != schedule(scenario, 8, 300.0)
    assert len(plan) > 20
    assert {one.fault.kind for one in plan} == {"cut", "stop"}
    for one, following in pairwise(plan):
        assert one.until <= following.at
    for one in plan:
        assert one.fault.seconds / 2 <= one.seconds <= one.fault.seconds
        assert one.until <= 290.0


def test_groups_are_spread_over_more_hosts():
    scenario = parse(GOOD)
    assert spread(scenario, 2) == scenario
    wide = spread(scenario, 4)
    assert [(g.name, g.hosts) for g in wide.groups] == [
        ("writer", (0,)), ("writer-on2", (2,)), ("writer-on3", (3,)),
    ]  # fmt: skip
    assert msgspec.structs.replace(wide, groups=scenario.groups, hosts=2) == scenario


def test_the_scenario_in_the_docs_can_be_run():
    docs = Path(__file__).parents[2] / "docs" / "cluster-tests.md"
    text = docs.read_text(encoding="utf-8").split("```toml\n")[1].split("```")[0]
    assert parse(text).limits.lost == "volatile"
