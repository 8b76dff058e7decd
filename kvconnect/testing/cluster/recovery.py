"""What each fault did to the calls: whether it showed, how soon, and when all was well again.

A call is bad when it missed pages for another reason than that they are not there, or has
nothing to tell at all; it is good when it got pages and is not bad. Workers that had a bad call
after the fault, or that it ended, are hit by it; what is well again is judged by them alone.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from kvconnect.testing.cluster.events import Call
from kvconnect.testing.cluster.faults import Planned
from kvconnect.testing.cluster.journal import Deed, Entry, Heard, Mark

GONE = frozenset({"ABSENT", "PARTIAL", "NOT_WRITER"})
"""Misses of pages, or parts of pages, that are not there: nobody's failure by themselves."""

_SLOWER = 2.0


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, as it went. Times are seconds of the run; `detect` and the like are durations.

    `detect`: from its application to the end of the first bad call. `recover`: from when it was
    lifted (for a restart: from when the process was ready again) to the end of the first good
    call, of the worker that took longest; 0 where all was well before that. `outage`: the same,
    from its application. None: it was not seen, or not well again. `next`: when the next fault
    began, after which nothing is told from this one.
    """

    fault: int
    words: str
    applied: float
    lifted: float | None
    shows: str  # what the scenario asks for
    shown: bool
    hit: tuple[str, ...] = ()
    bad: int = 0
    detect: float | None = None
    recover: float | None = None
    outage: float | None = None
    waits: tuple[str, ...] = ()  # workers that were hit and never well again
    next: float | None = None


def good(call: Call) -> bool:
    """Tell whether a call got pages and missed none that were there."""
    return bool(call.hits or call.acked) and not bad(call)


def bad(call: Call) -> bool:
    """Tell whether a call failed, for some of its pages at least."""
    return bool(set(call.misses) - GONE) or not (call.hits or call.acked or call.misses)


def calls(entries: Iterable[Entry]) -> dict[str, list[Heard]]:
    """Return the calls of the load of every worker, by when they were heard."""
    loads = ("store", "load", "transfer")
    found: dict[str, list[Heard]] = {}
    for entry in entries:
        if isinstance(entry, Heard) and isinstance(entry.event, Call) and entry.event.op in loads:
            found.setdefault(entry.worker, []).append(entry)
    return found


def trace(plan: Sequence[Planned], entries: Sequence[Entry]) -> list[Trace]:
    """Follow every fault of a run that was applied."""
    heard = calls(entries)
    deeds = [entry for entry in entries if isinstance(entry, Deed)]
    applied = {deed.fault: deed for deed in deeds if deed.what == "applied"}
    lifted = {deed.fault: deed for deed in deeds if deed.what == "lifted"}
    ended = [entry for entry in entries if isinstance(entry, Mark) and entry.what == "ended"]
    found = []
    for planned in plan:
        if (deed := applied.get(planned.number)) is not None:
            later = [d.began for d in applied.values() if d.began > deed.began]
            dead = {mark.worker for mark in ended if mark.fault == planned.number}
            until = min(later, default=math.inf)
            one = _One(planned, deed, lifted.get(planned.number), until)
            found.append(one.trace(heard, dead))
    return found


class _One:
    """One fault, and the time until the next."""

    def __init__(self, planned: Planned, deed: Deed, lifted: Deed | None, until: float) -> None:
        self._planned, self._deed, self._lifted, self._until = planned, deed, lifted, until
        self._free = math.inf if lifted is None else lifted.began
        self._shows = planned.fault.shows

    def trace(self, heard: Mapping[str, Sequence[Heard]], dead: set[str]) -> Trace:
        """Follow it through the calls; `dead` are the workers that it ended."""
        since, free = self._deed.began, None if self._lifted is None else self._lifted.at
        parts = {worker: self._split(mine) for worker, mine in heard.items()}
        failed = {worker: part.bad for worker, part in parts.items() if part.bad}
        first = min((ones[0].at for ones in failed.values()), default=None)
        ends = {w: self._well(parts[w]) if w in parts else None for w in {*failed, *dead}}
        waits = tuple(sorted(worker for worker, end in ends.items() if end is None))
        last = max((end for end in ends.values() if end is not None), default=None)
        well = None if waits else last
        return Trace(
            fault=self._planned.number,
            words=self._planned.words,
            applied=since,
            lifted=free,
            shows=self._shows,
            shown=self._shown(parts.values(), dead),
            hit=tuple(sorted(ends)),
            bad=sum(len(ones) for ones in failed.values()),
            detect=None if first is None else first - since,
            recover=None if well is None or free is None else max(well - free, 0.0),
            outage=None if well is None else well - since,
            waits=waits,
            next=None if math.isinf(self._until) else self._until,
        )

    def _split(self, mine: Sequence[Heard]) -> _Part:
        """Sort a worker's calls; those after the next fault began say nothing of this one."""
        start = bisect.bisect_left(mine, self._deed.began, key=_at)
        stop = bisect.bisect_left(mine, self._until, key=_at)
        usual: dict[str, float] = {}
        if self._shows == "slow":
            ops = {_call(one).op for one in mine}
            usual = {op: _median(mine[:start], op) for op in ops}
        part = _Part()
        for one in mine[start:stop]:
            call = _call(one)
            slow = call.seconds > _SLOWER * usual.get(call.op, math.inf)
            if slow or bad(call):
                part.bad.append(one)
            elif good(call):
                part.good.append(one)
        # One slow call is chance; that half of them are slow is not.
        during = [one for one in part.bad if one.at < self._free]
        both = [one for one in part.good if one.at < self._free]
        part.mostly = len(during) > len(both)
        return part

    def _shown(self, parts: Iterable[_Part], dead: set[str]) -> bool:
        if self._shows == "none":
            return True
        if self._shows == "ended":
            return bool(dead or self._planned.fault.services)
        if self._shows == "dropped":
            return self._lifted is not None and self._lifted.dropped > 0
        return any(part.mostly if self._shows == "slow" else part.bad for part in parts)

    def _well(self, part: _Part) -> float | None:
        """Return when a worker was well again: while the fault lasted, or after it was lifted."""
        if part.bad and part.bad[-1].at < self._free:
            within = [one.at for one in part.good if part.bad[-1].at < one.at < self._free]
            if within:
                return within[0]
        after = (one.at for one in part.good if one.at - _call(one).seconds >= self._free)
        return next(after, None)


@dataclass
class _Part:
    """A worker's calls from one fault to the next."""

    bad: list[Heard] = field(default_factory=list)
    good: list[Heard] = field(default_factory=list)
    mostly: bool = False  # most calls while it lasted were bad


def _at(heard: Heard) -> float:
    return heard.at


def _call(heard: Heard) -> Call:
    assert isinstance(heard.event, Call)
    return heard.event


def _median(heard: Sequence[Heard], op: str) -> float:
    seconds = [_call(one).seconds for one in heard if _call(one).op == op]
    return statistics.median(seconds) if seconds else math.inf
