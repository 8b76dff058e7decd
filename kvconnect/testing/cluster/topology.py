"""A scenario's services and workers on the hosts of a cluster, started in their order."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from kvconnect.backend import Closing
from kvconnect.disagg import keys
from kvconnect.testing.cluster.cluster import Cluster
from kvconnect.testing.cluster.journal import Journal, Member
from kvconnect.testing.cluster.l3_messages import WorkerConfig
from kvconnect.testing.cluster.pairing import Pairing
from kvconnect.testing.cluster.pd_messages import RankConfig
from kvconnect.testing.cluster.scenario import GroupSpec, PairSpec, Scenario, SideSpec
from kvconnect.testing.cluster.services import Service, make
from kvconnect.testing.cluster.worker import Worker

_L3_WORKER = "kvconnect.testing.cluster.l3_worker"
_PD_RANK = "kvconnect.testing.cluster.pd_rank"
_ENDPOINT = {"ping": 0.2, "peer_timeout": 2.0, "staging": 4 << 20, "slot": 256 << 10}


def spread(scenario: Scenario, hosts: int) -> Scenario:
    """Give every host beyond the scenario's own a copy of the groups that are to be spread."""
    more = [
        msgspec.structs.replace(group, name=f"{group.name}-on{host}", hosts=(host,))
        for group in scenario.groups
        if group.spread
        for host in range(scenario.hosts, hosts)
    ]
    groups = (*scenario.groups, *more)
    return msgspec.structs.replace(scenario, groups=groups, hosts=max(hosts, scenario.hosts))


class Topology(Closing):
    """What runs: `services`, `workers` and `pairs`, by name, in the order of the scenario.

    Closing it kills everything, workers first.
    """

    def __init__(self, scenario: Scenario, cluster: Cluster, journal: Journal, seed: int) -> None:
        """Describe all of it on the hosts; `start` starts it."""
        self.scenario, self.cluster, self._journal, self._seed = scenario, cluster, journal, seed
        self.services: dict[str, Service] = {}
        for spec in scenario.services:
            of = self.services.get(spec.of)
            host = cluster.host(spec.host)
            self.services[spec.name] = make(spec.kind, spec.name, host, of, spec.options)
        self.workers: dict[str, Worker] = {}
        self.pairs: dict[str, Pairing] = {}
        self._keys = keys.generate()
        for pair in scenario.pairs:
            self._add_pair(pair)

    @property
    def members(self) -> list[Member]:
        """All workers, as the invariants know them."""
        return [worker.member for worker in self.workers.values()]

    def start(self, timeout: float) -> None:
        """Start services in their order, then all workers at once."""
        for service in self.services.values():
            service.start()
        for group in self.scenario.groups:
            self._add_group(group)
        start_all(list(self.workers.values()), timeout)

    def on_host(self, index: int) -> list[Worker]:
        """Return the workers of one host."""
        return [worker for worker in self.workers.values() if worker.host.index == index]

    def services_on(self, index: int) -> list[Service]:
        """Return the services of one host, in their order."""
        return [one for one in self.services.values() if one.host.index == index]

    def group(self, name: str) -> list[Worker]:
        """Return the ranks of a group, or of a side of a pair."""
        return [worker for worker in self.workers.values() if worker.member.group == name]

    def pause(self, group: str) -> float:
        """Return how long a group's ranks wait between two calls."""
        return next((g.pause for g in self.scenario.groups if g.name == group), 0.0)

    def quit(self, timeout: float) -> list[str]:
        """Ask all workers that run to end; return the names of those that had to be killed."""
        up = [worker for worker in self.workers.values() if worker.up]
        if not up:
            return []
        with ThreadPoolExecutor(len(up)) as pool:
            ended = list(pool.map(lambda worker: worker.quit(timeout), up))
        return [worker.name for worker, well in zip(up, ended, strict=True) if not well]

    def reader(self, name: str) -> Worker:
        """Return a worker that only reads what a group wrote, all heads of it; not started."""
        group = next(group for group in self.scenario.groups if group.name == name)
        alone = msgspec.structs.replace(group, name=f"{name}-reader", tp=1, roles=("read",))
        return self._l3_worker(alone, 0)

    def _add_group(self, group: GroupSpec) -> None:
        for rank in range(group.tp):
            worker = self._l3_worker(group, rank)
            self.workers[worker.name] = worker

    def _model(self) -> dict[str, Any]:
        """Return what every worker is told of the model and of its content."""
        model = self.scenario.model
        names = "dtype", "layers", "heads", "head_dim", "v_head_dim"
        return {"seed": self._seed} | {name: getattr(model, name) for name in names}

    def _l3_worker(self, group: GroupSpec, rank: int) -> Worker:
        host, model = self.cluster.host(group.host_of(rank)), self.scenario.model
        config = WorkerConfig(
            name=f"{group.name}-{rank}",
            group=group.name,
            url=self.services[group.store].url(host, **group.options),
            layout=group.layout,
            object_layout=group.object_layout,
            page_size=model.unit,
            tp_rank=rank,
            tp_size=group.tp,
            tp_sizes=tuple(sorted({1, *(other.tp for other in self.scenario.groups)})),
            pages=group.pages,
            first=group.first,
            universe=group.universe,
            roles=group.roles,
            batch=group.batch,
            pause=group.pause,
            deadline=group.deadline,
            grace=group.grace,
            **self._model(),
        )
        member = Member(
            name=config.name,
            group=group.name,
            host=host.index,
            size=group.tp,
            roles=group.roles,
            store=group.store,
            deadline=group.deadline,
            grace=group.grace,
            number_nbytes=model.number_nbytes,
        )
        return Worker(member, host, _L3_WORKER, config, self._journal)

    def _add_pair(self, pair: PairSpec) -> None:
        prefill = [self._rank(pair, "prefill", rank) for rank in range(pair.prefill.tp)]
        decode = [self._rank(pair, "decode", rank) for rank in range(pair.decode.tp)]
        addresses = tuple(listen for _, listen in prefill)
        self.pairs[pair.name] = Pairing(
            pair,
            [worker for worker, _ in prefill],
            [worker for worker, _ in decode],
            addresses,
            self._journal,
            self._seed,
        )

    def _rank(self, pair: PairSpec, role: str, rank: int) -> tuple[Worker, str]:
        side: SideSpec = getattr(pair, role)
        host, model = self.cluster.host(side.host_of(rank)), self.scenario.model
        listen = f"tcp://{host.address}:{host.free_port()}" if role == "prefill" else ""
        config = RankConfig(
            name=f"{pair.name}-{role}-{rank}",
            role=role,  # type: ignore[arg-type]
            transport=pair.transport,
            host=host.address,
            listen=listen,
            keys=self._keys,
            fleet=f"{pair.name} {role}",
            ranks=side.tp,
            layout=side.layout,
            page_size=side.page_size,
            unit=model.unit,
            tp_rank=rank,
            tp_size=side.tp,
            pages=side.pages,
            deadline=pair.deadline,
            grace=pair.grace,
            endpoint={**_ENDPOINT, **pair.endpoint},
            **self._model(),
        )
        member = Member(
            name=config.name,
            group=f"{pair.name}-{role}",
            host=host.index,
            size=side.tp,
            roles=(role,),
            transport=pair.transport,
            deadline=pair.deadline,
            grace=pair.grace,
            number_nbytes=model.number_nbytes,
        )
        worker = Worker(member, host, _PD_RANK, config, self._journal)
        self.workers[config.name] = worker
        return worker, listen

    def close(self) -> None:
        """Kill everything; the second call does nothing."""
        for worker in self.workers.values():
            worker.close()
        for service in reversed(self.services.values()):
            service.close()


def start_all(workers: list[Worker], timeout: float) -> None:
    """Start workers beside each other; the first error is raised once all have been tried."""
    if workers:
        with ThreadPoolExecutor(len(workers)) as pool:
            for started in [pool.submit(worker.start, timeout) for worker in workers]:
                started.result()
