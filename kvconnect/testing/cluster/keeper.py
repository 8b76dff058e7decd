"""The first process of a local host: starts the others, passes signals on, tells who ended.

It is process 1 of the host's process namespace: once it ends, the kernel kills every process of
the host at once, none can escape. It ends when the runner does, however that ended: a process
that kill -9 took with it could not have cleaned up.

A script of its own on the standard library alone, because it must start quickly.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any

LIMIT = 1 << 20
"""Bytes of a message at most."""


def start(order: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """Start a process in a session of its own; answer with its id once it is what was asked for.

    `fds` become its stdin, stdout and stderr.
    """
    failed, fail = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _become(order, fds)
        except OSError as error:
            os.write(fail, (error.strerror or "unknown").encode())
        finally:
            os._exit(127)
    os.close(fail)
    with os.fdopen(failed, "rb") as words:  # closed by the kernel when the program is executed
        why = words.read().decode()
    return {"pid": pid, "error": why}


def _become(order: dict[str, Any], fds: list[int]) -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    for place, fd in enumerate(fds):
        os.dup2(fd, place)
    os.chdir(order["cwd"])
    os.execvpe(order["argv"][0], order["argv"], order["env"])  # noqa: S606 - what it is for


def _signal(order: dict[str, Any]) -> dict[str, Any]:
    """Send a signal to a process and all of its session's group; -1 means everybody."""
    with contextlib.suppress(ProcessLookupError):
        if order["pid"] == -1:
            os.kill(-1, order["signal"])
        else:
            os.killpg(order["pid"], order["signal"])
    return {}


def _reap(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _say(control, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _say(control: socket.socket, message: dict[str, Any]) -> None:
    control.sendall(json.dumps(message).encode())


def receive(control: socket.socket) -> tuple[bytes, list[int]]:
    """Take a message and up to three descriptors, which no process started later gets."""
    data, fds, _, _ = socket.recv_fds(control, LIMIT, 3)
    for fd in fds:  # recv_fds takes flags and ignores them
        os.set_inheritable(fd, False)  # noqa: FBT003
    return data, fds


def _obey(control: socket.socket) -> None:
    data, fds = receive(control)
    if not data:
        os._exit(0)
    order = json.loads(data)
    answer = start(order, fds) if "argv" in order else _signal(order)
    for fd in fds:
        os.close(fd)
    _say(control, {"number": order["number"], **answer})


def main() -> None:
    """Serve the runner: arguments are the control socket's and the runner's descriptors."""
    control_fd, runner = int(sys.argv[1]), int(sys.argv[2])
    control = socket.socket(fileno=control_fd)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    for fd in (control_fd, runner):
        os.set_inheritable(fd, False)  # noqa: FBT003
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    for fd in (control_fd, runner, woken):
        poll.register(fd, select.POLLIN)
    _say(control, {"number": 0})
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if runner in ready:  # a process descriptor is readable once the process has ended
            os._exit(0)
        if woken in ready:
            os.read(woken, 4096)
            _reap(control)
        if control_fd in ready:
            _obey(control)


if __name__ == "__main__":
    main()
