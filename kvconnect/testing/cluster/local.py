"""A host on this machine: namespaces, a cable to the switch, a disk of its own."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from kvconnect.errors import UnavailableError
from kvconnect.testing.cluster import disk, network, shaping
from kvconnect.testing.cluster.control import EVERYBODY, Control
from kvconnect.testing.cluster.disk import Disk
from kvconnect.testing.cluster.host import Host
from kvconnect.testing.cluster.names import DEVICE, Names
from kvconnect.testing.cluster.process import Child
from kvconnect.testing.cluster.tools import call

_FILLER = ".filler"


class LocalHost(Host):
    """A host made of namespaces (network, mount, process, IPC, host name).

    It has its own boot id, /dev/shm, /etc/hosts and temporary folder (TMPDIR); the rest of the
    file system is this machine's. Programs inherit the runner's environment and `sys.path`.
    """

    def __init__(self, names: Names, index: int, count: int, nbytes: int, logs: Path) -> None:
        """Make and start it; `nbytes` is the size of its disk."""
        self._names = names
        self._rate: str | None = None
        self._sources = shaping.Sources()
        self._folder = names.folder / f"host{index}"
        self._folder.mkdir()
        self._disk = Disk(self._folder / "disk.img", self._folder / "disk")
        super().__init__(index, names.address(index), self._disk.folder, sys.executable, logs)
        hosts = [f"{names.address(i)} host{i}\n" for i in range(count)]
        (self._folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(hosts), "ascii")
        self._disk.make(nbytes)
        self._switch_on()

    def _switch_on(self) -> None:
        shutil.rmtree(self._folder / "tmp", ignore_errors=True)
        (self._folder / "tmp").mkdir(mode=0o1777)
        boot = self._folder / "boot_id"
        boot.write_text(f"{uuid.uuid4()}\n", encoding="ascii")
        network.attach(self._names, self.index)
        self._namespace = self._names.host(self.index)
        self.admin(["iptables-restore", "--noflush"], shaping.jump(self._names.chain, DEVICE))
        self.set_rules(self._sources)
        self.shape(self._rate)
        hosts = self._folder / "hosts"
        self._control = Control(self._namespace, self.name, boot, hosts, self.directory)

    def _start(
        self, argv: Sequence[str], env: Mapping[str, str], fds: tuple[BinaryIO | int, ...]
    ) -> Child:
        path = os.pathsep.join(p for p in sys.path if p)
        own = {"PYTHONPATH": path, "TMPDIR": str(self._folder / "tmp")}
        numbers = [fd if isinstance(fd, int) else fd.fileno() for fd in fds]
        return self._control.start(argv, {**os.environ, **own, **env}, self.directory, numbers)

    def admin(self, argv: Sequence[str], given: str = "") -> str:
        """Run a network tool in the host's network namespace."""
        return call(["ip", "netns", "exec", self._namespace, *argv], given=given)

    def read(self, path: str) -> str:
        """Return the text of a file as programs on the host see it."""
        try:
            return self._inside(path).read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError) as error:
            raise UnavailableError(f"{path} of {self.name} is not there: {error}") from error

    def _inside(self, path: str) -> Path:
        # /proc/net leads to the reader's own namespace: ask for that of the keeper.
        plain = path.replace("/proc/net/", "/proc/1/net/")
        return Path(f"/proc/{self._control.pid}/root{plain}")

    def _descriptors(self, pid: int) -> int:
        try:
            return len(list(self._inside(f"/proc/{pid}/fd").iterdir()))
        except (FileNotFoundError, ProcessLookupError) as error:
            raise UnavailableError(f"process {pid} on {self.name} has ended") from error

    def kill(self) -> None:
        """Kill every process on the host."""
        self._control.signal(EVERYBODY, signal.SIGKILL)

    def stop(self) -> None:
        """Stop every process on the host."""
        self._control.signal(EVERYBODY, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let every process on the host go on."""
        self._control.signal(EVERYBODY, signal.SIGCONT)

    def set_rules(self, sources: shaping.Sources) -> None:
        """Drop just these packets from now on."""
        self._sources = sources
        text = shaping.rules(self._names.chain, sources)
        self.admin(["iptables-restore", "--noflush"], text)

    def dropped(self) -> int:
        """Count the packets dropped since the rules were last changed."""
        return shaping.dropped(self.admin(["iptables-save", "-c"]), self._names.chain)

    def shape(self, rate: str | None) -> None:
        """Limit what the host sends, and what it receives, each to `rate`; None lifts it."""
        if rate is not None:
            shaping.rate_bits(rate)
        ends = [(self._namespace, DEVICE), (self._names.switch, self._names.port(self.index))]
        for namespace, device in ends:
            inside = ["ip", "netns", "exec", namespace]
            there = " htb " in call([*inside, "tc", "qdisc", "show", "dev", device])
            if rate is not None:
                for command in shaping.limit(device, rate, there=there):
                    call([*inside, *command])
            elif there:
                call([*inside, *shaping.unlimit(device)])
        self._rate = rate

    def fill_disk(self, leave: int = 0) -> int:
        """Fill the disk up to `leave` bytes; return the bytes of the file that does it."""
        return disk.fill(self.directory / _FILLER, leave)

    def free_disk(self) -> None:
        """Undo `fill_disk`."""
        (self.directory / _FILLER).unlink(missing_ok=True)

    def power_cut(self) -> None:
        """Cut its power and switch it on again.

        The cable goes first, so that no peer is told; then every process dies at once, and the
        disk is what its file holds at that instant, mounted again with its journal replayed.
        The host comes back empty of processes, with a new boot id and the faults it had.
        """
        network.unplug(self._names, self.index)
        self._control.close()
        self._disk.cut_power()
        network.delete(self._namespace)
        self._switch_on()

    def close(self) -> None:
        """Kill everything on it; the second call does nothing. Its cluster removes the rest."""
        self._control.close()
        super().close()
