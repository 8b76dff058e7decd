"""The runner's end of a local host's keeper: start processes there, signal, learn who ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvconnect.backend import Closing
from kvconnect.errors import UnavailableError
from kvconnect.testing.cluster import keeper
from kvconnect.testing.cluster.talk import SECONDS, End, Talk

EVERYBODY = -1

_SETUP = """
set -e
mount --bind "$1" /proc/sys/kernel/random/boot_id
mount --bind "$2" /etc/hosts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
umount -l /run/netns
others() {
  awk -v own="$1" '$0 ~ / - [^ ]+ \\/dev\\/loop/ && $5 != own {print $5}' /proc/self/mountinfo
}
for point in $(others "$3"); do
  words=$(umount -l "$point" 2>&1) || ! others "$3" | grep -qxF "$point" ||
    { echo "$words" >&2; exit 1; }
done
echo "$4" > /proc/sys/kernel/hostname
shift 4
exec "$@"
"""
# What a host must not share with its neighbours. Other loop devices and namespaces are let go of
# because a copy of their mount here would keep them busy when their owners unmount them. One may
# go between its listing and its unmounting: an owner that removes the folder takes the copy along.


class Control(Closing):
    """A running host: namespaces for processes, mounts, names, and the keeper inside.

    Closing it kills everything on the host and waits until all of it is gone.
    """

    def __init__(self, namespace: str, name: str, boot: Path, hosts: Path, disk: Path) -> None:
        """Start it in a network namespace; `boot` and `hosts` are its boot id and /etc/hosts."""
        self._name, self.pid = name, 0
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        runner = os.pidfd_open(os.getpid())
        inside = [str(boot), str(hosts), str(disk), name, sys.executable, "-I", "-S"]
        self._process = subprocess.Popen(  # noqa: S603 - vectors of our own
            [
                *("ip", "netns", "exec", namespace),
                *("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc"),
                *("--kill-child", "sh", "-c", _SETUP, "sh", *inside),
                *(keeper.__file__, str(theirs.fileno()), str(runner)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(theirs.fileno(), runner),
        )
        theirs.close()
        os.close(runner)
        self._talk = Talk(name, self._send, lambda: self._socket.recv(keeper.LIMIT))
        self._started()

    def _send(self, data: bytes, fds: Sequence[int]) -> None:
        socket.send_fds(self._socket, [data], fds)

    def _started(self) -> None:
        try:
            self._talk.answer(0)
        except UnavailableError:
            assert self._process.stderr is not None
            words = self._process.stderr.read().decode(errors="replace").strip()
            self.close()
            raise UnavailableError(f"{self._name} did not start: {words}") from None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self.pid = int(children.read_text(encoding="ascii").split()[0])

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, fds: Sequence[int]
    ) -> LocalChild:
        """Start a process with these as stdin, stdout and stderr; the caller closes its own."""
        order = {"argv": list(argv), "env": dict(env), "cwd": str(cwd)}
        answer, end = self._talk.ask(order, fds)
        if answer.error:
            raise UnavailableError(f"{argv[0]} does not start on {self._name}: {answer.error}")
        return LocalChild(self, answer.pid, end)

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a process's group, or to `EVERYBODY`."""
        self._talk.ask({"pid": pid, "signal": int(number)})

    def close(self) -> None:
        """Kill everything on the host; the second call does nothing."""
        if self._process.poll() is None:
            if self.pid:  # the kernel has it reaped once nothing is left on the host
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            else:
                self._process.kill()
            self._process.wait(SECONDS)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._talk.join()
        self._socket.close()
        assert self._process.stderr is not None
        self._process.stderr.close()


class LocalChild:
    """A process that a keeper started."""

    def __init__(self, control: Control, pid: int, end: End) -> None:
        """Describe a process by its id on the host; `end` is set when it has ended."""
        self._control, self.pid, self._end = control, pid, end

    def signal(self, number: int) -> None:
        """Send a signal to it and to its group."""
        self._control.signal(self.pid, number)

    def wait(self, timeout: float) -> int | None:
        """Return its exit code, or None if it still runs after `timeout` seconds."""
        return self._end.code if self._end.known.wait(timeout) else None
