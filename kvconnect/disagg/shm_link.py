"""How memory changes hands between processes: a Unix socket, a token, descriptors.

The socket's name is the listener's generation (in the abstract namespace: nothing to clean up
after a kill). Whoever connects must run as the same user and send the token; it gets the memfds
and a link whose end means that the other process has closed or died.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence

from kvconnect.backend import Closing
from kvconnect.errors import UnavailableError

TOKEN_BYTES = 32
_HELLO_SECONDS = 2.0
_MAX_FDS = 200
_GO = b"kvconnect-shm-1"


def _name(generation: str) -> bytes:
    return b"\0kvconnect-shm-" + generation.encode()


class Mapped:
    """All of a memfd, mapped; unmapped when the last user of `keep` is gone."""

    def __init__(self, fd: int) -> None:
        """Map it; the descriptor stays the caller's."""
        self.nbytes = os.fstat(fd).st_size
        self.keep = mmap.mmap(fd, self.nbytes)
        self._anchor = ctypes.c_char.from_buffer(self.keep)
        self.address = ctypes.addressof(self._anchor)


class Link(Closing):
    """A connection to another process; `fds` are the descriptors it handed over."""

    def __init__(self, sock: socket.socket, fds: Sequence[int]) -> None:
        """Take over the socket and the descriptors."""
        sock.settimeout(0)
        self._sock = sock
        self.fds = list(fds)
        self._lock = threading.Lock()
        self._gone = False

    def alive(self) -> bool:
        """Tell, without blocking, whether the other end still holds the connection."""
        with self._lock:
            if self._gone:
                return False
            try:
                # Nothing is ever sent after the hand-over: readable means the end.
                self._gone = bool(self._sock.recv(1, socket.MSG_PEEK) == b"")
            except BlockingIOError:
                return True
            except OSError:
                self._gone = True
            return not self._gone

    def close(self) -> None:
        """Let the other side see that this one is gone; the second call does nothing."""
        with self._lock:
            self._gone = True
            for fd in self.fds:
                os.close(fd)
            self.fds = []
            self._sock.close()


def dial(generation: str, token: bytes, timeout: float) -> Link:
    """Connect to a listener; `UnavailableError` if it is not there, refuses, or takes too long."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    until = time.monotonic() + timeout
    try:
        sock.settimeout(timeout)
        sock.connect(_name(generation))
        sock.sendall(token)
        sock.settimeout(max(until - time.monotonic(), 0.001))
        said, fds, _, _ = socket.recv_fds(sock, len(_GO), _MAX_FDS)
    except OSError as error:
        sock.close()
        raise UnavailableError(
            f"shm: no peer of generation {generation} on this host: {error or 'timed out'}"
        ) from None
    link = Link(sock, fds)
    if said != _GO:
        link.close()
        raise UnavailableError("shm: the peer refused the connection (other user or token)")
    return link


class Listener(Closing):
    """Hands descriptors to whoever may have them, and watches who has them."""

    def __init__(self, generation: str, token: bytes, fds: Sequence[int]) -> None:
        """Listen at once; the descriptors stay the caller's."""
        self._token = token
        self._fds = list(fds)
        self._links: list[Link] = []
        self._lock = threading.Lock()
        self.closed = False
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._sock.bind(_name(generation))
            self._sock.listen(64)
        except BaseException:
            self._sock.close()
            raise
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="kvconnect-shm", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            ready, _, _ = select.select([self._sock.fileno(), self._wake], [], [])
            if self._wake in ready:
                return
            with contextlib.suppress(OSError):
                connection, _ = self._sock.accept()
                self._hand_over(connection)

    def _hand_over(self, connection: socket.socket) -> None:
        connection.settimeout(_HELLO_SECONDS)
        try:
            kind = struct.Struct("3i")
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, kind.size)
            if kind.unpack(raw)[1] != os.geteuid() or not secrets.compare_digest(
                _exactly(connection, TOKEN_BYTES), self._token
            ):
                connection.close()
                return
            socket.send_fds(connection, [_GO], self._fds)
        except OSError:
            connection.close()
            return
        with self._lock:
            for link in [link for link in self._links if not link.alive()]:
                link.close()
                self._links.remove(link)
            self._links.append(Link(connection, ()))

    def offer(self, fd: int) -> None:
        """Hand one more descriptor to whoever connects from now on."""
        self._fds.append(fd)

    def attached(self) -> int:
        """Return how many other processes can still touch the memory."""
        with self._lock:
            return sum(link.alive() for link in self._links)

    def close(self) -> None:
        """Stop listening and cut all links; the second call does nothing."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            links, self._links = self._links, []
        os.write(self._woken, b"x")
        self._thread.join(_HELLO_SECONDS + 1)
        for link in links:
            link.close()
        self._sock.close()
        os.close(self._wake)
        os.close(self._woken)


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    out = b""
    while len(out) < nbytes:
        more = connection.recv(nbytes - len(out))
        if not more:
            raise OSError("the connection ended")
        out += more
    return out
