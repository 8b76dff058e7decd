"""What a scenario's single fields cannot say about each other: hosts, names, what a fault needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvconnect.errors import ConfigError
from kvconnect.testing.cluster import shaping
from kvconnect.testing.cluster.scenario import FaultSpec, Scenario

_NEEDS: dict[str, tuple[str, ...]] = {
    "partition": ("groups",),
    "shape": ("hosts", "rate"),
    "drop": ("hosts", "percent"),
    "cut": ("hosts",),
    "fill_disk": ("hosts",),
    "power_cut": ("hosts",),
}
_TARGETS = ("kill", "stop", "restart")


def check(scenario: Scenario, source: str) -> None:
    """Refuse a scenario that cannot be run: `ConfigError` names field, value and fix."""
    for field, words in _problems(scenario):
        raise ConfigError(f"scenario {source}: {field} {words}")


def faults_of(scenario: Scenario) -> list[tuple[str, FaultSpec]]:
    """Return every fault of the file with where it stands."""
    listed = [(f"faults[{i}]", fault) for i, fault in enumerate(scenario.faults)]
    drawn = () if scenario.random is None else scenario.random.faults
    return listed + [(f"random.faults[{i}]", fault) for i, fault in enumerate(drawn)]


def _problems(scenario: Scenario) -> Iterator[tuple[str, str]]:
    if not scenario.groups and not scenario.pairs:
        yield "groups", "and pairs are both empty; nothing would be tested"
    if scenario.most < scenario.hosts:
        yield "most", f"is {scenario.most}, fewer than hosts={scenario.hosts}"
    if scenario.rate is not None:
        shaping.rate_bits(scenario.rate)
    yield from _names(scenario)
    yield from _hosts(scenario)
    for where, fault in faults_of(scenario):
        yield from _fault(scenario, where, fault)


def _names(scenario: Scenario) -> Iterator[tuple[str, str]]:
    names = [service.name for service in scenario.services]
    names += [group.name for group in scenario.groups]
    names += [pair.name for pair in scenario.pairs]
    for name in sorted({n for n in names if names.count(n) > 1}):
        yield "name", f"{name!r} is taken twice; names of services, groups and pairs must differ"
    before: list[str] = []
    for service in scenario.services:
        if service.of and service.of not in before:
            yield f"service {service.name}: of", f"is {service.of!r}; those before it: {before}"
        before.append(service.name)
    for group in scenario.groups:
        if group.store not in before:
            yield f"group {group.name}: store", f"is {group.store!r}; the services: {before}"
        if not group.roles:
            yield f"group {group.name}: roles", "is empty; write, read or both"


def _hosts(scenario: Scenario) -> Iterator[tuple[str, str]]:
    placed: list[tuple[str, Sequence[int]]] = [(g.name, g.hosts) for g in scenario.groups]
    for pair in scenario.pairs:
        placed += [(f"{pair.name}.prefill", pair.prefill.hosts)]
        placed += [(f"{pair.name}.decode", pair.decode.hosts)]
    for where, hosts in placed:
        if not hosts:
            yield f"{where}: hosts", "is empty; name one host, or one for each rank"
    placed += [(s.name, (s.host,)) for s in scenario.services]
    for where, fault in faults_of(scenario):
        placed.append((where, (*fault.hosts, *fault.peers, *(h for g in fault.groups for h in g))))
    for where, hosts in placed:
        for host in hosts:
            if host >= scenario.hosts:
                yield f"{where}: host", f"{host} is not in 0..{scenario.hosts - 1}"


def _fault(scenario: Scenario, where: str, fault: FaultSpec) -> Iterator[tuple[str, str]]:
    missing = [name for name in _NEEDS.get(fault.kind, ()) if not getattr(fault, name)]
    if missing:
        yield f"{where}: {missing[0]}", f"is missing; a {fault.kind} needs it"
    if fault.kind in _TARGETS and not (fault.hosts or fault.services or fault.workers):
        yield f"{where}: hosts", f"is missing; a {fault.kind} needs hosts, services or workers"
    if fault.rate is not None:
        shaping.rate_bits(fault.rate)
    if fault.percent is not None:
        shaping.fraction(fault.percent)
    services = [service.name for service in scenario.services]
    for name in fault.services:
        if name not in services:
            yield f"{where}: services", f"has {name!r}; the services: {services}"
    workers = worker_names(scenario)
    for name in fault.workers:
        if name not in workers:
            yield f"{where}: workers", f"has {name!r}; the workers: {workers}"
    end, step = fault.at + fault.seconds, scenario.seconds.round or scenario.seconds.short
    if where.startswith("faults") and end > step:
        yield f"{where}: at", f"and for end at {end:g} s, when the round of {step:g} s is over"


def worker_names(scenario: Scenario) -> list[str]:
    """Return the names of all workers that a scenario starts."""
    names = [f"{g.name}-{rank}" for g in scenario.groups for rank in range(g.tp)]
    for pair in scenario.pairs:
        names += [f"{pair.name}-prefill-{rank}" for rank in range(pair.prefill.tp)]
        names += [f"{pair.name}-decode-{rank}" for rank in range(pair.decode.tp)]
    return names
