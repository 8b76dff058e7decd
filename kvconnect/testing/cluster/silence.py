"""Which calls did not end in time, and which workers fell silent while they should have called.

A worker that is stopped (SIGSTOP) is excused for as long as it was; one that has ended for what
was under way. That the runner heard of it a little later than it happened is excused, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvconnect.testing.cluster.events import Call
from kvconnect.testing.cluster.journal import Asked, Entry, Heard, Mark, Member

_HEARING_SECONDS = 1.5
_Span = tuple[float, float]
_Life = tuple[str, int]


def silent(members: Sequence[Member], entries: Sequence[Entry]) -> Iterator[tuple[Entry, str]]:
    """Yield the entry that shows it, and words, for every call that was late or never ended."""
    end = max((entry.at for entry in entries), default=0.0)
    grace = {member.name: member.grace for member in members}
    frozen = _frozen(entries, end)
    yield from _late(entries, grace, frozen)
    yield from _unanswered(entries, frozen, end)
    yield from _gaps(entries, frozen, end)


def _late(
    entries: Sequence[Entry], grace: dict[str, float], frozen: dict[_Life, list[_Span]]
) -> Iterator[tuple[Entry, str]]:
    for one in entries:
        if not isinstance(one, Heard) or not isinstance(one.event, Call):
            continue
        call = one.event
        limit = call.deadline + grace.get(one.worker, 0.0)
        # By its own clock; when it was stopped is known by the runner's, which hears later.
        window = (one.at - call.seconds - _HEARING_SECONDS, one.at)
        if call.seconds > limit + _overlap(frozen, one, window):
            words = f"{one.worker}: {call.op} took {call.seconds:.2f} s, deadline {call.deadline:g}"
            yield one, f"{words} and grace {limit - call.deadline:g}"


def _unanswered(
    entries: Sequence[Entry], frozen: dict[_Life, list[_Span]], end: float
) -> Iterator[tuple[Entry, str]]:
    answers: dict[tuple[str, int, str], float] = {}
    over: dict[_Life, float] = {}
    for one in entries:
        if isinstance(one, Heard) and isinstance(one.event, Call) and one.event.request:
            answers[one.worker, one.life, one.event.request] = one.at
        elif isinstance(one, Mark) and one.what == "refused":
            answers[one.worker, one.life, one.request] = one.at
        elif isinstance(one, Mark) and one.what == "ended":
            over[one.worker, one.life] = one.at
    for one in entries:
        if not isinstance(one, Asked):
            continue
        answered = answers.get((one.worker, one.life, one.request))
        at = answered or over.get((one.worker, one.life), end)
        limit = one.seconds + _HEARING_SECONDS
        if at - one.at > limit + _overlap(frozen, one, (one.at, at)):
            words = f"{one.worker}: {one.request} had no end in {limit:.1f} s"
            yield one, words


def _gaps(
    entries: Sequence[Entry], frozen: dict[_Life, list[_Span]], end: float
) -> Iterator[tuple[Entry, str]]:
    """Find where a worker that calls by itself said nothing for longer than a call may take."""
    busy: dict[_Life, tuple[Entry, float, float]] = {}  # last sign, its time, seconds allowed
    for one in entries:
        if not isinstance(one, (Heard, Mark)):
            continue
        life = (one.worker, one.life)
        if life in busy:
            yield from _gap(life, busy[life], one.at, frozen)
        if isinstance(one, Mark) and one.what == "busy":
            busy[life] = (one, one.at, one.seconds)
        elif isinstance(one, Mark) and one.what in {"idle", "ended"}:
            busy.pop(life, None)
        elif life in busy and isinstance(one, Heard) and isinstance(one.event, Call):
            busy[life] = (one, one.at, busy[life][2])
    for life, sign in busy.items():
        yield from _gap(life, sign, end, frozen)


def _gap(
    life: _Life, sign: tuple[Entry, float, float], now: float, frozen: dict[_Life, list[_Span]]
) -> Iterator[tuple[Entry, str]]:
    entry, at, seconds = sign
    excused = sum(_shared(span, (at, now)) for span in frozen.get(life, ()))
    if now - at > seconds + _HEARING_SECONDS + excused:
        yield entry, f"{life[0]} was silent for {now - at:.1f} s; a call may take {seconds:g} s"


def _frozen(entries: Sequence[Entry], end: float) -> dict[_Life, list[_Span]]:
    """Return when each worker was stopped."""
    spans: dict[_Life, list[_Span]] = {}
    since: dict[_Life, float] = {}
    for one in entries:
        if isinstance(one, Mark) and one.what == "frozen":
            since[one.worker, one.life] = one.at
        elif isinstance(one, Mark) and one.what in {"thawed", "ended"}:
            life = (one.worker, one.life)
            if life in since:
                spans.setdefault(life, []).append((since.pop(life), one.at))
    for life, at in since.items():
        spans.setdefault(life, []).append((at, end))
    return spans


def _overlap(frozen: dict[_Life, list[_Span]], one: Heard | Asked, window: _Span) -> float:
    return sum(_shared(span, window) for span in frozen.get((one.worker, one.life), ()))


def _shared(one: _Span, other: _Span) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
