"""The parts of one open store that its transfers use, and the counts they keep."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass, field
from typing import TypeVar

from kvconnect.errors import UnavailableError
from kvconnect_mooncake.admin import Admin
from kvconnect_mooncake.breakers import MASTER, Breakers
from kvconnect_mooncake.budget import Budget
from kvconnect_mooncake.claims import Claims
from kvconnect_mooncake.client import Client
from kvconnect_mooncake.names import Names
from kvconnect_mooncake.options import MooncakeOptions
from kvconnect_mooncake.quiet import Keeper
from kvconnect_mooncake.slots import SlotPool
from kvconnect_mooncake.workers import Workers

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """What a call wants of the library: room for `entries` before `until` (monotonic).

    `nbytes`: what it moves. If it stalls, `breakers` trip and nobody waits for its `puts` any more.
    """

    entries: int
    nbytes: int
    until: float
    breakers: Iterable[str] = ()
    puts: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Core:
    """Everything a transfer needs of the store."""

    options: MooncakeOptions
    client: Client
    names: Names
    admin: Admin
    slots: SlotPool
    budget: Budget
    breakers: Breakers
    keeper: Keeper
    movers: Workers
    callers: Workers
    askers: Workers
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    claims: Claims = field(default_factory=Claims)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter of this process."""
        with self.lock:
            self.counts[name] += amount

    def ask(self, question: Callable[[], T]) -> T:
        """Ask the master in another thread; `UnavailableError` if it takes too long."""
        limit = self.options.rpc_timeout
        try:
            return self.askers.call(question).result(limit)
        except Late:
            self.breakers.trip(MASTER)
            raise UnavailableError(
                f"mooncake: the master gave no answer in rpc_timeout={limit:g} s"
            ) from None

    def call(self, entry: Entry, work: Callable[[], T]) -> tuple[T, float] | None:
        """Make a call that moves bytes; return what it returns and the seconds that it took.

        None where there was no room for it, or no thread, in time. Others get both of a call
        that stalls. The thread is nice to others, because the library waits by asking again and
        again: at the priority of the threads that move the bytes, on few cores, it takes their
        time, a third of the throughput of loads.
        """
        if not self.budget.take(entry.entries, entry.until):
            return None
        inside = _Inside(self, entry)

        def made() -> tuple[T, float] | None:
            began = time.monotonic()
            if began > entry.until:
                return None
            with self.keeper.watching(inside.stalled, entry.nbytes):
                return work(), time.monotonic() - began

        try:
            return self.callers.call(made).result()
        finally:
            inside.over()


@dataclass(slots=True)
class _Inside:
    """A call in the library. Invariant: its room is given back once, by whichever comes first."""

    core: Core
    entry: Entry
    _grown: list[Workers] = field(default_factory=list)
    _room: bool = True
    _over: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def stalled(self) -> None:
        """Leave alone what it waits for, and let others have its room and threads."""
        core = self.core
        with self._lock:
            if self._over:
                return
            core.count("calls.stalled")
            for name in self.entry.breakers:
                core.breakers.trip(name)
            core.claims.stick(self.entry.puts)
            self._give()
            self._grown = [some for some in (core.movers, core.callers) if some.grow()]

    def over(self) -> None:
        """Give back what it had; the threads that came for it go."""
        with self._lock:
            self._over = True
            self._give()
            for workers in self._grown:
                workers.shrink()

    def _give(self) -> None:
        if self._room:
            self._room = False
            self.core.budget.give(self.entry.entries)
