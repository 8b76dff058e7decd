"""What happened in a run, in one list: events of workers and deeds of the runner.

The invariants see this and nothing else. Times are the runner's seconds since the load began
(before it they are negative), so that hosts need no common clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from kvconnect.testing.cluster.events import Call, State


class Heard(msgspec.Struct, frozen=True, kw_only=True, tag="heard"):
    """A worker's event came in. `life` counts the starts of that worker, from 0."""

    at: float
    worker: str
    life: int
    event: Call | State


class Asked(msgspec.Struct, frozen=True, kw_only=True, tag="asked"):
    """A worker was told to do its part of a request, which must end within `seconds`."""

    at: float
    worker: str
    life: int
    request: str
    seconds: float  # deadline and grace


PhaseName = Literal["warm", "load", "verify", "end", "failed"]
What = Literal["born", "busy", "idle", "frozen", "thawed", "ended", "refused"]


class Mark(msgspec.Struct, frozen=True, kw_only=True, tag="mark"):
    """A worker's life changed.

    born: it has said that it is ready. busy: it calls by itself from now on, each call ends
    within `seconds` of the one before; idle: no longer. frozen and thawed: SIGSTOP, SIGCONT.
    ended: its output ended, by fault number `fault`, by the runner (-1) or by itself (-2).
    refused: it would not begin `request`; `words` say why.
    """

    at: float
    worker: str
    life: int
    what: What
    seconds: float = 0.0
    fault: int = -1
    request: str = ""
    words: str = ""


class Deed(msgspec.Struct, frozen=True, kw_only=True, tag="deed"):
    """A fault was applied or lifted; `at` is when that was done, `began` when it was begun.

    `dropped` counts the packets that the targets dropped while it lasted, `keeps` whether the
    services that it ended or cut off keep what they were told. `unsettled`: seconds before
    `began` in which what they were told last may be lost all the same.
    """

    at: float
    began: float
    fault: int
    what: Literal["applied", "lifted", "failed"]
    words: str = ""
    dropped: int = 0
    keeps: bool = True
    unsettled: float = 0.0


class Verified(msgspec.Struct, frozen=True, kw_only=True, tag="verified"):
    """At the end a fresh reader looked at pages that were acknowledged to `group`."""

    at: float
    group: str
    ok: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    wrong: tuple[int, ...] = ()


class Phase(msgspec.Struct, frozen=True, kw_only=True, tag="phase"):
    """A part of the run begins, or the run failed and why."""

    at: float
    name: PhaseName
    words: str = ""


Entry = Heard | Asked | Mark | Deed | Verified | Phase


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of the run: its group (or side of a pair), its host, what it is."""

    name: str
    group: str
    host: int
    size: int  # ranks of its group
    roles: tuple[str, ...]  # write, read; prefill, decode
    store: str = ""
    transport: str = ""
    deadline: float = 0.0
    grace: float = 0.0
    number_nbytes: int = 0


class Journal:
    """Takes entries from many threads, in the order of their coming."""

    def __init__(self) -> None:
        """Be empty; the load begins when `begin` is called."""
        self._lock = threading.Lock()
        self._entries: list[tuple[float, Entry]] = []
        self._zero: float | None = None

    def begin(self) -> float:
        """Let the load begin now, by the monotonic clock that is returned."""
        self._zero = time.monotonic()
        return self._zero

    def add(self, entry: Entry) -> None:
        """Take an entry, its `at` in monotonic seconds."""
        with self._lock:
            self._entries.append((entry.at, entry))

    def entries(self) -> list[Entry]:
        """Return all so far, by time, in seconds since the load began."""
        zero = time.monotonic() if self._zero is None else self._zero
        with self._lock:
            timed = sorted(self._entries, key=lambda one: one[0])
        return [_shifted(entry, zero) for _, entry in timed]


def _shifted(entry: Entry, zero: float) -> Entry:
    moved = msgspec.structs.replace(entry, at=round(entry.at - zero, 6))
    if isinstance(moved, Deed):
        return msgspec.structs.replace(moved, began=round(moved.began - zero, 6))
    return moved


def write(path: Path, entries: Iterable[Entry]) -> None:
    """Write one line of JSON an entry."""
    encoder = msgspec.json.Encoder()
    with path.open("wb") as file:
        file.writelines(encoder.encode(entry) + b"\n" for entry in entries)


def read(path: Path) -> Sequence[Entry]:
    """Read what `write` wrote."""
    decoder = msgspec.json.Decoder(Entry)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]
