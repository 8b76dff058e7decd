"""A host of an existing cluster, reached over ssh."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from kvconnect.errors import CapabilityError
from kvconnect.testing.cluster import shaping, ssh_faults
from kvconnect.testing.cluster.host import Host
from kvconnect.testing.cluster.inventory import HostEntry, Options
from kvconnect.testing.cluster.process import Child
from kvconnect.testing.cluster.ssh_link import Link, SshChild
from kvconnect.testing.cluster.talk import SECONDS


class SshHost(Host):
    """A machine of somebody's: programs run as the user of the inventory, in a folder of ours.

    They have the environment of that user's sessions. Faults touch only what passes between the
    hosts of the cluster; the runner's connection is never touched. Its power cannot be cut.
    """

    def __init__(
        self, index: int, entry: HostEntry, options: Options, logs: Path, socket: Path
    ) -> None:
        """Connect and take it; `socket` is where sessions will find the connection."""
        self._entry = entry
        self._children: list[SshChild] = []
        self._peers: list[str] = []
        self._spared: list[shaping.Spared] = []
        self._link = Link(entry, options, socket, logs / "agent.log")
        taken = self._link.taken
        super().__init__(index, entry.address, Path(taken["data"]), entry.python, logs)
        self.name = entry.name
        self._own = [shaping.Spared(*taken["connection"])] if taken["connection"] else []

    def meet(self, hosts: Sequence[SshHost]) -> None:
        """Learn of all hosts of the cluster: whom faults are for, and whom they spare."""
        self._peers = [host.address for host in hosts if host is not self]
        self._spared = [one for host in hosts for one in host._own]  # noqa: SLF001 - of our class

    @property
    def rigid(self) -> str:
        """Why its network takes no faults; empty where it does."""
        if self._entry.faults:
            return ""
        return f"{self.name} takes no network faults: faults = true is not in its [[host]]"

    def _start(
        self, argv: Sequence[str], env: Mapping[str, str], fds: tuple[BinaryIO | int, ...]
    ) -> Child:
        self._children = [c for c in self._children if c.session.poll() is None]
        child = self._link.start(argv, env, fds)
        self._children.append(child)
        return child

    def admin(self, argv: Sequence[str], given: str = "") -> str:
        """Run a network tool there, by sudo where the user is not root."""
        return str(self._link.ask("admin", argv=list(argv), given=given).value)

    def read(self, path: str) -> str:
        """Return the text of a file that the user may read."""
        return str(self._link.ask("read", path=path).value)

    def _descriptors(self, pid: int) -> int:
        return int(self._link.ask("descriptors", pid=pid).value)

    def kill(self) -> None:
        """Kill every process that was started here, with all that these started."""
        self._everybody(signal.SIGKILL)

    def stop(self) -> None:
        """Stop every process that was started here; the machine itself goes on."""
        self._everybody(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let every process that was started here go on."""
        self._everybody(signal.SIGCONT)

    def _everybody(self, number: int) -> None:
        self._link.ask("signal", pid=-1, signal=int(number))

    def set_rules(self, sources: shaping.Sources) -> None:
        """Drop just these packets from now on."""
        if self._entry.faults:
            text = shaping.rules(ssh_faults.CHAIN, sources, self._spared)
            self.admin(["iptables-restore", "--noflush"], text)

    def dropped(self) -> int:
        """Count the packets dropped since the rules were last changed."""
        self._need_faults()
        return shaping.dropped(self.admin(["iptables-save", "-c"]), ssh_faults.CHAIN)

    def shape(self, rate: str | None) -> None:
        """Limit what it sends to the other hosts, in sum; None lifts it.

        Raises `CapabilityError` where its interface has a queueing discipline that somebody set.
        """
        if rate is not None:
            shaping.rate_bits(rate)
            self._need_faults()
        if self._entry.faults:
            spared = [(one.client, one.server, one.port) for one in self._spared]
            self._link.ask("limit", rate=rate, peers=self._peers, spared=spared)

    def _need_faults(self) -> None:
        if self.rigid:
            raise CapabilityError(self.rigid)

    def fill_disk(self, leave: int = 0) -> int:
        """Fill the disk of the inventory's directory; return the size of the file that does it.

        Raises `CapabilityError` unless the inventory allows it by `fill`, and `CapacityError`
        where that is less than it takes; then nothing is written.
        """
        most = self._entry.fill_bytes
        if not most:
            raise CapabilityError(
                f"{self.name} does not allow its disk to be filled: set fill in its [[host]] to "
                "the size that a file there may have"
            )
        return int(self._link.ask("fill", leave=leave, most=most).value)

    def free_disk(self) -> None:
        """Undo `fill_disk`."""
        self._link.ask("free")

    def power_cut(self) -> None:
        """Raise `CapabilityError`: a machine that is switched off may not come back."""
        raise CapabilityError(f"{self.name}: power can be cut on hosts of Cluster.local alone")

    def close(self) -> None:
        """End all processes, undo everything, hang up; the second call does nothing."""
        try:
            self._link.close()
        finally:
            super().close()
            for child in self._children:
                try:
                    child.session.wait(SECONDS)
                except subprocess.TimeoutExpired:
                    child.session.kill()
                    child.session.wait(SECONDS)
