"""One run from its request to its report: make the cluster, run, judge, write, say what failed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvconnect.errors import CapabilityError, ConfigError
from kvconnect.testing.cluster import report
from kvconnect.testing.cluster.cluster import Cluster
from kvconnect.testing.cluster.faults import schedule
from kvconnect.testing.cluster.inventory import Inventory
from kvconnect.testing.cluster.recovery import Trace
from kvconnect.testing.cluster.report import Report
from kvconnect.testing.cluster.runner import Runner
from kvconnect.testing.cluster.scenario import Scenario
from kvconnect.testing.cluster.scenario_check import faults_of
from kvconnect.testing.cluster.topology import spread

_MIB = 1 << 20
_FINDINGS_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A run that is asked for. `seconds` None: the short length; `hosts` None: the fewest.

    `inventory` is the file of an existing cluster; None makes one on this machine.
    """

    scenario: Scenario
    seed: int = 1
    seconds: float | None = None
    hosts: int | None = None
    inventory: Path | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """A run that is over, and where its RESULT.json lies."""

    report: Report
    result: Path


def perform(wanted: Wanted, out: Path, say: Callable[[str], None]) -> Done:
    """Run a scenario and write its report, events and logs to the folder `out`.

    Raises `ConfigError` where it cannot be run as asked, `UnavailableError` where this machine
    lacks something, and `CapabilityError` where a host cannot do one of its faults.
    """
    scenario = wanted.scenario
    hosts = scenario.hosts if wanted.hosts is None else wanted.hosts
    if not scenario.hosts <= hosts <= scenario.most:
        raise ConfigError(
            f"hosts={hosts}: scenario {scenario.name} takes {scenario.hosts} to {scenario.most}"
        )
    seconds = scenario.seconds.short if wanted.seconds is None else wanted.seconds
    say(f"{scenario.name}: seed {wanted.seed}, {seconds:g} s, {hosts} hosts")
    plan = schedule(spread(scenario, hosts), wanted.seed, seconds)
    if not plan and (scenario.faults or scenario.random is not None):
        raise ConfigError(
            f"scenario {scenario.name}: none of its faults is over within {seconds:g} s; give a "
            f"longer --duration ({scenario.seconds.short:g} s is its short length)"
        )
    for planned in plan:
        say(f"  {planned.at:7.2f} s  for {planned.seconds:6.2f} s  {planned.words}")
    with _cluster(wanted, hosts, out / "logs") as cluster:
        ended = Runner(scenario, cluster, seed=wanted.seed, seconds=seconds, say=say).run()
    made = report.make(ended, scenario, hosts, str(wanted.inventory or ""))
    return Done(made, report.write(made, list(ended.run.entries), out))


def _cluster(wanted: Wanted, hosts: int, logs: Path) -> Cluster:
    scenario = wanted.scenario
    logs.mkdir(parents=True, exist_ok=True)
    if wanted.inventory is not None:
        refuse_over_ssh(scenario)
        return Cluster.over_ssh(Inventory.read(wanted.inventory).first(hosts), directory=logs)
    disk = scenario.disk_mib * _MIB
    return Cluster.local(hosts, disk=disk, rate=scenario.rate, directory=logs)


def refuse_over_ssh(scenario: Scenario) -> None:
    """Refuse what real hosts cannot be told to do; `CapabilityError` names the fault."""
    for _, fault in faults_of(scenario):
        if fault.kind == "power_cut":
            raise CapabilityError(
                f"scenario {scenario.name}: hosts over ssh cannot do {fault.kind}; run it on this "
                "machine, without --inventory"
            )


def again(result: Path) -> Wanted:
    """Return the run that a RESULT.json tells of, to be performed again."""
    told = report.read(result)
    return Wanted(
        scenario=told.scenario,
        seed=told.seed,
        seconds=told.seconds,
        hosts=told.hosts,
        inventory=Path(told.inventory) if told.inventory else None,
    )


def summary(done: Done) -> list[str]:
    """Return what to tell of a run: its faults, what did not hold, how to repeat it."""
    made = done.report
    lines = [f"  {_followed(one)}" for one in made.traces]
    lines += [
        f"  {one.op}: {one.calls} calls, {one.bad} bad, p50 {one.p50 * 1e3:.1f} ms, "
        f"p99 {one.p99 * 1e3:.1f} ms"
        for one in made.latencies
    ]
    lines += [f"  {g}: {n[0]} pages there, {n[1]} missing" for g, n in made.verified.items()]
    for finding in made.findings[:_FINDINGS_SHOWN]:
        lines.append(f"FAILED {finding.invariant} at {finding.at:.2f} s: {finding.words}")
        if finding.entry is not None:
            lines.append(f"       {msgspec.json.encode(finding.entry).decode()[:1000]}")
    if more := len(made.findings) - _FINDINGS_SHOWN:
        lines += [f"and {more} more"] if more > 0 else []
    verdict = "passed" if made.passed else "FAILED"
    lines.append(f"{made.scenario.name} {verdict}; {done.result.parent / 'report.html'}")
    if not made.passed:
        lines.append(f"again: {report.replay_command(done.result)}")
    return lines


def _followed(one: Trace) -> str:
    if not one.hit:
        return f"{one.words}: {'seen, ' * one.shown}no call failed"
    kind = "slow" if one.shows == "slow" else "bad"
    seen = f"{one.bad} {kind} calls" + ("" if one.detect is None else f" from {one.detect:.1f} s")
    never = "not well again" if one.next is None else "not well before the next fault"
    well = never if one.outage is None else f"well again after {one.outage:.1f} s"
    return f"{one.words}: {seen}, {well}"


def folder_of(wanted: Wanted, parent: Path) -> Path:
    """Return a new folder's name for a run, below `parent`."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return parent / f"{wanted.scenario.name}-{wanted.seed}-{stamp}"
