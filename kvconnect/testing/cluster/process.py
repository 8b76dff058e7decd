"""A process on a host, as the runner sees it: lines out and in, signals, its end.

The same for a host on this machine and one over ssh; what differs is behind `Child`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvconnect.backend import Closing
from kvconnect.errors import ClosedError, TransferTimeoutError, UnavailableError

Line = tuple[float, str]
"""When a line came (the runner's monotonic seconds) and its text, without its end."""

_SEND_SECONDS = 10.0
_END_SECONDS = 10.0
_LAST_WORDS = 2000


@dataclass(frozen=True, slots=True)
class Completed:
    """How a command ended; `seconds` from its start, a negative code is the signal's."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float


class Child(Protocol):
    """A started process: how it is reached on its host."""

    @property
    def pid(self) -> int:
        """Its id on its host; also that of its process group."""

    def signal(self, number: int) -> None:
        """Send a signal to it and to its group; none to a process that has ended."""

    def wait(self, timeout: float) -> int | None:
        """Return its exit code, or None if it still runs after `timeout` seconds."""


class Process(Closing):
    """A process that was started on a host.

    Its stdout is read all the time, by a thread, and kept in `lines` until somebody takes it;
    its stderr goes to the file `log`. Leaving the ``with`` block kills it with its group.
    """

    def __init__(
        self, name: str, host: str, child: Child, *, stdin: int, stdout: int, log: Path
    ) -> None:
        """Take over the runner's ends of its pipes."""
        self.name, self.host, self.log = name, host, log
        self._child, self._stdin, self._stdout = child, stdin, stdout
        self._lines: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        os.set_blocking(stdin, False)
        self._reader = threading.Thread(target=self._read, name=f"{host} {name}", daemon=True)
        self._reader.start()

    def __repr__(self) -> str:
        """Show where it runs and whether."""
        return f"Process({self.name!r} on {self.host}, pid {self.pid}, alive={self.alive})"

    @property
    def pid(self) -> int:
        """Its process id on its host."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended; a stopped one is alive."""
        return self._child.wait(0) is None

    def _read(self) -> None:
        left = b""
        try:
            while data := os.read(self._stdout, 1 << 16):
                now = time.monotonic()
                *lines, left = (left + data).split(b"\n")
                for line in lines:
                    self._lines.put((now, line.decode(errors="replace")))
        finally:
            if left:
                self._lines.put((time.monotonic(), left.decode(errors="replace")))
            self._lines.put(None)
            os.close(self._stdout)

    def lines(self) -> queue.SimpleQueue[Line | None]:
        """Return the queue of lines not taken yet; None in it is the end of its stdout."""
        return self._lines

    def receive(self, timeout: float) -> str:
        """Take one line of its stdout.

        Raises `TransferTimeoutError` after `timeout` seconds, `UnavailableError` with its last
        words where its stdout has ended.
        """
        try:
            line = self._lines.get(timeout=max(timeout, 0))
        except queue.Empty:
            raise TransferTimeoutError(
                f"{self.name} on {self.host} said nothing for {timeout:g} s"
            ) from None
        if line is None:
            self._lines.put(None)  # for who asks next
            code = self._child.wait(_END_SECONDS)
            raise UnavailableError(
                f"{self.name} on {self.host} ended with code {code}: {self.last_words()}"
            )
        return line[1]

    def await_line(self, word: str, timeout: float) -> str:
        """Take lines until one contains `word`, and return that one; raises as `receive` does."""
        until = time.monotonic() + timeout
        while True:
            line = self.receive(until - time.monotonic())
            if word in line:
                return line

    def last_words(self) -> str:
        """Return the end of its stderr."""
        with self.log.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _LAST_WORDS, 0))
            return file.read().decode(errors="replace").strip()

    def send(self, line: str) -> None:
        """Write one line to its stdin.

        Raises `UnavailableError` where it has ended, `TransferTimeoutError` where it takes none
        in (it may be stopped) for ten seconds.
        """
        data = memoryview(f"{line}\n".encode())
        until = time.monotonic() + _SEND_SECONDS
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self.name} on {self.host} was closed")
            while data:
                if not select.select([], [self._stdin], [], max(until - time.monotonic(), 0))[1]:
                    raise TransferTimeoutError(
                        f"{self.name} on {self.host} reads no stdin: {len(data)} B not taken in "
                        f"{_SEND_SECONDS:g} s"
                    )
                try:
                    data = data[os.write(self._stdin, data) :]
                except BlockingIOError:  # less room than a whole line of up to PIPE_BUF
                    time.sleep(0.001)
                except BrokenPipeError:
                    raise UnavailableError(
                        f"{self.name} on {self.host} takes no line, it has ended: "
                        f"{self.last_words()}"
                    ) from None

    def kill(self) -> None:
        """Kill it and its group (SIGKILL)."""
        self._child.signal(signal.SIGKILL)

    def stop(self) -> None:
        """Stop it where it is (SIGSTOP): it keeps memory, locks and connections, and is silent."""
        self._child.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let a stopped one go on (SIGCONT)."""
        self._child.signal(signal.SIGCONT)

    def terminate(self, timeout: float) -> int:
        """Ask it to end (SIGTERM), kill it after `timeout` seconds; return its exit code."""
        self._child.signal(signal.SIGTERM)
        self._child.signal(signal.SIGCONT)
        if (code := self._child.wait(timeout)) is not None:
            return code
        self.kill()
        return self.wait(_END_SECONDS)

    def wait(self, timeout: float) -> int:
        """Wait for its end and return its exit code, negative for a signal's number.

        Raises `TransferTimeoutError` after `timeout` seconds.
        """
        code = self._child.wait(timeout)
        if code is None:
            raise TransferTimeoutError(
                f"{self.name} on {self.host} (pid {self.pid}) still runs after {timeout:g} s"
            )
        return code

    def close(self) -> None:
        """Kill it and take back the pipes; its log stays. The second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with contextlib.suppress(UnavailableError):  # its host is gone, and it with it
                self.kill()
            os.close(self._stdin)
        self._child.wait(_END_SECONDS)
        self._reader.join(_END_SECONDS)
