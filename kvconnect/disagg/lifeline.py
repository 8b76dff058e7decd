"""Lifelines: how ranks on different hosts learn that the other has ended, or runs again.

A transport over a network cannot tell a peer that is slow from one that is stopped or dead, and
a new process may come to listen where the old one did. So each rank also listens on a port of
its own; who knows the token holds a connection for as long as it holds the peer. The kernel ends
that connection when the process ends, whatever the transport believes, and only the process that
was connected can answer on it.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field

from kvconnect.backend import Closing
from kvconnect.errors import UnavailableError

TOKEN_BYTES = 32
GENERATION_BYTES = 16
MAX_CONNECTIONS = 4096
PING_SECONDS = 0.2
PROMPT_SECONDS = 1.0
"""A process that answers later than this may have been stopped in between."""
_HELLO_SECONDS = 2.0
_LOOK_SECONDS = 0.5


@dataclass(slots=True)
class _Caller:
    """A connection: what has come in so far, and until when it must have shown the token."""

    until: float
    heard: bytes = b""
    known: bool = False


class LifeServer(Closing):
    """This rank's end: answers those that know the token, in one thread."""

    def __init__(self, host: str, generation: str, token: bytes) -> None:
        """Listen on a free port of `host`; `UnavailableError` where that cannot be."""
        self._generation, self._token = bytes.fromhex(generation), token
        self._callers: dict[socket.socket, _Caller] = {}
        try:
            self._sock = socket.create_server((host, 0), backlog=128)
        except OSError as error:
            raise UnavailableError(
                f"cannot listen on {host}: {error}; give an address of this host with host="
            ) from error
        self._sock.setblocking(False)  # noqa: FBT003 - the socket's own signature
        self.port = int(self._sock.getsockname()[1])
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for sock in (self._sock, self._wake):
            self._selector.register(sock, selectors.EVENT_READ)
        self.closed = False
        self._thread = threading.Thread(target=self._serve, name="kvconnect-life", daemon=True)
        self._thread.start()

    def attached(self) -> int:
        """Return how many peers hold on to this rank."""
        return sum(caller.known for caller in list(self._callers.values()))

    def _serve(self) -> None:
        try:
            self._listen()
        finally:
            # Here, not in `close`: a thread that was kept from running for a while would find
            # what it waits on closed under it.
            for sock in [*self._callers, self._sock, self._wake]:
                sock.close()
            self._callers = {}
            self._selector.close()

    def _listen(self) -> None:
        while True:
            for key, _ in self._selector.select(_LOOK_SECONDS):
                sock = key.fileobj
                if sock is self._wake:
                    return
                if sock is self._sock:
                    self._accept()
                elif isinstance(sock, socket.socket):
                    self._hear(sock)
            now = time.monotonic()
            for sock, caller in list(self._callers.items()):
                if not caller.known and now > caller.until:
                    self._drop(sock)

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except OSError:
            return
        if len(self._callers) >= MAX_CONNECTIONS:
            sock.close()
            return
        sock.setblocking(False)  # noqa: FBT003 - the socket's own signature
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._callers[sock] = _Caller(time.monotonic() + _HELLO_SECONDS)
        self._selector.register(sock, selectors.EVENT_READ)

    def _hear(self, sock: socket.socket) -> None:
        caller = self._callers[sock]
        try:
            stays = self._answer(sock, caller)
        except BlockingIOError:
            return
        except OSError:
            stays = False
        if not stays:
            self._drop(sock)

    def _answer(self, sock: socket.socket, caller: _Caller) -> bool:
        """Answer what has come in; False where the caller has ended or has a wrong token."""
        said = sock.recv(TOKEN_BYTES)
        if caller.known:
            # An answer that does not fit in the socket is one that nobody waits for.
            sock.send(said)
        else:
            caller.heard += said
            if len(caller.heard) >= TOKEN_BYTES:
                caller.known = secrets.compare_digest(caller.heard, self._token)
                sock.send(self._generation if caller.known else b"")
                return caller.known and bool(said)
        return bool(said)

    def _drop(self, sock: socket.socket) -> None:
        del self._callers[sock]
        self._selector.unregister(sock)
        sock.close()

    def close(self) -> None:
        """Let all peers see that this rank is gone; the second call does nothing."""
        if self.closed:
            return
        self.closed = True
        self._woken.send(b"x")
        self._thread.join(_HELLO_SECONDS)
        self._woken.close()


@dataclass(eq=False)
class Lifeline(Closing):
    """The other end: held by whoever is connected to a rank. See `dial`."""

    _sock: socket.socket
    _gone: bool = False
    _sent: float | None = None
    _last: float = 0.0
    _steady: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def alive(self) -> bool:
        """Tell, without blocking, whether the process at the other end still is.

        One that is stopped, or behind a network that is cut, is alive: it may go on.
        """
        with self._lock:
            self._look(time.monotonic())
            return not self._gone

    def steady(self, since: float) -> float:
        """Return seconds, counted from `since` (monotonic), in which it has run without a gap.

        Asks for a sign of life; call it several times a second. 0 where it did not answer.
        """
        with self._lock:
            self._look(time.monotonic())
            if self._steady is None or self._gone:
                return 0.0
            return max(self._last - max(self._steady, since), 0.0)

    def _look(self, now: float) -> None:
        if self._gone:
            return
        try:
            self._read(now)
            if self._sent is not None and now - self._sent > PROMPT_SECONDS:
                self._steady = None
            if self._sent is None and now - self._last >= PING_SECONDS:
                self._sock.send(b"?")
                self._sent = now
        except BlockingIOError:
            return
        except OSError:
            self._gone = True

    def _read(self, now: float) -> None:
        try:
            heard = self._sock.recv(64)
        except BlockingIOError:
            return
        if not heard:
            raise OSError("the end")
        if self._sent is None:
            return
        if now - self._sent > PROMPT_SECONDS:
            self._steady = None
        elif self._steady is None:
            self._steady = self._sent
        self._last, self._sent = self._sent, None

    def close(self) -> None:
        """Let go; `alive` is false from here on."""
        with self._lock:
            self._gone = True
            self._sock.close()


def dial(host: str, port: int, generation: str, token: bytes, timeout: float) -> Lifeline:
    """Connect to the rank of `generation`; `UnavailableError` if it is not there (any more)."""
    until = time.monotonic() + timeout
    try:
        sock = socket.create_connection((host, port), timeout=max(timeout, 0.001))
    except OSError as error:
        raise _missing(host, port, generation, error) from error
    try:
        sock.sendall(token)
        answer = _answer_within(sock, until)
        sock.setblocking(False)  # noqa: FBT003 - the socket's own signature
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        sock.close()
        raise _missing(host, port, generation, error) from error
    if answer.hex() != generation:
        sock.close()
        found = f"generation {answer.hex()} is there now" if answer else "refused"
        raise _missing(host, port, generation, found)
    return Lifeline(sock)


def _answer_within(sock: socket.socket, until: float) -> bytes:
    """Return the generation at the other end; empty where it hangs up."""
    answer = b""
    while len(answer) < GENERATION_BYTES:
        sock.settimeout(max(until - time.monotonic(), 0.001))
        more = sock.recv(GENERATION_BYTES - len(answer))
        if not more:
            return b""
        answer += more
    return answer


def _missing(host: str, port: int, generation: str, error: object) -> UnavailableError:
    return UnavailableError(f"no peer of generation {generation} at {host}:{port}: {error}")
