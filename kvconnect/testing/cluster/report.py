"""The report of a run: a versioned JSON document, beside it a page for people and the journal.

The document holds all that a replay needs: the scenario as it ran, the seed and the length.
"""

from __future__ import annotations

import os
import platform
import shlex
import time
from pathlib import Path

import msgspec

from kvconnect.errors import ConfigError
from kvconnect.testing.cluster import journal, report_html
from kvconnect.testing.cluster.faults import Planned
from kvconnect.testing.cluster.figures import Latency, Slice, latencies, slices
from kvconnect.testing.cluster.invariants import INVARIANTS, Finding
from kvconnect.testing.cluster.journal import Member, Verified
from kvconnect.testing.cluster.recovery import Trace, trace
from kvconnect.testing.cluster.runner import Ended
from kvconnect.testing.cluster.scenario import Scenario

VERSION = 1


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `RESULT.json` holds. Seconds are of the run, from the beginning of its load.

    `invariants` says by name what held; `verified` counts pages by group as found, missing and
    wrong at the end.
    """

    version: int = VERSION
    scenario: Scenario
    seed: int
    seconds: float
    hosts: int
    inventory: str
    written: str
    machine: str
    passed: bool
    invariants: dict[str, bool]
    findings: list[Finding]
    plan: list[Planned]
    traces: list[Trace]
    members: list[Member]
    latencies: list[Latency]
    slices: list[Slice]
    verified: dict[str, tuple[int, int, int]]


def make(ended: Ended, scenario: Scenario, hosts: int, inventory: str = "") -> Report:
    """Sum up a run; `scenario` is as it was written, for the replay."""
    run = ended.run
    failed = {FAMILY.get(finding.invariant, finding.invariant) for finding in ended.findings}
    verified = {
        one.group: (len(one.ok), len(one.missing), len(one.wrong))
        for one in run.entries
        if isinstance(one, Verified)
    }
    return Report(
        scenario=scenario,
        seed=ended.seed,
        seconds=ended.seconds,
        hosts=hosts,
        inventory=inventory,
        written=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        machine=f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
        passed=not ended.findings,
        invariants={name: name not in failed for name in INVARIANTS},
        findings=list(ended.findings),
        plan=list(run.plan),
        traces=trace(run.plan, run.entries),
        members=list(run.members),
        latencies=latencies(run.entries),
        slices=slices(run.members, run.entries, ended.seconds),
        verified=verified,
    )


FAMILY = {"detect": "recovery", "bites": "recovery"}
"""Findings that belong to the invariant of another name."""


def write(report: Report, entries: list[journal.Entry], folder: Path) -> Path:
    """Write RESULT.json, report.html and events.jsonl into a folder; return the first."""
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "RESULT.json"
    result.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    (folder / "report.html").write_text(report_html.page(report), encoding="utf-8")
    journal.write(folder / "events.jsonl", entries)
    return result


def read(path: Path) -> Report:
    """Read a RESULT.json, or that of a run's folder; `ConfigError` where it is none we know."""
    path = path / "RESULT.json" if path.is_dir() else path
    try:
        text = path.read_bytes()
        version = msgspec.json.decode(text, type=_Version).version
        if version != VERSION:
            raise ConfigError(f"{path} is version {version}, this kvconnect reads {VERSION}")
        return msgspec.json.decode(text, type=Report)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is no result of a cluster run: {error}") from error


class _Version(msgspec.Struct):
    version: int


def replay_command(result: Path) -> str:
    """Return the command that runs the same again."""
    return f"kvconnect cluster replay {shlex.quote(str(result))}"
