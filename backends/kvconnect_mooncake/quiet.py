"""When the library has let go of memory: after a failed transfer that is later than its return.

Mooncake reports an object as failed with its first failed entry; the others go on. Per peer
there is one queue, first in first out, served by some lanes, and a lane on which nothing
moves is given up after the progress time-out. From that follows how long to wait:

- A call that ended by itself has an answer for each object, so at most the entries of the
  last one are still queued.
- A call that ran into the library's limit of a minute may have left its whole queue.

Measured with a stopped peer: 64 entries end in 35 s and nothing comes later; of 256 entries
the call ends at 60 s, and 164 MiB arrive when the peer goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvconnect_mooncake.library import PROGRESS_SECONDS, setting
from kvconnect_mooncake.trailer import checksum

HARD_LIMIT = 55.0
"""Seconds; the library ends its calls after 60, whatever is still queued."""
LANES = 4
STALL_SECONDS, SLOWEST = 5.0, 32 << 20
"""A call that has run for so many seconds, and one more for so many bytes that it moves, holds up
nobody else any more."""
LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Rule:
    """How long memory is held after a failed call; `settle`: seconds in which one entry ends."""

    entries: int
    lanes: int
    settle: float

    def seconds(self, took: float, longest: int) -> float:
        """Return seconds from the return of a call that took `took`.

        `longest`: entries of its largest object; twice that, as another call's may lie between.
        """
        if took >= HARD_LIMIT:
            rounds = -(-self.entries // self.lanes)
            return max(rounds * self.settle - took, 0) + self.settle
        return (-(-2 * longest // self.lanes) + 1) * self.settle


def rule_of(entries: int) -> Rule:
    """Return the rule for the library as it is set."""
    progress = setting("MC_TCP_PROGRESS_TIMEOUT_SEC", PROGRESS_SECONDS)
    return Rule(entries, setting("MC_TCP_LANES_PER_PEER", LANES), progress + 1.0)


@dataclass(slots=True, eq=False)
class Held:
    """Memory in quarantine: free at `until`, or `settle` seconds after it last changed.

    `runs`: (address, nbytes) of memory that may still be written; none for stores.
    """

    runs: Sequence[tuple[int, int]]
    until: float
    settle: float
    release: Callable[[], None]
    nbytes: int
    seen: int | None = None

    def quiet(self, now: float) -> bool:
        """Look at the memory; tell whether it may be used again."""
        if self.runs:
            print_ = checksum("", self.runs)
            if self.seen is not None and print_ != self.seen:
                self.until = max(self.until, now + self.settle)
            self.seen = print_
        return now >= self.until


@dataclass(slots=True, eq=False)
class Call:
    """A call that is under way; `stalled` runs once if it takes too long, in another thread."""

    until: float
    stalled: Callable[[], None]
    told: bool = False


@dataclass(slots=True, eq=False)
class Keeper:
    """Watches calls and quarantined memory in one thread, asleep while there is neither."""

    rule: Rule
    clock: Callable[[], float] = time.monotonic
    _held: list[Held] = field(default_factory=list)
    _calls: list[Call] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _stopped: bool = False

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._watch, name="kvconnect-mooncake-keeper", daemon=True).start()

    def hold(self, held: Held) -> None:
        """Keep memory until it is quiet; `release` is then called once."""
        with self._changed:
            self._held.append(held)
            self._changed.notify()

    @contextmanager
    def watching(self, stalled: Callable[[], None], nbytes: int) -> Iterator[Call]:
        """Watch the call inside, which moves `nbytes`; `stalled` runs if it takes too long."""
        call = Call(self.clock() + STALL_SECONDS + nbytes / SLOWEST, stalled)
        with self._changed:
            self._calls.append(call)
            self._changed.notify()
        try:
            yield call
        finally:
            with self._changed:
                self._calls.remove(call)

    @property
    def nbytes(self) -> int:
        """Bytes in quarantine."""
        with self._changed:
            return sum(held.nbytes for held in self._held)

    def __len__(self) -> int:
        """Count what holds memory."""
        with self._changed:
            return sum(held.nbytes > 0 for held in self._held)

    def stop(self) -> None:
        """End the thread; what is still held is never released."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _watch(self) -> None:
        while True:
            with self._changed:
                while not self._stopped and not self._held and not self._calls:
                    self._changed.wait()
                if self._stopped:
                    return
                late = [one for one in self._calls if self._late(one)]
                for call in late:
                    call.told = True
                held = list(self._held)
            for call in late:
                call.stalled()
            now = self.clock()
            quiet = [one for one in held if one.quiet(now)]
            with self._changed:
                self._held = [one for one in self._held if one not in quiet]
            for one in quiet:
                one.release()
            time.sleep(LOOK_SECONDS)

    def _late(self, call: Call) -> bool:
        return not call.told and self.clock() > call.until
