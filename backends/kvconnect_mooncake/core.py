"""The parts of one open store that its transfers use, and the counts they keep."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import TimeoutError as Late
from contextlib import contextmanager
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

    def made(self, call: Callable[[], T]) -> T:
        """Make a transfer call and return what it returns, on a thread that is nice to others.

        The library waits by asking again and again. At the priority of the threads that move
        the bytes, on few cores, it takes their time: a third of the throughput of loads.
        """
        return self.callers.call(call).result()

    @contextmanager
    def calling(self, entry: Entry) -> Iterator[bool]:
        """Enter the library; False where there is no room in time.

        Others get the room and the threads of a call that stalls.
        """
        if not self.budget.take(entry.entries, entry.until):
            yield False
            return
        inside = _Inside(self, entry)
        try:
            with self.keeper.watching(inside.stalled, entry.nbytes):
                yield True
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
