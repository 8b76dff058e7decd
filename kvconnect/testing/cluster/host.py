"""A host of a cluster: run and start programs there, break its network and its disk.

One class for hosts on this machine and over ssh; subclasses say how a program is started, how
the administrator's tools are run and how files are reached.
"""

from __future__ import annotations

import abc
import contextlib
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvconnect.backend import Closing
from kvconnect.errors import (
    CapacityError,
    ConfigError,
    KVConnectError,
    TransferTimeoutError,
    UnavailableError,
)
from kvconnect.testing.cluster import clock, shaping
from kvconnect.testing.cluster.clock import ClockReading
from kvconnect.testing.cluster.process import Child, Completed, Process

_PORTS = range(20000, 32000)
# Below what kernels give out by themselves, above what Mooncake picks from (15000 to 17000).

_ADMIN_SECONDS = 30.0
_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Counts:
    """What a process holds: open descriptors, threads, resident memory in bytes."""

    fds: int
    threads: int
    rss: int


class Host(Closing, abc.ABC):
    """One host: `index` in its cluster, `name`, IPv4 `address` there, data `directory`.

    `python` is the interpreter to start workers with. `run` and `spawn` may be called from any
    thread. Faults last until they are lifted by their counterpart; those of two hosts on the
    same link do not lift each other.
    """

    def __init__(self, index: int, address: str, directory: Path, python: str, logs: Path) -> None:
        """Describe it; `logs` is a folder of the runner's that exists."""
        self.index, self.name, self.address = index, f"host{index}", address
        self.directory, self.python = directory, python
        self._logs = logs
        self._processes: list[Process] = []
        self._given_ports: set[int] = set()
        self._next_port = random.choice(_PORTS)  # noqa: S311 - spreads, guards nothing
        self._cuts: shaping.Cuts | None = None
        self._apply: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        """Show where it is."""
        return f"{type(self).__name__}({self.name}, {self.address})"

    @property
    def rigid(self) -> str:
        """Why its network takes no faults; empty where it does."""
        return ""

    def join(self, cuts: shaping.Cuts, apply: Callable[[], None]) -> None:
        """Become part of a cluster: `cuts` is shared by all, `apply` sets its rules everywhere."""
        self._cuts, self._apply = cuts, apply

    @abc.abstractmethod
    def _start(
        self, argv: Sequence[str], env: Mapping[str, str], fds: tuple[BinaryIO | int, ...]
    ) -> Child:
        """Start a program with these as stdin, stdout and stderr."""

    @abc.abstractmethod
    def admin(self, argv: Sequence[str], given: str = "") -> str:
        """Run a network tool with an administrator's rights on the host; return its stdout."""

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        env: Mapping[str, str] | None = None,
        input: str | None = None,  # noqa: A002 - as in subprocess.run
    ) -> Completed:
        """Run a program to its end, its working directory the data disk.

        A failure is in the return code. Raises `TransferTimeoutError` after `timeout` seconds,
        with all that it started killed, and `UnavailableError` where it cannot be started.
        """
        with contextlib.ExitStack() as stack:
            given, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            given.write((input or "").encode())
            given.seek(0)
            started = time.monotonic()
            child = self._start(argv, env or {}, (given, out, err))
            code = child.wait(timeout)
            if code is None:
                child.signal(signal.SIGKILL)
                child.wait(_ADMIN_SECONDS)
                raise TransferTimeoutError(
                    f"{argv[0]} on {self.name} took more than {timeout:g} s: {_text(err)[-1000:]}"
                )
            seconds = time.monotonic() - started
            return Completed(code, _text(out), _text(err), seconds)

    def spawn(
        self,
        argv: Sequence[str],
        *,
        name: str,
        env: Mapping[str, str] | None = None,
        ready: str | None = None,
        timeout: float = 30,
    ) -> Process:
        """Start a program and return at once, or after a line of its stdout with `ready` in it.

        Lines up to that one are taken from the process. Its stderr is the file `Process.log`.
        Raises `TransferTimeoutError` where the line does not come in `timeout` seconds and
        `UnavailableError` where the program ends before; then it has been killed.
        """
        log = self._logs / f"{len(self._processes):03d}-{_plain(name)}.log"
        stdin, put = os.pipe()
        get, stdout = os.pipe()
        try:
            with log.open("wb") as stderr:
                child = self._start(argv, env or {}, (stdin, stdout, stderr))
        except BaseException:
            os.close(put)
            os.close(get)
            raise
        finally:
            os.close(stdin)
            os.close(stdout)
        process = Process(name, self.name, child, stdin=put, stdout=get, log=log)
        self._processes.append(process)
        if ready is not None:
            try:
                process.await_line(ready, timeout)
            except KVConnectError:
                process.close()
                raise
        return process

    @property
    def processes(self) -> list[Process]:
        """All processes ever spawned here, in order."""
        return list(self._processes)

    def logs(self) -> list[Path]:
        """Return the logs of all processes, files of the runner's."""
        return [process.log for process in self._processes]

    @abc.abstractmethod
    def kill(self) -> None:
        """Kill every process that was started here, with all that these started (SIGKILL)."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Stop every process here (SIGSTOP): the host hangs, its kernel still answers."""

    @abc.abstractmethod
    def go_on(self) -> None:
        """Let every process here go on (SIGCONT)."""

    def listening(self) -> set[int]:
        """Return the TCP ports that are listened on."""
        tables = self.read("/proc/net/tcp") + self.read("/proc/net/tcp6")
        return {int(port, 16) for port in re.findall(r":([0-9A-F]{4}) [0-9A-F]+:0000 0A ", tables)}

    @abc.abstractmethod
    def read(self, path: str) -> str:
        """Return the text of a file as programs on the host see it, for example below /proc."""

    def free_port(self) -> int:
        """Return a TCP port that nobody listens on and that was never returned before."""
        taken = self.listening() | self._given_ports
        for step in range(len(_PORTS)):
            port = _PORTS[(self._next_port - _PORTS.start + step) % len(_PORTS)]
            if port not in taken:
                self._given_ports.add(port)
                return port
        raise CapacityError(f"no TCP port is free on {self.name} in {_PORTS}")

    def await_port(self, port: int, timeout: float, process: Process | None = None) -> None:
        """Wait until somebody listens on a TCP port; no connection is made to it.

        Raises `TransferTimeoutError` after `timeout` seconds, `UnavailableError` as soon as
        `process`, which should listen, has ended.
        """
        until = time.monotonic() + timeout
        while port not in self.listening():
            if process is not None and not process.alive:
                raise UnavailableError(
                    f"{process!r} ended before it listened: {process.last_words()}"
                )
            if time.monotonic() > until:
                raise TransferTimeoutError(
                    f"nobody listens on port {port} of {self.name} after {timeout:g} s"
                )
            time.sleep(_POLL_SECONDS)

    def cut(self, peers: Sequence[Host] | None = None) -> None:
        """Cut the links to these hosts, or to all: packets vanish both ways, unannounced.

        Raises `ConfigError` on what is no host.
        """
        for peer in peers or ():
            if not isinstance(peer, Host):
                raise ConfigError(f"{self.name}.cut takes hosts, as cluster.host(1); not {peer!r}")
        cuts, apply = self._joined()
        indexes = range(len(cuts)) if peers is None else [peer.index for peer in peers]
        cuts.cut(self.index, {self.index: indexes})
        apply()

    def heal(self) -> None:
        """Lift the cuts of `cut` on this host; those of other hosts and partitions stay."""
        cuts, apply = self._joined()
        cuts.heal(self.index)
        apply()

    def drop(self, percent: float | None) -> None:
        """Lose this share of the packets to and from all other hosts; None ends it."""
        cuts, apply = self._joined()
        cuts.lose(self.index, None if percent is None else shaping.fraction(percent))
        apply()

    def _joined(self) -> tuple[shaping.Cuts, Callable[[], None]]:
        if self._cuts is None:
            raise UnavailableError(f"{self.name} is of no cluster yet")
        return self._cuts, self._apply

    @abc.abstractmethod
    def set_rules(self, sources: shaping.Sources) -> None:
        """Drop just these packets from now on."""

    @abc.abstractmethod
    def dropped(self) -> int:
        """Count the packets that this host dropped since its rules were last changed."""

    @abc.abstractmethod
    def shape(self, rate: str | None) -> None:
        """Limit what the host sends, and on this machine what it receives too; None lifts it.

        Over ssh it is what it sends to the other hosts.
        """

    @abc.abstractmethod
    def fill_disk(self, leave: int = 0) -> int:
        """Fill its data disk up to `leave` bytes; return the bytes of the file that does it."""

    @abc.abstractmethod
    def free_disk(self) -> None:
        """Undo `fill_disk`; nothing where it was not called."""

    @abc.abstractmethod
    def power_cut(self) -> None:
        """Cut its power and switch it on again: see `LocalHost`; `CapabilityError` over ssh."""

    def reset(self) -> None:
        """Kill all processes, free the disk and remove all that is in `directory`."""
        self.kill()
        for process in self._processes:
            process.close()
        self.free_disk()
        done = self.run(_WIPE, timeout=_ADMIN_SECONDS)
        if done.returncode:
            raise UnavailableError(f"{self.name}: {self.directory} stays: {done.stderr}")

    def counts(self, pid: int) -> Counts:
        """Count what a process holds, by its id on the host; `UnavailableError` if it is gone."""
        status = self.read(f"/proc/{pid}/status")
        threads, rss = (re.search(rf"^{k}:\s+(\d+)", status, re.MULTILINE) for k in _STATUS)
        if not threads or not rss:
            raise UnavailableError(f"process {pid} on {self.name} has ended")
        return Counts(self._descriptors(pid), int(threads[1]), int(rss[1]) * 1024)

    @abc.abstractmethod
    def _descriptors(self, pid: int) -> int:
        """Count a process's open descriptors."""

    def clock(self) -> ClockReading:
        """Compare its wall clock with the runner's."""
        with self.spawn([self.python, "-I", "-S", "-u", "-c", clock.ANSWERS], name="clock") as end:
            return clock.read(end)

    def close(self) -> None:
        """Kill the spawned processes and take back what is the runner's; twice is fine."""
        for process in self._processes:
            process.close()


_STATUS = ("Threads", "VmRSS")

_WIPE = ["find", ".", "-mindepth", "1", "-maxdepth", "1", "!", "-name", "lost+found"]
_WIPE += ["-exec", "rm", "-rf", "{}", "+"]


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)
