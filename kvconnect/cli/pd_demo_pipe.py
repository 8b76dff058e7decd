"""A rank of the P/D demo and the process that started it: JSON lines over stdin and stdout.

The end of stdin means that the parent is gone, however it ended; the rank then ends at once.
So no rank is left behind.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from typing import TypeVar

import msgspec

from kvconnect.cli.pd_demo_job import Event, Order
from kvconnect.errors import TransferTimeoutError

T = TypeVar("T")

_STDIN, _STDOUT = 0, 1


class Pipe:
    """The rank's end."""

    def __init__(self, until: float) -> None:
        """Read orders in a thread; no wait goes on after `until` (monotonic seconds)."""
        self.until = until
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def _read(self) -> None:
        # Not by sys.stdin and sys.stdout: they are the parent's, forked.
        decoder, left = msgspec.json.Decoder(Order), b""
        while data := os.read(_STDIN, 1 << 16):
            *lines, left = (left + data).split(b"\n")
            for line in lines:
                self._orders.put(decoder.decode(line))
        # Not sys.exit: threads of a library must not keep an orphan alive.
        os._exit(3)

    def say(self, event: Event) -> None:
        """Tell the parent."""
        with self._lock:
            data = memoryview(msgspec.json.encode(event) + b"\n")
            while data:
                data = data[os.write(_STDOUT, data) :]

    def hear(self, kind: type[T]) -> T:
        """Wait for the next order, which must be of this kind."""
        try:
            order = self._orders.get(timeout=max(self.until - time.monotonic(), 0))
        except queue.Empty:
            raise TransferTimeoutError(f"no {kind.__name__} came in time") from None
        if not isinstance(order, kind):
            raise TypeError(f"{order!r} came instead of {kind.__name__}")
        return order
