"""What a scenario's single fields cannot say about each other: hosts, names, what a fault needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvconnect.errors import ConfigError, KVConnectError
from kvconnect.testing.cluster import shaping
from kvconnect.testing.cluster.rank_shape import RankShape
from kvconnect.testing.cluster.scenario import FaultSpec, Model, Scenario
from kvconnect.testing.cluster.services import KINDS

T = TypeVar("T")

_NEEDS: dict[str, tuple[str, ...]] = {
    "partition": ("groups",),
    "shape": ("hosts", "rate"),
    "drop": ("hosts", "percent"),
    "cut": ("hosts",),
    "fill_disk": ("hosts",),
    "power_cut": ("hosts",),
}
_TARGETS = ("kill", "stop", "restart")
_ONLY: dict[str, tuple[str, ...]] = {
    "dropped": ("cut", "partition", "drop"),
    "ended": ("kill", "restart", "rolling", "power_cut"),
}
"""Effects that only some faults have."""


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
    yield from _said("rate", shaping.rate_bits, scenario.rate)
    yield from _names(scenario)
    yield from _hosts(scenario)
    yield from _shapes(scenario)
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
        if service.kind not in KINDS:
            kinds = ", ".join(sorted(KINDS))
            yield f"service {service.name}: kind", f"is {service.kind!r}; it must be one of {kinds}"
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


def _shapes(scenario: Scenario) -> Iterator[tuple[str, str]]:
    """Plan every rank's pool, so that a layout or a TP size is refused before hosts are made."""
    unit = scenario.model.unit
    ranks = [(g.name, g.layout, unit, g.tp, g.pages) for g in scenario.groups]
    for pair in scenario.pairs:
        for role, side in (("prefill", pair.prefill), ("decode", pair.decode)):
            ranks.append((f"{pair.name}.{role}", side.layout, side.page_size, side.tp, side.pages))
    for name, layout, page_size, tp, pages in ranks:
        shape = (scenario.model, layout, page_size, tp, pages)
        yield from _said(f"{name}: layout and tp", lambda one: _plan(*one), shape)


def _plan(model: Model, layout: str, page_size: int, tp: int, pages: int) -> None:
    for rank in range(tp):
        RankShape(
            layout=layout, dtype=model.dtype, page_size=page_size, layers=model.layers,
            heads=model.heads, head_dim=model.head_dim, v_head_dim=model.v_head_dim,
            tp_rank=rank, tp_size=tp, pages=pages, seed=0,
        ).plan()  # fmt: skip


def _said(where: str, judge: Callable[[T], object], value: T | None) -> Iterator[tuple[str, str]]:
    """Yield what `judge` says against a value, where there is one."""
    try:
        if value is not None:
            judge(value)
    except KVConnectError as error:
        yield where, f"cannot be: {error}"


def _fault(scenario: Scenario, where: str, fault: FaultSpec) -> Iterator[tuple[str, str]]:
    missing = [name for name in _NEEDS.get(fault.kind, ()) if not getattr(fault, name)]
    if missing:
        yield f"{where}: {missing[0]}", f"is missing; a {fault.kind} needs it"
    if fault.kind in _TARGETS and not (fault.hosts or fault.services or fault.workers):
        yield f"{where}: hosts", f"is missing; a {fault.kind} needs hosts, services or workers"
    if fault.kind not in (able := _ONLY.get(fault.shows, (fault.kind,))):
        yield f"{where}: effect", f"is {fault.shows!r}; that is one of {', '.join(able)} alone"
    yield from _said(f"{where}: rate", shaping.rate_bits, fault.rate)
    yield from _said(f"{where}: percent", shaping.fraction, fault.percent)
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
