"""The runner's end of an agent: one ssh connection to a host, that all its sessions share.

OpenSSH's own client is used, so that keys, jump hosts and the user's configuration work as
ever. The session of the agent is the master of the connection: once it has ended, nothing of
the connection is left.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import kvconnect
from kvconnect import errors
from kvconnect.backend import Closing
from kvconnect.errors import TransferTimeoutError, UnavailableError
from kvconnect.testing.cluster.inventory import HostEntry, Options
from kvconnect.testing.cluster.talk import SECONDS, End, Message, Talk

_START_SECONDS = 30.0
_DRAIN_SECONDS = 2.0
_LAST_WORDS = 1500
_NO_PYTHON, _NO_SSH = (126, 127), 255
# Exit codes: of a shell that cannot run a program, of ssh that cannot connect.


class Link(Closing):
    """A connection with an agent at its other end; closing it has the agent undo everything."""

    def __init__(self, entry: HostEntry, options: Options, control: Path, log: Path) -> None:
        """Connect and take the host; `control` is where sessions find the connection.

        Raises `UnavailableError` where the host cannot be reached, is in use, has no kvconnect or
        another one, or lacks what its faults need.
        """
        self._entry, self._options = entry, options
        self._control, self._log = control, log
        self._stop, self._beats = threading.Event(), None
        self._closed = False
        argv = [entry.python, "-m", "kvconnect.testing.cluster.ssh_agent"]
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(  # noqa: S603 - vectors of our own
                [*self._ssh("-M"), f"exec {shlex.join(argv)}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                bufsize=0,
                start_new_session=True,  # an interrupt at the terminal is the runner's alone
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._lines = os.fdopen(os.dup(self._process.stdout.fileno()), "rb")
        self._talk = Talk(entry.name, self._send, self._lines.readline)
        try:
            self._greet()
            self.taken: dict[str, Any] = self.ask("take", **self._terms()).value
        except BaseException:
            self.close()
            raise
        self._beats = threading.Thread(target=self._beat, name=f"{entry.name} beat", daemon=True)
        self._beats.start()

    def _ssh(self, *more: str) -> list[str]:
        """Return the command line of ssh up to the remote command."""
        entry = self._entry
        given = {
            "ConnectTimeout": str(max(int(self._options.connect_timeout), 1)),
            "ControlPath": str(self._control),
            "ControlPersist": "no",
            "BatchMode": "yes",
            "ServerAliveInterval": "5",
            "ServerAliveCountMax": "3",
            "ClearAllForwardings": "yes",
            "ForwardAgent": "no",
            "UserKnownHostsFile": entry.known_hosts,
            "StrictHostKeyChecking": "yes" if entry.known_hosts else None,
            "IdentityFile": entry.identity,
            "IdentitiesOnly": "yes" if entry.identity else None,
            "ProxyCommand": entry.proxy_command,
            "Port": None if entry.port is None else str(entry.port),
        }
        flags = [f"-o{name}={value}" for name, value in given.items() if value is not None]
        return ["ssh", "-T", *more, *flags, "--", entry.ssh]

    def _terms(self) -> dict[str, object]:
        owner = f"user {os.geteuid()} of {socket.gethostname()}, process {os.getpid()}"
        terms = {"directory": self._entry.directory, "address": self._entry.address}
        return {
            **terms,
            "owner": owner,
            "seconds": self._options.lease,
            "faults": self._entry.faults,
        }

    def _greet(self) -> None:
        """Wait for the agent's first word, which is its version."""
        python = f"{self._entry.python!r} on {self._entry.name}"
        fix = f"install kvconnect[testing]=={kvconnect.__version__} in it"
        try:
            said, _ = self._talk.answer(0, self._options.connect_timeout + _START_SECONDS)
        except TransferTimeoutError:
            raise UnavailableError(f"{self._entry.name} ({self._entry.ssh}): no answer") from None
        except UnavailableError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(SECONDS)
            code, words = self._process.returncode, self.last_words()
            if code == _NO_SSH:
                why = f"ssh cannot reach {self._entry.name} ({self._entry.ssh})"
            elif code in _NO_PYTHON:
                why = f"{python} does not run; set python= of its [[host]]"
            else:
                why = f"{python} does not import kvconnect {kvconnect.__version__}; {fix}"
            raise UnavailableError(f"{why}: {words}") from None
        if said.value != kvconnect.__version__:
            raise UnavailableError(
                f"{python} has kvconnect {said.value}, the runner {kvconnect.__version__}; {fix}"
            )

    def _send(self, data: bytes, _: Sequence[int]) -> None:
        assert self._process.stdin is not None
        view = memoryview(data + b"\n")
        while view:
            view = view[self._process.stdin.write(view) or 0 :]

    def _beat(self) -> None:
        with contextlib.suppress(UnavailableError, TransferTimeoutError):
            while not self._stop.wait(self._options.lease / 4):
                self._talk.ask({"word": "beat"})

    def ask(self, word: str, /, **order: object) -> Message:
        """Have the agent do something; what it raises is raised here, with the host's name."""
        said, _ = self._talk.ask({"word": word, **order})
        return self._checked(said)

    def _checked(self, said: Message) -> Message:
        if said.kind:
            kind = getattr(errors, said.kind, UnavailableError)
            raise kind(f"{self._entry.name}: {said.error}")
        return said

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], fds: Sequence[BinaryIO | int]
    ) -> SshChild:
        """Start a process with these as stdin, stdout and stderr, in a session of its own."""
        sessions: list[subprocess.Popen[bytes]] = []

        def join() -> None:
            # The agent's order has the number that it was sent with, which is the last.
            command = [self._entry.python, "-I", "-S", self.taken["join"], self.taken["folder"]]
            line = f"exec {shlex.join([*command, str(self._talk.number)])}"
            sessions.append(
                subprocess.Popen(  # noqa: S603 - vectors of our own
                    [*self._ssh("-oControlMaster=no"), line],
                    stdin=fds[0],
                    stdout=fds[1],
                    stderr=fds[2],
                    start_new_session=True,
                )
            )

        try:
            order = {"word": "start", "argv": list(argv), "env": dict(env)}
            said, end = self._talk.ask(order, then=join)
            self._checked(said)
        except BaseException:
            for session in sessions:
                session.kill()
                session.wait(SECONDS)
            raise
        if said.error:
            sessions[0].wait(SECONDS)
            raise UnavailableError(f"{argv[0]} does not start on {self._entry.name}: {said.error}")
        return SshChild(self, said.pid, end, sessions[0])

    def last_words(self) -> str:
        """Return the end of what ssh and the agent said on stderr."""
        return self._log.read_bytes()[-_LAST_WORDS:].decode(errors="replace").strip()

    def close(self) -> None:
        """Have everything undone on the host and end the connection; twice is fine.

        Raises what the agent could not undo. A host that is not there undoes it by itself.
        """
        if self._closed:
            return
        self._closed = True
        self._stop.set()
        try:
            if hasattr(self, "taken"):
                with contextlib.suppress(UnavailableError):
                    self._talk.ask({"word": "bye"})
        finally:
            self._hang_up()

    def _hang_up(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(SECONDS)
        self._talk.join()
        self._lines.close()
        self._process.stdout.close()
        if self._beats is not None:
            self._beats.join(SECONDS)


class SshChild:
    """A process that an agent started, and the session that carries its bytes."""

    def __init__(self, link: Link, pid: int, end: End, session: subprocess.Popen[bytes]) -> None:
        """Describe a process by its id on the host; `end` is set when it has ended."""
        self._link, self.pid, self._end, self.session = link, pid, end, session

    def signal(self, number: int) -> None:
        """Send a signal to it and to its group."""
        if not self._end.known.is_set():
            self._link.ask("signal", pid=self.pid, signal=int(number))

    def wait(self, timeout: float) -> int | None:
        """Return its exit code, or None if it still runs after `timeout` seconds.

        A wait of some length waits for its last bytes too, unless another process holds on to
        its stdout.
        """
        if not self._end.known.wait(timeout):
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.session.wait(_DRAIN_SECONDS if timeout else 0)
        return self._end.code
