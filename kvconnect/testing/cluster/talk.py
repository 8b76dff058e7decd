"""Orders to a helper on a host, its answers, and the ends of processes that it tells of unasked.

The same for a host on this machine (`control`) and one over ssh (`ssh_link`); what differs is
how a message travels.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvconnect.errors import ConfigError, TransferTimeoutError, UnavailableError
from kvconnect.testing.cluster import keeper

SECONDS = 30.0
"""How long an answer may take."""


class Message(msgspec.Struct):
    """What a helper says: the answer to an order, or that a process has ended."""

    number: int = -1
    pid: int = 0
    error: str = ""
    kind: str = ""  # the class of the error
    value: Any = None
    ended: int = 0
    code: int = 0


class End:
    """When a process has ended, its code."""

    def __init__(self) -> None:
        self.known, self.code = threading.Event(), -int(signal.SIGKILL)


class Talk:
    """The runner's end. Any thread may ask; orders are carried out one after the other.

    `send` takes a message and descriptors to go with it, `receive` returns one message and
    nothing at the end; both may raise `OSError`. Once the helper is gone, so are its processes.
    `number` is that of the last order.
    """

    def __init__(
        self,
        name: str,
        send: Callable[[bytes, Sequence[int]], None],
        receive: Callable[[], bytes],
    ) -> None:
        """Begin to listen."""
        self._name, self._send, self._receive = name, send, receive
        self._lock, self.number = threading.Lock(), 0
        self._answers: queue.SimpleQueue[tuple[Message, End] | None] = queue.SimpleQueue()
        self._ends: dict[int, End] = {}  # of the reader's alone
        self._reader = threading.Thread(target=self._listen, name=f"{name} talk", daemon=True)
        self._reader.start()

    def _listen(self) -> None:
        decoder = msgspec.json.Decoder(Message)
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            while data := self._receive():
                message = decoder.decode(data)
                if message.ended:
                    self._ended(message.ended, message.code)
                    continue
                end = End()
                if message.pid:
                    self._ends[message.pid] = end
                self._answers.put((message, end))
        self._answers.put(None)
        for pid in list(self._ends):
            self._ended(pid, -int(signal.SIGKILL))

    def _ended(self, pid: int, code: int) -> None:
        end = self._ends.pop(pid, None)
        if end is not None:
            end.code = code
            end.known.set()

    def answer(self, number: int, timeout: float = SECONDS) -> tuple[Message, End]:
        """Wait for the answer to an order; the end is that of the process in it.

        Raises `TransferTimeoutError` after `timeout` seconds, `UnavailableError` where the
        helper is gone.
        """
        while True:
            try:
                answer = self._answers.get(timeout=timeout)
            except queue.Empty:
                raise TransferTimeoutError(
                    f"{self._name} does not answer for {timeout:g} s"
                ) from None
            if answer is None:
                self._answers.put(None)
                raise UnavailableError(f"{self._name} is down")
            if answer[0].number == number:
                return answer

    def ask(
        self,
        order: Mapping[str, object],
        fds: Sequence[int] = (),
        then: Callable[[], object] = lambda: None,
    ) -> tuple[Message, End]:
        """Send an order, do what comes `then`, and return the answer."""
        with self._lock:
            self.number += 1
            data = msgspec.json.encode({"number": self.number, **order})
            if len(data) > keeper.LIMIT:
                raise ConfigError(
                    f"arguments and environment of {len(data)} B are over {keeper.LIMIT} B"
                )
            try:
                self._send(data, fds)
            except OSError as error:
                raise UnavailableError(f"{self._name} is down: {error}") from error
            then()
            return self.answer(self.number)

    def join(self) -> None:
        """Wait until nothing more can come, once the way is closed."""
        self._reader.join(SECONDS)
