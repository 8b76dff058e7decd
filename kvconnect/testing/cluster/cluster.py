"""`Cluster`: several hosts, their network, and everything they made removed at the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from kvconnect.backend import Closing
from kvconnect.errors import ConfigError
from kvconnect.testing.cluster import names, network, shaping, sweep, tools
from kvconnect.testing.cluster.host import Host
from kvconnect.testing.cluster.local import LocalHost
from kvconnect.testing.cluster.names import Names

_MOST_HOSTS = 64
_LEAST_DISK = 16 << 20


class Cluster(Closing):
    """Hosts that reach each other by their addresses, and nothing else.

    `directory` is the runner's folder with the logs of every process. Leaving the ``with``
    block removes all that was made; after a kill -9 of the runner the next start does.
    """

    def __init__(self, directory: Path) -> None:
        """Have no host yet; see `local`."""
        self.directory = directory
        self.hosts: tuple[Host, ...] = ()
        self._names: Names | None = None
        self._cuts = shaping.Cuts(())

    @classmethod
    def local(
        cls,
        hosts: int = 3,
        *,
        disk: int = 512 << 20,
        rate: str | None = None,
        directory: Path | None = None,
    ) -> Self:
        """Make a cluster of namespaces on this machine; it needs root.

        `disk` is the size of each host's disk in bytes, `rate` as in `Host.shape`. Logs are
        kept in `directory` where it is given, else they go with the cluster.
        """
        if not 1 <= hosts <= _MOST_HOSTS:
            raise ConfigError(f"hosts={hosts} is not in 1..{_MOST_HOSTS}")
        if disk < _LEAST_DISK:
            raise ConfigError(f"disk={disk} B is less than {_LEAST_DISK} B")
        tools.need_root()
        tools.need(tools.PACKAGES)
        sweep.sweep()
        made = names.claim()
        cluster = cls(directory or made.folder / "logs")
        cluster._names = made
        try:
            network.make_switch(made)
            for index in range(hosts):
                logs = cluster.directory / f"host{index}"
                logs.mkdir(parents=True, exist_ok=True)
                cluster.hosts += (LocalHost(made, index, hosts, disk, logs),)
                if rate is not None:
                    cluster.hosts[index].shape(rate)
            cluster._join()
        except BaseException:
            cluster.close()
            raise
        return cluster

    def _join(self) -> None:
        self._cuts = shaping.Cuts([host.address for host in self.hosts])
        for host in self.hosts:
            host.join(self._cuts, self._apply)

    def _apply(self) -> None:
        for host in self.hosts:
            host.set_rules(self._cuts.of(host.index))

    def host(self, index: int) -> Host:
        """Return one host; `ConfigError` if there is none of this index."""
        if not 0 <= index < len(self.hosts):
            raise ConfigError(f"host {index} is not in 0..{len(self.hosts) - 1}")
        return self.hosts[index]

    def partition(self, groups: Sequence[Sequence[int]]) -> None:
        """Cut every link between two of these groups; hosts of no group are not touched.

        A second partition takes the place of the first.
        """
        self._cuts.heal(None)
        for number, group in enumerate(groups):
            others = [i for other in groups[number + 1 :] for i in other]
            self._cuts.cut(None, {self.host(i).index: others for i in group})
        self._apply()

    def heal(self) -> None:
        """Lift every cut and partition, whoever asked; losses and rates stay."""
        self._cuts.heal_all()
        self._apply()

    def close(self) -> None:
        """Kill everything and remove all that was made; the second call does nothing."""
        for host in self.hosts:
            host.close()
        if self._names is not None:
            sweep.remove(self._names)
            self._names = None
