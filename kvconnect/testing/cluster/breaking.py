"""Applying the faults of a schedule to a running scenario, and lifting them, each in its time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from kvconnect.errors import KVConnectError
from kvconnect.testing.cluster.cluster import Cluster
from kvconnect.testing.cluster.faults import Planned
from kvconnect.testing.cluster.journal import Deed, Journal
from kvconnect.testing.cluster.scenario import FaultSpec
from kvconnect.testing.cluster.services import Service
from kvconnect.testing.cluster.topology import Topology, start_all
from kvconnect.testing.cluster.worker import Worker

_QUIT_SECONDS = 10.0


class Breaker:
    """Breaks a topology by its own clock; every fault has a thread of its own.

    `resume` is called with workers that were started again and have to take up the load.
    """

    def __init__(
        self,
        topology: Topology,
        journal: Journal,
        start_seconds: float,
        resume: Callable[[Sequence[Worker]], None],
    ) -> None:
        """Take what is to be broken; `start_seconds` is how long a process may take to start."""
        self._topology, self._journal, self._seconds = topology, journal, start_seconds
        self._resume = resume
        self._cluster: Cluster = topology.cluster
        # Rules are set by one thread at a time; what ends or starts processes waits for what does.
        self._network, self._processes = threading.Lock(), threading.Lock()

    def run(self, plan: Planned, zero: float, stop: threading.Event) -> None:
        """Apply one fault at its time after `zero` and lift it; at once if told to stop."""
        if stop.wait(max(zero + plan.at - time.monotonic(), 0)):
            return
        self._do(plan, "applied")
        stop.wait(max(zero + plan.until - time.monotonic(), 0))
        self._do(plan, "lifted")

    def _do(self, plan: Planned, what: str) -> None:
        network = plan.fault.kind in {"cut", "partition", "shape", "drop"}
        with self._network if network else self._processes:
            self._do_alone(plan, what)

    def _do_alone(self, plan: Planned, what: str) -> None:
        began, words, dropped = time.monotonic(), "", 0
        keeps, unsettled = self._keeps(plan.fault, what), 0.0
        try:
            if what == "applied":
                unsettled = max((one.settles for one in self._hit(plan.fault)), default=0.0)
                self._apply(plan)
            else:
                dropped = self._dropped(plan.fault)
                self._lift(plan)
        except KVConnectError as error:
            what, words = "failed", f"{plan.words}: {type(error).__name__}: {error}"
        self._journal.add(
            Deed(
                at=time.monotonic(),
                began=began,
                fault=plan.number,
                what=what,  # type: ignore[arg-type]
                words=words or plan.words,
                dropped=dropped,
                keeps=keeps,
                unsettled=unsettled,
            )
        )

    def _workers(self, fault: FaultSpec) -> list[Worker]:
        named = [self._topology.workers[name] for name in fault.workers]
        return named + [one for host in fault.hosts for one in self._topology.on_host(host)]

    def _services(self, fault: FaultSpec) -> list[Service]:
        named = [self._topology.services[name] for name in fault.services]
        return named + [one for host in fault.hosts for one in self._on(host)]

    def _keeps(self, fault: FaultSpec, what: str) -> bool:
        """Tell whether the services that it ends, cuts off or starves promise to keep all."""
        if fault.kind in {"shape", "drop"}:
            return True
        if fault.kind == "fill_disk":
            # A store that cannot grow evicts for what is new, for as long as the disk is full.
            return not any(one.evicts for one in self._services(fault))
        return what != "applied" or all(one.keeps == "all" for one in self._hit(fault))

    def _hit(self, fault: FaultSpec) -> list[Service]:
        """Return the services that it ends or cuts off."""
        parted = [one for group in fault.groups for host in group for one in self._on(host)]
        return [*self._services(fault), *parted]

    def _on(self, host: int) -> list[Service]:
        return self._topology.services_on(host)

    def _dropped(self, fault: FaultSpec) -> int:
        network = fault.kind in {"cut", "partition", "drop"}
        return sum(host.dropped() for host in self._cluster.hosts) if network else 0

    def _apply(self, plan: Planned) -> None:
        fault = plan.fault
        if fault.kind in {"cut", "partition", "shape", "drop"}:
            self._break_network(fault)
        elif fault.kind == "fill_disk":
            for index in fault.hosts:
                self._cluster.host(index).fill_disk(fault.leave)
        elif fault.kind == "stop":
            self._stop(fault)
        else:
            self._end(plan)

    def _break_network(self, fault: FaultSpec) -> None:
        if fault.kind == "partition":
            self._cluster.partition(fault.groups)
        for host in map(self._cluster.host, fault.hosts):
            if fault.kind == "cut":
                host.cut([self._cluster.host(i) for i in fault.peers] or None)
            elif fault.kind == "shape":
                host.shape(fault.rate)
            elif fault.kind == "drop":
                host.drop(fault.percent)

    def _stop(self, fault: FaultSpec) -> None:
        for worker in self._workers(fault):
            worker.freeze()
        for index in fault.hosts:
            self._cluster.host(index).stop()
        for name in fault.services:
            self._topology.services[name].stop()
        for name in fault.workers:
            self._topology.workers[name].process.stop()

    def _end(self, plan: Planned) -> None:
        """Kill, switch off, or ask to end; whatever does not end when asked is killed."""
        fault = plan.fault
        for worker in self._workers(fault):
            worker.doom(plan.number)
        if fault.kind == "restart":
            for worker in self._workers(fault):
                worker.quit(_QUIT_SECONDS, plan.number)
            for service in reversed(self._services(fault)):
                service.terminate(_QUIT_SECONDS)
            return
        for index in fault.hosts:
            host = self._cluster.host(index)
            host.kill() if fault.kind == "kill" else host.power_cut()
        for name in fault.services:
            self._topology.services[name].kill()
        for name in fault.workers:
            self._topology.workers[name].process.kill()
        for worker in self._workers(fault):
            worker.wait_down()

    def _lift(self, plan: Planned) -> None:
        fault = plan.fault
        if fault.kind in {"cut", "partition", "shape", "drop"}:
            self._mend_network(fault)
        elif fault.kind == "fill_disk":
            for index in fault.hosts:
                self._cluster.host(index).free_disk()
        elif fault.kind == "stop":
            self._go_on(fault)
        else:
            for service in self._services(fault):
                service.restart()
            workers = self._workers(fault)
            start_all(workers, self._seconds)
            self._resume(workers)

    def _mend_network(self, fault: FaultSpec) -> None:
        if fault.kind == "partition":
            self._cluster.partition(())
        for host in map(self._cluster.host, fault.hosts):
            if fault.kind == "cut":
                host.heal()
            elif fault.kind == "shape":
                host.shape(self._topology.scenario.rate)
            elif fault.kind == "drop":
                host.drop(None)

    def _go_on(self, fault: FaultSpec) -> None:
        for index in fault.hosts:
            self._cluster.host(index).go_on()
        for name in fault.services:
            self._topology.services[name].go_on()
        for name in fault.workers:
            self._topology.workers[name].process.go_on()
        for worker in self._workers(fault):
            worker.thaw()
