"""`Cluster`: several hosts, their network, and everything they made removed at the end."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from kvconnect.backend import Closing
from kvconnect.errors import ConfigError
from kvconnect.testing.cluster import names, network, shaping, sweep, tools
from kvconnect.testing.cluster.host import Host
from kvconnect.testing.cluster.inventory import Inventory
from kvconnect.testing.cluster.local import LocalHost
from kvconnect.testing.cluster.names import Names
from kvconnect.testing.cluster.ssh_host import SshHost

_MOST_HOSTS = 64
_LEAST_DISK = 16 << 20


class Cluster(Closing):
    """Hosts that reach each other by their addresses, with a folder for data on each.

    Those of `local` reach nothing else; those of `over_ssh` are machines that exist. `directory`
    is the runner's folder with the logs of every process. Leaving the ``with`` block removes all
    that was made and lifts every fault; after a kill -9 of the runner the next start does, on
    hosts over ssh the host itself.
    """

    def __init__(self, directory: Path, scratch: Path) -> None:
        """Have no host yet; see `local` and `over_ssh`. `scratch` goes with the cluster."""
        self.directory = directory
        self.hosts: tuple[Host, ...] = ()
        self._scratch = scratch
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
        tools.need(tools.LOCAL)
        sweep.sweep()
        made = names.claim()
        cluster = cls(directory or made.folder / "logs", made.folder)
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

    @classmethod
    def over_ssh(cls, inventory: Inventory, *, directory: Path | None = None) -> Self:
        """Take the hosts of an inventory; they are given back as they were found.

        Logs are kept in `directory` where it is given, else they go with the cluster. Raises
        `UnavailableError` where a host cannot be reached, is in use by another cluster, does not
        import this kvconnect, or lacks what its faults need.
        """
        tools.need(["ssh"])
        inventory.check("inventory")
        sweep.sweep_folders(names.SSH_BASE)
        scratch = names.claim_folder(names.SSH_BASE)
        cluster = cls(directory or scratch / "logs", scratch)
        made: list[SshHost] = []
        try:
            for index, entry in enumerate(inventory.host):
                logs = cluster.directory / entry.name
                logs.mkdir(parents=True, exist_ok=True)
                socket = scratch / f"ssh{index}"
                made.append(SshHost(index, entry, inventory.options, logs, socket))
                cluster.hosts = tuple(made)
            for host in made:
                host.meet(made)
            cluster._join()
        except BaseException:
            cluster.close()
            raise
        return cluster

    def _join(self) -> None:
        rigid = {host.index: host.rigid for host in self.hosts if host.rigid}
        self._cuts = shaping.Cuts([host.address for host in self.hosts], rigid)
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
        links: dict[int, list[int]] = {}
        for number, group in enumerate(groups):
            others = [self.host(i).index for other in groups[number + 1 :] for i in other]
            for i in group:
                links.setdefault(self.host(i).index, []).extend(others)
        self._cuts.cut(None, links, instead=True)
        self._apply()

    def heal(self) -> None:
        """Lift every cut and partition, whoever asked; losses and rates stay."""
        self._cuts.heal_all()
        self._apply()

    def reset(self, rate: str | None = None) -> None:
        """Kill all processes, lift all faults and remove all data; then shape all to `rate`.

        The hosts are as new, but for their ports and logs.
        """
        self._cuts.heal_all()
        for host in self.hosts:
            self._cuts.lose(host.index, None)
        self._apply()
        for host in self.hosts:
            host.reset()
            host.shape(rate)

    def close(self) -> None:
        """Kill everything and remove all that was made; the second call does nothing."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._remove)
            for host in self.hosts:
                stack.callback(host.close)

    def _remove(self) -> None:
        if self._names is not None:
            sweep.remove(self._names)
            self._names = None
        shutil.rmtree(self._scratch, ignore_errors=True)
