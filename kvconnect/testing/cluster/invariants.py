"""What must hold of every run, judged by its journal alone.

Pure functions that know no store: they see what workers said and what the runner did. Each
returns findings; none means that it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from kvconnect.testing.cluster.events import Call, State
from kvconnect.testing.cluster.faults import Planned
from kvconnect.testing.cluster.journal import (
    Deed,
    Entry,
    Heard,
    Mark,
    Member,
    Phase,
    Verified,
)
from kvconnect.testing.cluster.ledger import Ledger
from kvconnect.testing.cluster.recovery import Trace, calls, good, trace
from kvconnect.testing.cluster.scenario import Limits
from kvconnect.testing.cluster.silence import silent

DAMAGE = ("CHECKSUM", "SIZE_MISMATCH", "IDENTITY")
BY_ITSELF = -2
_MOST_EACH = 20
_MIB = 1 << 20
_WARM_SECONDS = 2.0


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """An invariant that did not hold: where, with which numbers, and the entry that shows it."""

    invariant: str
    words: str
    at: float = 0.0
    entry: Entry | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """What is judged."""

    members: Sequence[Member]
    limits: Limits
    plan: Sequence[Planned]
    entries: Sequence[Entry]

    def heard(self) -> Iterator[tuple[Heard, Call]]:
        """Yield every call, of the load and of the runner's own asking."""
        for entry in self.entries:
            if isinstance(entry, Heard) and isinstance(entry.event, Call):
                yield entry, entry.event


Invariant = Callable[[Run], Iterator[Finding]]


def _no_wrong_byte(run: Run) -> Iterator[Finding]:
    for entry, call in run.heard():
        if call.wrong:
            words = f"{entry.worker} was handed wrong bytes in pages {_few(call.wrong)}"
            yield _found("bytes", words, entry)
    for look in run.entries:
        if isinstance(look, Verified) and look.wrong:
            words = f"wrong bytes at the end in pages {_few(look.wrong)} of {look.group}"
            yield _found("bytes", words, look)


def _no_reused_page(run: Run) -> Iterator[Finding]:
    for entry, call in run.heard():
        if call.reused:
            words = f"{entry.worker}: memory changed after it was reused, was {_few(call.reused)}"
            yield _found("reuse", words, entry)


def _in_time(run: Run) -> Iterator[Finding]:
    for entry, words in silent(run.members, run.entries):
        yield _found("deadline", words, entry)


def _kept(run: Run) -> Iterator[Finding]:
    if run.limits.lost == "any":
        return
    ledger = Ledger(run.members, run.entries)
    deeds = [e for e in run.entries if isinstance(e, Deed)]
    harm = [(-math.inf, e.at) for e in deeds if not e.keeps and run.limits.lost == "volatile"]
    harm += [(e.began - e.unsettled, e.at) for e in deeds if e.unsettled]
    for group in ledger.groups:
        looks = [e for e in run.entries if isinstance(e, Verified) and e.group == group]
        there = {page for look in looks for page in look.ok}
        missing = {page for look in looks for page in look.missing} - there
        due = {
            page
            for page, words in ledger.acknowledged(group).items()
            if not any(word.within(*span) for word in words for span in harm)
        }
        if lost := sorted(due & missing):
            words = f"{len(lost)} of {len(due)} acknowledged pages of {group} are lost: "
            yield _found("durable", words + _few(lost), looks[-1])
        unseen = due - there - missing - {page for look in looks for page in look.wrong}
        if unseen:
            words = f"{len(unseen)} of {len(due)} acknowledged pages of {group} were not looked at"
            yield Finding(invariant="durable", words=words)


def flat(run: Run) -> Iterator[Finding]:
    """Compare what each worker holds at the end with what it held once it was warm."""
    for (worker, _), states in _states(run.entries).items():
        first, last = states[0].event, states[-1].event
        assert isinstance(first, State)
        assert isinstance(last, State)
        limits = run.limits
        for name, was, now, more in (
            ("open files", first.fds, last.fds, limits.files),
            ("threads", first.threads, last.threads, limits.threads),
            ("MiB resident", first.rss // _MIB, last.rss // _MIB, limits.rss_mib),
        ):
            if now > was + more:
                words = f"{worker} has {now} {name}, had {was}, may have {more} more"
                yield _found("resources", words, states[-1])


def _states(entries: Sequence[Entry]) -> dict[tuple[str, int], list[Heard]]:
    """Return the states of every life of a worker, from a little after its first good call."""
    warm: dict[tuple[str, int], float] = {}
    states: dict[tuple[str, int], list[Heard]] = {}
    for one in entries:
        if not isinstance(one, Heard):
            continue
        life = (one.worker, one.life)
        if isinstance(one.event, Call) and good(one.event):
            warm.setdefault(life, one.at + _WARM_SECONDS)
        elif isinstance(one.event, State) and one.at >= max(warm.get(life, math.inf), 0.0):
            states.setdefault(life, []).append(one)
    return states


def _no_damage(run: Run) -> Iterator[Finding]:
    if run.limits.damage:
        return
    for entry, call in run.heard():
        for name in DAMAGE:
            if call.misses.get(name):
                words = f"{entry.worker} missed {call.misses[name]} pages by {name}"
                yield _found("damage", f"{words}, though nothing was damaged", entry)


def _alive(run: Run) -> Iterator[Finding]:
    for entry in run.entries:
        if isinstance(entry, Mark) and entry.what == "ended" and entry.fault == BY_ITSELF:
            yield _found("alive", f"{entry.worker} ended by itself: {entry.words}", entry)
        if isinstance(entry, Deed) and entry.what == "failed":
            yield _found("alive", f"fault {entry.fault} went wrong: {entry.words}", entry)
        if isinstance(entry, Phase) and entry.name == "failed":
            yield _found("alive", f"the run was given up: {entry.words}", entry)
    for heard, call in run.heard():
        if call.error:
            yield _found("alive", f"{heard.worker}: {call.op} raised {call.error}", heard)


def _recovered(run: Run) -> Iterator[Finding]:
    for one in trace(run.plan, run.entries):
        fault = run.plan[one.fault].fault
        yield from _slow_to_recover(one, fault.recover or run.limits.recover)
        limit = fault.detect or run.limits.detect
        if one.detect is not None and one.detect > limit and one.shows == "miss":
            words = f"{one.words}: the first call failed after {one.detect:.1f} s, limit {limit:g}"
            yield Finding(invariant="detect", words=words, at=one.applied)
        if not one.shown:
            words = f"{one.words}: its effect ({one.shows}) was not seen; the fault did not bite"
            yield Finding(invariant="bites", words=words, at=one.applied)


def _slow_to_recover(one: Trace, limit: float) -> Iterator[Finding]:
    if one.waits and one.next is not None and one.next < (one.lifted or one.next) + limit:
        return  # the next fault came before its time was over
    if one.waits:
        words = f"{one.words}: {', '.join(one.waits)} made no good call after it was lifted"
        yield Finding(invariant="recovery", words=words, at=one.applied)
    elif one.recover is not None and one.recover > limit:
        words = f"{one.words}: well again {one.recover:.1f} s after it was lifted, limit {limit:g}"
        yield Finding(invariant="recovery", words=words, at=one.applied)


def _calm(run: Run) -> Iterator[Finding]:
    """Where no fault is planned every call of the load must get all that it asks for."""
    if run.plan:
        return
    for one in (one for ones in calls(run.entries).values() for one in ones):
        if isinstance(one.event, Call) and (one.event.misses or not good(one.event)):
            words = f"{one.worker}: {one.event.op} missed {one.event.misses or 'everything'}"
            yield _found("calm", f"{words} without a fault", one)


def _enough(run: Run) -> Iterator[Finding]:
    made = [one for ones in calls(run.entries).values() for one in ones if one.at >= 0]
    pages = sum(len(one.event.hits) for one in made if isinstance(one.event, Call))
    for name, got, least in (
        ("calls", len(made), run.limits.calls),
        ("pages read", pages, run.limits.pages),
    ):
        if got < least:
            words = f"{got} {name}, at least {least} were wanted: the load was too thin to judge"
            yield Finding(invariant="load", words=words)


INVARIANTS: dict[str, tuple[str, Invariant]] = {
    "bytes": ("no wrong byte is ever handed out", _no_wrong_byte),
    "reuse": ("memory in flight is never reused", _no_reused_page),
    "deadline": ("every call ends by its deadline and grace", _in_time),
    "durable": ("acknowledged pages are there at the end", _kept),
    "resources": ("files, threads and memory stay flat", flat),
    "damage": ("no checksum disagrees where nothing was damaged", _no_damage),
    "alive": ("nobody ends or raises without a fault", _alive),
    "recovery": ("faults show, in time, and all is well again in time", _recovered),
    "calm": ("without faults no call fails", _calm),
    "load": ("there was enough load to judge", _enough),
}
"""Every invariant by name: what it says, and its function."""


def judge(run: Run) -> list[Finding]:
    """Return what does not hold, at most 20 findings of each invariant."""
    return [
        finding
        for _, function in INVARIANTS.values()
        for _, finding in zip(range(_MOST_EACH), function(run), strict=False)
    ]


def _found(invariant: str, words: str, entry: Entry) -> Finding:
    return Finding(invariant=invariant, words=words, at=entry.at, entry=entry)


def _few(pages: Sequence[int]) -> str:
    shown = ", ".join(str(page) for page in pages[:8])
    return shown if len(pages) <= 8 else f"{shown} and {len(pages) - 8} more"
