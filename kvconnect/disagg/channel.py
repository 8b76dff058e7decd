"""The control channel: one thread per endpoint that owns its ZeroMQ sockets.

Everything that arrives is decoded and checked here; what cannot be read is counted and dropped.
ZeroMQ sockets belong to one thread, so other threads `post` work to it. Nothing in the thread
blocks: a peer that does not take its messages loses them, and is noticed by its silence.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any

from kvconnect.backend import Closing
from kvconnect.disagg.keys import Keys, check_address
from kvconnect.disagg.messages import MAX_FRAME_BYTES, Envelope, decode, encode
from kvconnect.errors import ClosedError, ConfigError, UnavailableError

log = logging.getLogger("kvconnect.disagg")

TICK_SECONDS = 0.02
CALL_SECONDS = 10.0
_LINGER_MS = 500
"""How long a close waits for the last words to leave; a peer that does not take them loses them."""
_HIGH_WATER = 10_000
"""Messages that wait for a peer before more to it are dropped."""

_DOMAIN = "kvconnect"

Handler = Callable[[str, Envelope], None]
"""Called in the channel's thread with the route (where to answer) and the envelope."""


def zmq_module() -> Any:
    """Import ZeroMQ; `UnavailableError` names the package."""
    try:
        import zmq  # noqa: PLC0415
    except ImportError as error:
        raise UnavailableError(
            f"the control channel needs pyzmq ({error}); pip install kvconnect[disagg]"
        ) from None
    return zmq


class Channel(Closing):
    """Sockets, their thread, and what it calls: `on_message` per message, `on_tick` in between."""

    def __init__(self, keys: Keys | None, on_message: Handler, on_tick: Callable[[], None]) -> None:
        """Start the thread; `listen` and `dial` add sockets."""
        self._zmq = zmq_module()
        self._keys, self._on_message, self._on_tick = keys, on_message, on_tick
        self.counts: Counter[str] = Counter()
        self._context = self._zmq.Context()
        self._authenticator = self._authenticate()
        self._server: Any = None
        self._clients: dict[str, Any] = {}
        self._work: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvconnect-control", daemon=True)
        self._thread.start()

    def _authenticate(self) -> Any:
        if self._keys is None:
            return None
        from zmq.auth.thread import ThreadAuthenticator  # noqa: PLC0415

        authenticator = ThreadAuthenticator(self._context)
        authenticator.start()
        authenticator.configure_curve_callback(_DOMAIN, _OnlyOurs(self._keys.public))
        return authenticator

    def _socket(self, kind: int) -> Any:
        socket = self._context.socket(kind)
        for name, value in (
            ("LINGER", 0),
            ("MAXMSGSIZE", MAX_FRAME_BYTES),
            ("SNDHWM", _HIGH_WATER),
            ("RCVHWM", _HIGH_WATER),
        ):
            socket.setsockopt(getattr(self._zmq, name), value)
        if self._keys is not None:
            socket.curve_publickey = self._keys.public.encode()
            socket.curve_secretkey = self._keys.secret.encode()
        return socket

    def listen(self, address: str) -> str:
        """Bind; return the address in use (port ``*`` is chosen). `ConfigError` if it cannot be."""
        check_address(address, self._keys)

        def bind() -> str:
            socket = self._socket(self._zmq.ROUTER)
            socket.setsockopt(self._zmq.ROUTER_MANDATORY, 1)
            # A rank whose connection broke unnoticed may come back by a new one at once.
            socket.setsockopt(self._zmq.ROUTER_HANDOVER, 1)
            if self._keys is not None:
                socket.curve_server = True
                socket.zap_domain = _DOMAIN.encode()
            try:
                socket.bind(address)
            except self._zmq.ZMQError as error:
                socket.close(0)
                raise ConfigError(f"control address {address!r}: {error}") from None
            self._server = socket
            return str(socket.last_endpoint.decode())

        return str(self.call(bind))

    def dial(self, address: str, name: bytes) -> str:
        """Open a connection as `name`; returns the route to use. It connects in the background."""
        check_address(address, self._keys)

        def connect() -> str:
            if address not in self._clients:
                # A name that begins with a zero byte is ZeroMQ's own. Two addresses may lead to
                # one rank, which must not take one connection for the other come back.
                self._connect(address, b"k" + name + secrets.token_bytes(4))
            return address

        return str(self.call(connect))

    def _connect(self, address: str, name: bytes) -> None:
        socket = self._socket(self._zmq.DEALER)
        socket.setsockopt(self._zmq.IDENTITY, name)
        if self._keys is not None:
            socket.curve_serverkey = self._keys.public.encode()
        socket.connect(address)
        self._clients[address] = socket

    def redial(self, route: str) -> None:
        """Channel thread: open a connection anew, by the same name, if `dial` opened it.

        ZeroMQ comes back by itself, but not to a peer that sent what it cannot take.
        """
        socket = self._clients.get(route)
        if socket is not None:
            name = socket.getsockopt(self._zmq.IDENTITY)
            socket.close(0)
            self._connect(route, name)

    def hang_up(self, route: str) -> None:
        """Channel thread: drop a connection that `dial` opened."""
        socket = self._clients.pop(route, None)
        if socket is not None:
            socket.close(0)

    def send(self, route: str, envelope: Envelope) -> None:
        """Send from the channel's thread; what a peer does not take is dropped and counted."""
        frame = encode(envelope)
        client = self._clients.get(route)
        try:
            if client is not None:
                client.send(frame, self._zmq.DONTWAIT)
            elif self._server is not None:
                self._server.send_multipart([bytes.fromhex(route), frame], self._zmq.DONTWAIT)
        except self._zmq.ZMQError as error:
            self.counts["unsent"] += 1
            log.debug("kvconnect: control message to %s not sent: %s", route, error)

    def post(self, work: Callable[[], None]) -> None:
        """Have the channel's thread call `work` soon; `ClosedError` after `close`."""
        with self._lock:
            if self._closed:
                raise ClosedError("the control channel is closed")
            self._work.append(work)
            os.eventfd_write(self._wake, 1)

    def call(self, work: Callable[[], Any], timeout: float = CALL_SECONDS) -> Any:
        """Run `work` in the channel's thread and return what it returned, or raise what it raised.

        `UnavailableError` where the thread is not free in time: then `work` is never run.
        """
        done, box = threading.Event(), list[tuple[bool, Any]]()
        turn = threading.Lock()

        def run() -> None:
            # Whoever has the turn decides: the thread runs it, or the caller has given up.
            if not turn.acquire(blocking=False):
                return
            try:
                box.append((True, work()))
            except Exception as error:  # noqa: BLE001 - raised again where it was asked
                box.append((False, error))
            done.set()

        self.post(run)
        if not done.wait(timeout) and turn.acquire(blocking=False):
            raise UnavailableError(
                f"the control channel's thread was not free within {timeout:g} s"
            )
        if not done.wait(timeout):
            raise UnavailableError(
                f"the control channel's thread hangs for {timeout:g} s in a call"
            )
        good, value = box[0]
        if not good:
            raise value
        return value

    def _run(self) -> None:
        next_tick = 0.0
        while True:
            self._wait(next_tick)
            with self._lock:
                work, self._work = self._work, deque()
                closed = self._closed
            for job in work:
                self._guarded(job)
            if closed:
                break
            for socket, route in [(s, r) for r, s in self._clients.items()]:
                self._drain(socket, route)
            if self._server is not None:
                self._drain(self._server, None)
            if time.monotonic() >= next_tick:
                self._guarded(self._on_tick)
                next_tick = time.monotonic() + TICK_SECONDS
        for socket in [self._server, *self._clients.values()]:
            if socket is not None:
                socket.close(_LINGER_MS)

    def _wait(self, next_tick: float) -> None:
        poller = self._zmq.Poller()
        poller.register(self._wake, self._zmq.POLLIN)
        for socket in [self._server, *self._clients.values()]:
            if socket is not None:
                poller.register(socket, self._zmq.POLLIN)
        poller.poll(max(next_tick - time.monotonic(), 0) * 1e3)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _drain(self, socket: Any, route: str | None) -> None:
        # Bounded: a flood from one peer must not keep the others from being heard.
        for _ in range(200):
            try:
                parts = socket.recv_multipart(self._zmq.DONTWAIT)
            except self._zmq.ZMQError:
                return
            self._guarded(partial(self._receive, parts, route))

    def _receive(self, parts: list[bytes], route: str | None) -> None:
        if route is None:
            if len(parts) != 2:
                self.counts["garbage"] += 1
                return
            route = parts[0].hex()
        elif len(parts) != 1:
            self.counts["garbage"] += 1
            return
        try:
            envelope = decode(parts[-1])
        except ConfigError as error:
            self.counts["garbage"] += 1
            log.debug("kvconnect: dropped a control message from %s: %s", route, error)
            return
        self.counts["received"] += 1
        self._on_message(route, envelope)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            # One bad request must not end the thread that serves all others.
            self.counts["errors"] += 1
            log.exception("kvconnect: control channel")

    def close(self) -> None:
        """Stop the thread and close the sockets; the second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._wake, 1)
        self._thread.join(CALL_SECONDS)
        if self._thread.is_alive():
            # Its sockets are open, so ending the context would wait for them without end.
            raise UnavailableError(f"the control channel's thread hangs for {CALL_SECONDS:g} s")
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        os.close(self._wake)


class _OnlyOurs:
    """Lets in the one public key of the fleet."""

    def __init__(self, public: str) -> None:
        self._public = public.encode()

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 - ZeroMQ's signature
        """Tell whether a client's key (Z85) is the fleet's."""
        return bool(key == self._public)
