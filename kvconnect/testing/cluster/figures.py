"""Figures of a run: percentiles of latency, and what each slice of its time brought."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kvconnect.testing.cluster.events import Call
from kvconnect.testing.cluster.journal import Entry, Heard, Member
from kvconnect.testing.cluster.recovery import bad, calls

_SLICES = 120
_LEAST_SECONDS = 0.25


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that calls of one operation took; the bad ones are counted apart."""

    op: str
    calls: int
    bad: int
    p50: float
    p90: float
    p99: float
    most: float


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """A slice of the run from `at`: pages asked for and got by reading, latency, bytes by host.

    `p50` and `p99` are seconds by operation, `nbytes` of good calls, by host.
    """

    at: float
    seconds: float
    asked: int
    hits: int
    p50: dict[str, float]
    p99: dict[str, float]
    nbytes: dict[str, int]

    @property
    def hit_rate(self) -> float | None:
        """The share of the pages asked for that came; None where none were asked for."""
        return self.hits / self.asked if self.asked else None


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the least value that `percent` of the values do not exceed; 0 where there is none.

    >>> percentile([4.0, 1.0, 3.0, 2.0], 50)
    2.0
    """
    if not values:
        return 0.0
    rank = max(math.ceil(len(values) * percent / 100), 1)
    return sorted(values)[rank - 1]


def latencies(entries: Iterable[Entry]) -> list[Latency]:
    """Return the latencies of the load's calls, by operation."""
    found: dict[str, list[Call]] = {}
    for call in (_call(one) for one in _load(entries)):
        found.setdefault(call.op, []).append(call)
    return [
        Latency(
            op=op,
            calls=len(those),
            bad=sum(bad(call) for call in those),
            p50=percentile([call.seconds for call in those], 50),
            p90=percentile([call.seconds for call in those], 90),
            p99=percentile([call.seconds for call in those], 99),
            most=max(call.seconds for call in those),
        )
        for op, those in sorted(found.items())
    ]


def slices(members: Iterable[Member], entries: Sequence[Entry], seconds: float) -> list[Slice]:
    """Cut the load's time in slices; a call counts in that in which it ended."""
    step = max(seconds / _SLICES, _LEAST_SECONDS)
    known = {member.name: member for member in members}
    filled: dict[int, list[Heard]] = {}
    for one in _load(entries):
        filled.setdefault(int(one.at / step), []).append(one)
    count = max([math.ceil(seconds / step), *(number + 1 for number in filled)])
    return [_slice(n * step, step, filled.get(n, ()), known) for n in range(count)]


def _slice(at: float, step: float, heard: Sequence[Heard], known: Mapping[str, Member]) -> Slice:
    taken: dict[str, list[float]] = {}
    nbytes: dict[str, int] = {}
    asked = hits = 0
    for one in heard:
        call, member = _call(one), known[one.worker]
        taken.setdefault(call.op, []).append(call.seconds)
        host = f"host{member.host}"
        nbytes[host] = nbytes.get(host, 0) + call.nbytes
        if call.op == "load" or "decode" in member.roles:
            asked, hits = asked + call.asked, hits + len(call.hits)
    return Slice(
        at=round(at, 3),
        seconds=round(step, 3),
        asked=asked,
        hits=hits,
        p50={op: percentile(those, 50) for op, those in taken.items()},
        p99={op: percentile(those, 99) for op, those in taken.items()},
        nbytes=nbytes,
    )


def _load(entries: Iterable[Entry]) -> list[Heard]:
    return [one for ones in calls(entries).values() for one in ones if one.at >= 0]


def _call(heard: Heard) -> Call:
    assert isinstance(heard.event, Call)
    return heard.event
