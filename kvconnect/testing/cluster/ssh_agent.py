"""The runner's hand on a host that is reached over ssh. Runs on that host, one for each cluster.

It starts processes as its own children, passes signals on, tells who ended, reads files and
breaks the network. When the runner says so, when the connection ends, or when nothing was heard
for the time of the lease, it undoes everything and ends: a runner that kill -9 took, or whose
machine went dark, leaves nothing behind. Orders and answers are JSON lines on its stdin and stdout.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

import kvconnect
from kvconnect.errors import CapacityError, KVConnectError, UnavailableError
from kvconnect.testing.cluster import disk, keeper, shaping, ssh_faults, ssh_join
from kvconnect.testing.cluster.ssh_lease import MARK, Lease, Record, end

Order = dict[str, Any]

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphans of our children become ours
_JOIN_SECONDS = 20.0
_HAND_SECONDS = 5.0
_FIRST_SECONDS = 60.0


class Agent:
    """One runner, one host."""

    def __init__(self, orders: int, answers: int) -> None:
        """Speak on these descriptors."""
        self._in, self._out, self._left = orders, answers, b""
        self._seconds, self._heard = _FIRST_SECONDS, time.monotonic()
        self._lease: Lease | None = None
        self._socket: socket.socket | None = None
        self._waiting: dict[int, tuple[float, Order]] = {}
        self._sessions: dict[int, socket.socket] = {}
        self._leaving = False
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._leave)

    def _leave(self, *_: object) -> None:
        self._leaving = True

    def serve(self) -> None:
        """Obey until the end, then undo everything."""
        self._say({"number": 0, "value": kvconnect.__version__})
        try:
            while not self._leaving and time.monotonic() < self._heard + self._seconds:
                self._turn()
        finally:
            self._undo()

    def _turn(self) -> None:
        poll = select.poll()
        listener = -1 if self._socket is None else self._socket.fileno()
        for fd in {self._in, self._woken, listener} - {-1}:
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(1000)}
        if self._woken in ready:
            os.read(self._woken, 4096)
            self._reap()
        if listener in ready:
            self._join()
        if self._in in ready:
            self._hear()
        self._forget()

    def _hear(self) -> None:
        data = os.read(self._in, 1 << 16)
        if not data:
            self._leaving = True
        *lines, self._left = (self._left + data).split(b"\n")
        for line in lines:
            order = msgspec.json.decode(line)
            self._answer(order["number"], partial(self._obey, order))
            self._heard = time.monotonic()

    def _obey(self, order: Order) -> Order | None:
        words: dict[str, Callable[[Order], Order | None]] = {
            "take": self._take, "start": self._start, "signal": self._signal,
            "read": _read, "descriptors": _descriptors, "admin": _admin, "limit": self._limit,
            "fill": self._fill, "free": self._free, "beat": lambda _: {}, "bye": self._bye,
        }  # fmt: skip
        return words[order["word"]](order)

    def _answer(self, number: int, do: Callable[[], Order | None]) -> None:
        """Answer with what `do` returns, or its error; not at all where that is None."""
        try:
            answer = do()
        except KVConnectError as error:
            answer = {"error": str(error), "kind": type(error).__name__}
        if answer is not None:
            self._say({"number": number, **answer})

    def _say(self, message: Order) -> None:
        data = memoryview(msgspec.json.encode(message) + b"\n")
        with contextlib.suppress(BrokenPipeError):  # nobody listens: stdin will tell
            while data:
                data = data[os.write(self._out, data) :]

    def _take(self, order: Order) -> Order:
        device = ssh_faults.interface(order["address"])
        record = Record(order["owner"], device if order["faults"] else "")
        self._lease = Lease.take(Path(order["directory"]), record)
        self._seconds = order["seconds"]
        os.chdir(self._lease.folder)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(ssh_join.SOCKET)
        self._socket.listen(16)
        folders = {"folder": str(self._lease.folder), "data": str(self._lease.data)}
        join = {"join": ssh_join.__file__, "connection": _connection()}
        return {"value": {**folders, **join, "agent": os.getpid()}}

    def _start(self, order: Order) -> None:
        self._waiting[order["number"]] = time.monotonic() + _JOIN_SECONDS, order

    def _join(self) -> None:
        """Start the process that a session came for."""
        assert self._socket is not None
        session, _ = self._socket.accept()
        session.settimeout(_HAND_SECONDS)
        try:
            data, fds = keeper.receive(session)
        except OSError:
            session.close()
            return
        try:
            theirs = session.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            order = self._waiting.pop(int(data or b"-1"), (0.0, None))[1]
            if order is None or struct.unpack("3i", theirs)[1] != os.geteuid():
                session.close()
                return
            self._answer(order["number"], partial(self._begin, order, fds, session))
        finally:
            for fd in fds:
                os.close(fd)

    def _begin(self, order: Order, fds: list[int], session: socket.socket) -> Order:
        assert self._lease is not None
        own = {MARK: str(self._lease.folder), "TMPDIR": str(self._lease.folder / "tmp")}
        full = {"argv": order["argv"], "cwd": str(self._lease.data)}
        answer = keeper.start({**full, "env": {**os.environ, **own, **order["env"]}}, fds)
        self._sessions[answer["pid"]] = session
        return answer

    def _forget(self) -> None:
        """Give up orders whose session does not come."""
        for number, (until, order) in list(self._waiting.items()):
            if time.monotonic() > until:
                del self._waiting[number]
                words = f"no session came for {order['argv'][0]} in {_JOIN_SECONDS:g} s"
                self._say({"number": number, "error": words, "kind": "UnavailableError"})

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                session = self._sessions.pop(pid, None)
                if session is not None:
                    self._say({"ended": pid, "code": os.waitstatus_to_exitcode(status)})
                    session.close()

    def _signal(self, order: Order) -> Order:
        if order["pid"] != -1:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(order["pid"], order["signal"])
        elif order["signal"] == signal.SIGKILL:
            self._end_all()
        else:
            for pid in descendants():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, order["signal"])
        return {}

    def _end_all(self) -> None:
        def alive() -> list[int]:
            self._reap()
            return descendants()

        end(alive)

    def _limit(self, order: Order) -> Order:
        assert self._lease is not None
        spared = [shaping.Spared(*one) for one in order["spared"]]
        device = self._lease.record.interface
        ssh_faults.limit(device, order["rate"], order["peers"], spared)
        return {}

    def _fill(self, order: Order) -> Order:
        assert self._lease is not None
        path, leave, most = self._filler(), int(order["leave"]), int(order["most"])
        room = os.statvfs(self._lease.data)
        want = room.f_bavail * room.f_frsize - leave + (path.stat().st_size if path.exists() else 0)
        if want > most:
            raise CapacityError(
                f"leaving {leave} B of this disk takes a file of {want} B; fill={most} B is the "
                "most that the inventory allows"
            )
        return {"value": disk.fill(path, leave)}

    def _free(self, _: Order) -> Order:
        self._filler().unlink(missing_ok=True)
        return {}

    def _filler(self) -> Path:
        assert self._lease is not None
        return self._lease.folder / "filler"

    def _bye(self, _: Order) -> Order:
        self._leaving = True
        self._undo()
        return {}

    def _undo(self) -> None:
        if self._lease is not None:
            lease, self._lease = self._lease, None
            try:
                self._end_all()
            finally:
                lease.undo()


def descendants() -> list[int]:
    """List the processes that this one started, and theirs."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (path / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            parents[int(path.name)] = int(fields[1])
    found, new = set[int](), {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return sorted(found)


def _read(order: Order) -> Order:
    try:
        data = Path(order["path"]).read_bytes()
    except OSError as error:
        raise UnavailableError(f"{order['path']} is not there: {error}") from error
    return {"value": data.decode(errors="replace")}


def _descriptors(order: Order) -> Order:
    try:
        return {"value": len(os.listdir(f"/proc/{int(order['pid'])}/fd"))}  # noqa: PTH208 - names
    except OSError as error:
        raise UnavailableError(f"process {order['pid']} has ended, or is not ours") from error


def _admin(order: Order) -> Order:
    return {"value": ssh_faults.admin(order["argv"], order["given"])}


def _connection() -> tuple[str, str, int] | None:
    """Return the runner's address, ours and our port, as it connected; None if not by IPv4."""
    found = re.fullmatch(r"([0-9.]+) \d+ ([0-9.]+) (\d+)", os.environ.get("SSH_CONNECTION", ""))
    return (found[1], found[2], int(found[3])) if found else None


def main() -> None:
    """Serve on stdin and stdout; what else wants to print goes to stderr."""
    answers = os.dup(1)
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    orders = os.dup(0)
    os.dup2(nothing, 0)
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    sys.stdout = sys.stderr
    Agent(orders, answers).serve()


if __name__ == "__main__":
    main()
