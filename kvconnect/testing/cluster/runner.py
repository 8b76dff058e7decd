"""Running a scenario: start, warm up, load under faults, look at what is left, judge.

The runner drives workers by their pipes, never over the network that it breaks. Everything it
waits for has a deadline, so that a run ends in bounded time whatever its processes do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvconnect.errors import KVConnectError, TransferTimeoutError
from kvconnect.testing.cluster.breaking import Breaker
from kvconnect.testing.cluster.cluster import Cluster
from kvconnect.testing.cluster.faults import schedule
from kvconnect.testing.cluster.invariants import Finding, Run, flat, judge
from kvconnect.testing.cluster.journal import Journal, Phase, PhaseName
from kvconnect.testing.cluster.loading import Loads
from kvconnect.testing.cluster.scenario import Scenario
from kvconnect.testing.cluster.settling import keep_sampling, sample, settle
from kvconnect.testing.cluster.topology import Topology, spread
from kvconnect.testing.cluster.verifying import verify

_JOIN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that is over: what happened and what of it must not be. `scenario` is as it ran."""

    scenario: Scenario
    seed: int
    seconds: float
    run: Run
    findings: Sequence[Finding]


class Runner:
    """One run of a scenario on a cluster, which the caller makes and closes."""

    def __init__(
        self,
        scenario: Scenario,
        cluster: Cluster,
        *,
        seed: int,
        seconds: float,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Plan it; the scenario is spread over all hosts of the cluster."""
        self._scenario = spread(scenario, len(cluster.hosts))
        self._cluster, self._seed, self._seconds, self._say = cluster, seed, seconds, say
        self._plan = schedule(self._scenario, seed, seconds)
        self._journal = Journal()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def run(self) -> Ended:
        """Run it to its end; what goes wrong is a finding, not an exception."""
        topology: Topology | None = None
        try:
            topology = Topology(self._scenario, self._cluster, self._journal, self._seed)
            self._go(topology)
        except KVConnectError as error:
            self._phase("failed", f"{type(error).__name__}: {error}")
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(_JOIN_SECONDS)
            if topology is not None:
                topology.close()
        run = self._so_far(topology)
        return Ended(self._scenario, self._seed, self._seconds, run, judge(run))

    def _so_far(self, topology: Topology | None) -> Run:
        entries = self._journal.entries()
        members = () if topology is None else topology.members
        return Run(members, self._scenario.limits, self._plan, entries)

    def _phase(self, name: PhaseName, words: str = "") -> None:
        self._journal.add(Phase(at=time.monotonic(), name=name, words=words))
        self._say(f"{name} {words}".strip())

    def _go(self, topology: Topology) -> None:
        limits, workers = self._scenario.limits, topology.workers
        topology.start(limits.start)
        self._phase("warm")
        loads = Loads(topology, self._stop)
        loads.warm()
        zero = self._journal.begin()
        self._phase("load")
        sample(workers.values())
        loads.start()
        self._in_thread("samples", partial(keep_sampling, list(workers.values()), self._stop))
        breaker = Breaker(topology, self._journal, limits.start, loads.resume)
        for planned in self._plan:
            work = partial(breaker.run, planned, zero, self._stop)
            self._in_thread(f"fault {planned.number}", work)
        self._pass(zero + self._seconds)
        loads.stop()
        self._phase("verify")
        verify(topology, self._journal)
        settle(workers.values(), lambda: not any(flat(self._so_far(topology))), limits.settle)
        self._phase("end")
        for name in topology.quit(limits.quit):
            self._phase("failed", f"{name} had not ended {limits.quit:g} s after it was asked to")

    def _in_thread(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _pass(self, until: float) -> None:
        """Let the time of the load pass, and faults be lifted that take longer to."""
        time.sleep(max(until - time.monotonic(), 0))
        late = time.monotonic() + self._scenario.limits.start + _JOIN_SECONDS
        for thread in self._threads:
            if thread.name.startswith("fault"):
                thread.join(max(late - time.monotonic(), 0))
                if thread.is_alive():
                    raise TransferTimeoutError(f"{thread.name} was not lifted in time")
