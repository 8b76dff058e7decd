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
        given, lock = [False], threading.Lock()

        def give() -> None:
            with lock:
                if not given[0]:
                    given[0] = True
                    self.budget.give(entry.entries)

        def stalled() -> None:
            self.count("calls.stalled")
            for name in entry.breakers:
                self.breakers.trip(name)
            self.claims.stick(entry.puts)
            give()
            self.movers.grow()
            self.callers.grow()

        try:
            with self.keeper.watching(stalled, entry.nbytes):
                yield True
        finally:
            give()
