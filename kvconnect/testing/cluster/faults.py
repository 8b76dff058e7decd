"""When which fault begins and ends in a run: the scenario's list, or drawn by a seed.

The schedule is fixed before the run starts and depends on nothing but scenario, seed and length,
so that a run can be repeated. Seconds are from the start of the load.
"""

from __future__ import annotations

import random

import msgspec

from kvconnect.testing.cluster.scenario import FaultSpec, Scenario
from kvconnect.testing.cluster.scenario_check import worker_names

_LEAST_SECONDS = 0.5
_REST_SECONDS = 2.0  # what was killed starts again


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of one run; `number` is its place in the schedule."""

    number: int
    at: float
    seconds: float
    fault: FaultSpec

    @property
    def until(self) -> float:
        """When it is to be lifted."""
        return self.at + self.seconds

    @property
    def words(self) -> str:
        """What it is and whom it hits, for people."""
        f = self.fault
        targets = [f"host{h}" for h in f.hosts] + [*f.services, *f.workers]
        targets += [" | ".join(",".join(f"host{h}" for h in g) for g in f.groups)]
        more = [f"from {', '.join(f'host{h}' for h in f.peers)}"] if f.peers else []
        more += [f.rate] if f.rate else []
        more += [f"{f.percent:g} %"] if f.percent else []
        return " ".join([f.kind.replace("_", " "), *filter(None, targets), *more])


def schedule(scenario: Scenario, seed: int, seconds: float) -> tuple[Planned, ...]:
    """Return the faults of a run of `seconds`, by their beginning."""
    drawn = _drawn(scenario, seed, seconds)
    timed = sorted([*_listed(scenario, seconds), *drawn], key=lambda one: (one[0], one[1]))
    return tuple(
        Planned(number=number, at=at, seconds=length, fault=fault)
        for number, (at, length, fault) in enumerate(timed)
    )


_Timed = tuple[float, float, FaultSpec]


def _listed(scenario: Scenario, seconds: float) -> list[_Timed]:
    """Repeat the list as often as whole rounds fit; of the first, what fits."""
    step = scenario.seconds.round or scenario.seconds.short
    rounds = max(int(seconds / step + 1e-9), 1) if scenario.faults else 0
    return [
        (number * step + at, length, fault)
        for number in range(rounds)
        for spec in scenario.faults
        for at, length, fault in _expanded(scenario, spec)
        if number * step + at + length <= seconds
    ]


def _expanded(scenario: Scenario, spec: FaultSpec) -> list[_Timed]:
    """Turn a rolling restart into one of every service and worker, in turn."""
    if spec.kind != "rolling":
        return [(spec.at, spec.seconds, spec)]
    services = [service.name for service in scenario.services]
    ones = [{"services": (name,)} for name in spec.services or services]
    ones += [{"workers": (name,)} for name in spec.workers or worker_names(scenario)]
    step = spec.seconds / max(len(ones), 1)
    return [
        (
            spec.at + number * step,
            0.0,
            msgspec.structs.replace(
                spec, **{"kind": "restart", "seconds": 0.0, "services": (), "workers": ()} | one
            ),
        )
        for number, one in enumerate(ones)
    ]


def _drawn(scenario: Scenario, seed: int, seconds: float) -> list[_Timed]:
    """Draw faults one after the other; the next begins when the one before is over."""
    if scenario.random is None:
        return []
    spec = scenario.random
    dice = random.Random(f"{scenario.name} {seed}")  # noqa: S311 - no secret
    found: list[_Timed] = []
    at = dice.expovariate(1 / spec.every)
    while True:
        fault = dice.choice(spec.faults)
        length = max(fault.seconds * dice.uniform(0.5, 1.0), _LEAST_SECONDS)
        if at + length > seconds - spec.quiet:
            return found
        found.append((round(at, 3), round(length, 3), fault))
        at += length + _REST_SECONDS + dice.expovariate(1 / spec.every)
