"""The directory as an HTTP service: two POST requests of JSON, bounded in every direction.

Bodies, headers, connections and the time of each have limits, so that no client can keep others
from being served for longer than `REQUEST_SECONDS`.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import socket
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Any

import msgspec

from kvconnect.backend import Closing
from kvconnect.disagg.bootstrap.table import Entry, Question, Table
from kvconnect.errors import CapacityError, ConfigError

log = logging.getLogger("kvconnect.disagg")

MAX_BODY = 16 << 10
MAX_HEAD = 16 << 10
MAX_CONNECTIONS = 64
REQUEST_SECONDS = 5.0
"""From the connection to the answer; then it is cut."""
_POLL_SECONDS = 0.1


class DirectoryServer(Closing):
    """Serves a directory in the background; `url` says where."""

    def __init__(
        self, address: str = "127.0.0.1:0", *, token: str | None = None, ttl: float = 30.0
    ) -> None:
        """Listen on HOST:PORT (0: a free one).

        Raises `ConfigError` where the address cannot be, or is not loopback and there is no
        token.
        """
        host, port = split_address(address)
        if token is None and not _loopback(host):
            raise ConfigError(
                f"bootstrap address {address!r} is not loopback: it needs a token "
                f"(--token-file, 16 characters or more, the same on all ranks)"
            )
        if not ttl > 0:
            raise ConfigError(f"ttl={ttl!r} must be above 0 seconds")
        self.table = Table(ttl, time.monotonic)
        try:
            self._server = _Server(host, port, self.table, token)
        except OSError as error:
            raise ConfigError(f"bootstrap address {address!r}: {error}") from None
        bound = self._server.server_address[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{bound}"
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_POLL_SECONDS,),
            name="kvconnect-bootstrap",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Stop, and cut the connections; the second call does nothing."""
        self._server.shutdown()
        self._thread.join(REQUEST_SECONDS)
        self._server.server_close()
        self._server.cut_all()


def split_address(address: str) -> tuple[str, int]:
    """Split HOST:PORT; `ConfigError` if it is none."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"address {address!r}: write HOST:PORT")
    return host, int(port)


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Server(TCPServer):
    """One thread per connection, at most `MAX_CONNECTIONS`, each for `REQUEST_SECONDS`."""

    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, table: Table, token: str | None) -> None:
        self.table, self.token = table, token
        self._open: dict[socket.socket, tuple[float, threading.Thread]] = {}
        self._lock = threading.Lock()
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.address_family = family
        super().__init__((str(where[0]), port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, or drop it where there are too many."""
        until = time.monotonic() + REQUEST_SECONDS
        thread = threading.Thread(
            target=self._serve, args=(request, client_address), name="kvconnect-bootstrap-client",
            daemon=True,
        )  # fmt: skip
        with self._lock:
            full = len(self._open) >= MAX_CONNECTIONS
            if not full:
                thread.start()
                self._open[request] = until, thread
        if full:
            self.shutdown_request(request)

    def _serve(self, request: socket.socket, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError as error:
            log.debug("kvconnect: bootstrap client %s: %s", client_address, error)
        except Exception:
            log.exception("kvconnect: bootstrap client %s", client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)
            self.shutdown_request(request)

    def service_actions(self) -> None:
        """Cut connections whose time is up; called between accepts.

        A socket's own time-out would start anew with every byte that a slow client sends.
        """
        now = time.monotonic()
        with self._lock:
            late = [request for request, (until, _) in self._open.items() if now > until]
        for request in late:
            _cut(request)

    def cut_all(self) -> None:
        """Cut every connection and wait for their threads."""
        with self._lock:
            left = list(self._open.items())
        for request, _ in left:
            _cut(request)
        for _, (_, thread) in left:
            thread.join(1.0)


def _cut(request: socket.socket) -> None:
    try:
        request.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended by itself


class _Bounded:
    """A file that ends after `left` bytes."""

    def __init__(self, file: Any, left: int) -> None:
        self._file, self._left = file, left

    def readline(self, size: int) -> bytes:
        return self._count(self._file.readline(min(size, self._left)))

    def read(self, size: int) -> bytes:
        return self._count(self._file.read(min(size, self._left)))

    def _count(self, data: bytes) -> bytes:
        self._left -= len(data)
        return data

    def close(self) -> None:
        self._file.close()


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "kvconnect", ""
    timeout = REQUEST_SECONDS

    def setup(self) -> None:
        """Let in no more than the largest request that can be right."""
        super().setup()
        self.rfile = _Bounded(self.rfile, MAX_HEAD + MAX_BODY)  # type: ignore[assignment]

    def do_POST(self) -> None:
        """Answer /register and /find."""
        if not self._allowed():
            self._say(HTTPStatus.UNAUTHORIZED, {"error": "the token is missing or wrong"})
            return
        try:
            body = self._body()
            if body is None:
                return
            if self.path == "/register":
                self._say(HTTPStatus.OK, self._register(body))
            elif self.path == "/find":
                question = msgspec.json.decode(body, type=Question)
                self._say(HTTPStatus.OK, self.server.table.find(question.fleet))
            else:
                self._say(HTTPStatus.NOT_FOUND, {"error": "post to /register or /find"})
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._say(HTTPStatus.BAD_REQUEST, {"error": f"the request cannot be read: {error}"})
        except ConfigError as error:
            self._say(HTTPStatus.CONFLICT, {"error": str(error)})
        except CapacityError as error:
            self._say(HTTPStatus.INSUFFICIENT_STORAGE, {"error": str(error)})

    def _register(self, body: bytes) -> Any:
        return self.server.table.register(msgspec.json.decode(body, type=Entry))

    def _allowed(self) -> bool:
        if self.server.token is None:
            return True
        # Over bytes, in a time that does not tell how much of a guess was right.
        said = self.headers.get("Authorization", "").encode("utf-8", "replace")
        return secrets.compare_digest(said, f"Bearer {self.server.token}".encode())

    def _body(self) -> bytes | None:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or len(length) > 12:
            self._say(HTTPStatus.LENGTH_REQUIRED, {"error": "Content-Length is missing"})
            return None
        if int(length) > MAX_BODY:
            words = f"the body has {int(length)} B; {MAX_BODY} B are taken"
            self._say(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": words})
            return None
        body = self.rfile.read(int(length))
        return body if len(body) == int(length) else None

    def _say(self, status: HTTPStatus, value: Any) -> None:
        data = msgspec.json.encode(value)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, ARG002 - the base class's
        """Log requests at debug level, without what clients put into them."""
        log.debug("kvconnect: bootstrap %s", self.client_address)
