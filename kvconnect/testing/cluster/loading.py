"""The load of a run: groups that call by themselves, pairs that are given requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from kvconnect.errors import KVConnectError, TransferTimeoutError, UnavailableError
from kvconnect.testing.cluster.journal import Member
from kvconnect.testing.cluster.topology import Topology
from kvconnect.testing.cluster.worker import Worker

_WARM_REQUESTS = 3
_WARM_SECONDS = 30.0
_JOIN_SECONDS = 20.0


class Loads:
    """Starts and stops the load of a topology; its threads end once `stopped` is set."""

    def __init__(self, topology: Topology, stopped: threading.Event) -> None:
        """Take what is to be loaded."""
        self._topology, self._stopped = topology, stopped
        self._threads: list[threading.Thread] = []
        self._running = False

    def warm(self) -> None:
        """Store the pages that are to be there, read each once, and move some between pairs.

        Raises `UnavailableError` or `TransferTimeoutError` where that fails: without faults all
        of it must work.
        """
        for pairing in self._topology.pairs.values():
            if not pairing.connect(_WARM_SECONDS):
                raise UnavailableError(f"{pairing.spec.name}: its ranks did not meet")
            for number in range(_WARM_REQUESTS):
                request = f"{pairing.spec.name}-warm-{number}"
                if not pairing.transfer(request, number * pairing.spec.batch):
                    raise UnavailableError(f"{request} failed before there was any fault")
        for role, word in (("write", "store"), ("read", "load")):
            self._each_page(role, word)

    def _each_page(self, role: str, word: str) -> None:
        """Have every group of a role go once through its pages, its ranks side by side."""
        for group in self._topology.scenario.groups:
            if role not in group.roles:
                continue
            warm = group.universe if group.warm is None else min(group.warm, group.universe)
            pages = range(group.first, group.first + warm)
            for start in range(0, len(pages), group.batch):
                ids = list(pages[start : start + group.batch])
                workers = self._topology.group(group.name)
                told = [(worker, worker.tell(word, ids=ids)) for worker in workers]
                for worker, number in told:
                    worker.answer(number, group.deadline + group.grace + 5.0)

    def start(self) -> None:
        """Let the load begin."""
        self._running = True
        for pairing in self._topology.pairs.values():
            for lane in range(pairing.spec.flight):
                load = partial(pairing.load, self._stopped, lane)
                name = f"{pairing.spec.name} {lane}"
                self._threads.append(threading.Thread(target=load, name=name, daemon=True))
                self._threads[-1].start()
        self.resume(list(self._topology.workers.values()))

    def resume(self, workers: Sequence[Worker]) -> None:
        """Have workers that were started (again) take up the load, if it runs."""
        for worker in workers:
            if self._running and worker.member.store:
                worker.ask("start")
                worker.busy(_each_call(worker.member) + self._topology.pause(worker.member.group))

    def stop(self) -> None:
        """End the load and wait until the calls under way are over, as long as they may take."""
        self._running = False
        self._stopped.set()
        paused = []
        for worker in self._topology.workers.values():
            if worker.member.store and worker.answers:
                with suppress(KVConnectError):  # it has ended meanwhile, and that is known
                    paused.append((worker, worker.tell("pause")))
        for worker, number in paused:
            # Silence is found in the journal, with the calls before it.
            with suppress(KVConnectError):
                worker.answer(number, _each_call(worker.member) + 2.0)
                worker.idle()
        until = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))
            if thread.is_alive():
                raise TransferTimeoutError(f"load {thread.name} does not end")


def _each_call(member: Member) -> float:
    return member.deadline + member.grace
