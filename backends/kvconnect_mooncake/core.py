"""The parts of one open store that its transfers use, and the counts they keep."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import TimeoutError as Late
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from kvconnect.errors import UnavailableError
from kvconnect_mooncake.admin import Admin
from kvconnect_mooncake.breakers import MASTER, Breakers
from kvconnect_mooncake.budget import Budget
from kvconnect_mooncake.client import Client
from kvconnect_mooncake.names import Names
from kvconnect_mooncake.options import MooncakeOptions
from kvconnect_mooncake.quiet import Keeper
from kvconnect_mooncake.slots import SlotPool
from kvconnect_mooncake.workers import Workers

T = TypeVar("T")


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
    askers: Workers
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    open_puts: set[str] = field(default_factory=set)
    """Names that a put of this process has: at most one put of a key is open here at a time."""

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

    @contextmanager
    def calling(self, entries: int, until: float, names: Iterable[str]) -> Iterator[bool]:
        """Enter the library with `entries`; False where there is no room before `until`.

        A call that stalls trips the breakers of `names`, and others get its room and a thread.
        """
        if not self.budget.take(entries, until):
            yield False
            return
        given, lock = [False], threading.Lock()

        def give() -> None:
            with lock:
                if not given[0]:
                    given[0] = True
                    self.budget.give(entries)

        def stalled() -> None:
            self.count("calls.stalled")
            for name in names:
                self.breakers.trip(name)
            give()
            self.movers.grow()

        try:
            with self.keeper.watching(stalled):
                yield True
        finally:
            give()
