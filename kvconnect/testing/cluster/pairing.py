"""Prefill and decode ranks in pairs: who is told to send and to receive what, over and over."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvconnect.errors import KVConnectError
from kvconnect.testing.cluster.journal import Asked, Journal
from kvconnect.testing.cluster.scenario import PairSpec
from kvconnect.testing.cluster.worker import Worker

_PAUSE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Pairing:
    """A prefill and a decode fleet and the load between them.

    The runner does what an engine's scheduler would: it gives out requests, and has the decode
    ranks meet the prefill ranks again once one has failed.
    """

    spec: PairSpec
    prefill: Sequence[Worker]
    decode: Sequence[Worker]
    addresses: tuple[str, ...]
    journal: Journal
    seed: int

    def connect(self, timeout: float) -> bool:
        """Have every decode rank meet all prefill ranks; False where one could not in time."""
        asked = []
        until = time.monotonic() + timeout + 1.0
        try:
            for worker in self.decode:
                number = worker.tell("connect", addresses=self.addresses, timeout=timeout)
                asked.append((worker, number))
            for worker, number in asked:
                worker.answer(number, until - time.monotonic())
        except KVConnectError:
            return False
        return True

    def load(self, stop: threading.Event, lane: int) -> None:
        """Give out one request after the other until told to stop; `lane` numbers such loads."""
        dice = random.Random(f"{self.seed} {self.spec.name} {lane}")  # noqa: S311 - no secret
        met = lane > 0 or self.connect(self.spec.connect)
        for number in itertools.count():
            if stop.wait(self.spec.pause if met else _PAUSE_SECONDS):
                return
            if not met:
                met = self.connect(self.spec.connect)
                continue
            first = dice.randrange(1 << 30)
            # With several lanes another's connect may be under way; the next request finds out.
            met = self.transfer(f"{self.spec.name}-{lane}-{number}", first) or lane > 0

    def transfer(self, request: str, first: int) -> bool:
        """Move one request's pages; tell whether every decode rank has got them.

        What the prefill ranks say comes in the journal: one that is stopped says it later.
        """
        spec, ids = self.spec, tuple(range(first, first + self.spec.batch))
        seconds = spec.deadline + spec.grace
        ends: list[tuple[Worker, int]] = []
        common = {"ids": ids, "deadline": spec.deadline}
        receive = {"checksum": spec.checksum, "way": spec.way}
        whole = True
        for worker in (*self.prefill, *self.decode):
            word, more = ("send", {"step": spec.step}) if worker in self.prefill else (
                "receive", receive
            )  # fmt: skip
            asked = Asked(
                at=time.monotonic(), worker=worker.name, life=worker.life, request=request,
                seconds=seconds,
            )  # fmt: skip
            try:
                ends.append((worker, worker.request(word, request, **common, **more)))
                self.journal.add(asked)
            except KVConnectError:
                whole = False
        until = time.monotonic() + seconds + 1.0
        for worker, number in ends:
            call = worker.end_of(request, number, until)
            if worker in self.decode:
                whole = whole and call is not None and not call.misses
        return whole
