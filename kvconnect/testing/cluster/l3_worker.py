"""A rank on a store as a process of a cluster test.

`python -m kvconnect.testing.cluster.l3_worker` reads its configuration and commands from stdin
and writes events to stdout, one JSON line each (`l3_messages`, `events`). A store that cannot be
opened is tried again until it can, each try an event. Then it does what it is told, or calls by
itself: every rank of a group draws the same pages in the same order, from the seed. Every call
ends in exactly one `Call`.

One thread makes all calls. Another reads stdin and answers what must be answered while a call
hangs: what the process holds, its settings, and to end.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from kvconnect.errors import BackendError, KVConnectError
from kvconnect.testing.cluster import l3_messages as words
from kvconnect.testing.cluster.events import Call, Command, Lines, Said
from kvconnect.testing.cluster.l3_calls import Calls, reason
from kvconnect.testing.cluster.l3_messages import WorkerConfig
from kvconnect.testing.cluster.voice import Voice, state

log = logging.getLogger("kvconnect.testing.cluster")

_REOPEN_SECONDS = 0.5
_LEAST_PAUSE_SECONDS = 0.02
_EXISTS_SHARE = 0.125
"""How many of the reads only ask."""


def draw(config: WorkerConfig, batch: int, step: int) -> tuple[str, list[int]]:
    """Return what call number `step` of the load is and its pages, the same for a whole group."""
    # No secret: that all ranks draw the same is what the seed is for.
    dice = random.Random(f"{config.seed} {config.group} {step}")  # noqa: S311
    pages = range(config.first, config.first + config.universe)
    ids = dice.sample(pages, min(batch, len(pages)))
    if dice.choice(config.roles) == "write":
        return "store", ids
    return ("exists" if dice.random() < _EXISTS_SHARE else "load"), ids


class L3Worker:
    """One rank: its calls, made by the thread that runs `serve`."""

    def __init__(self, config: WorkerConfig, voice: Voice) -> None:
        """Begin to listen; nothing is opened yet."""
        self.config, self._say = config, voice.say
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._calls: Calls | None = None
        self._quit, self._left = threading.Event(), threading.Event()
        self._quit_number: int | None = None
        self._batch, self._pause = config.batch, config.pause
        self._loading, self._step, self._next = False, 0, 0.0
        threading.Thread(target=self._read, name="stdin", daemon=True).start()

    def serve(self) -> bool:
        """Do what is asked until `quit`, or until stdin ends; False if it could not be closed."""
        calls = self._open()
        if calls is None:
            return self._end("")
        self._calls = calls
        log.info("%s", calls.plan)
        ready = msgspec.json.encode({"ready": self.config.name})
        self._say(Said(number=0, value=msgspec.Raw(ready)))
        while not self._quit.is_set():
            self._turn(calls)
        try:
            calls.close()
        except BackendError as error:
            return self._end(_told(error))
        return self._end("")

    def _end(self, error: str) -> bool:
        if self._quit_number is not None:
            self._say(Said(number=self._quit_number, error=error))
        self._left.set()
        return not error

    def _open(self) -> Calls | None:
        """Open the store, trying until it works; None if told to end before.

        Raises what is no fault of the store's, once that is said.
        """
        number = 0
        while not self._quit.is_set():
            started = time.monotonic()
            try:
                calls = Calls(self.config)
            except Exception as error:
                word = reason(error)
                log.info("opening failed: %s", error)
                self._say_opening(number, started, {word: 1}, "" if word else _told(error))
                if not word:
                    raise
            else:
                self._say_opening(number, started, {}, "")
                calls.number = number + 1
                return calls
            number += 1
            self._quit.wait(_REOPEN_SECONDS)
        return None

    def _say_opening(self, number: int, started: float, misses: dict[str, int], error: str) -> None:
        call = Call(
            op="open",
            worker=self.config.name,
            number=number,
            started=started,
            seconds=time.monotonic() - started,
            deadline=self.config.opening,
            asked=0,
            misses={} if error else misses,
            error=error,
        )
        self._say(call)

    def _turn(self, calls: Calls) -> None:
        """Do what is asked next, or the next call of the load once its time has come."""
        rest = max(self._next - time.monotonic(), 0.0) if self._loading else None
        try:
            work = self._inbox.get(timeout=rest)
        except queue.Empty:
            op, ids = draw(self.config, self._batch, self._step)
            self._step += 1
            self._make(calls, op, ids)
            self._next = time.monotonic() + max(self._pause, _LEAST_PAUSE_SECONDS)
        else:
            work()

    def _make(self, calls: Calls, op: str, ids: Sequence[int]) -> None:
        make = {"store": calls.store, "load": calls.load, "exists": calls.exists}[op]
        self._say(make(ids))

    def _read(self) -> None:
        """Read commands until told to end; then see to it that the process does."""
        for line in sys.stdin:
            self._hear(Lines.command(line))
            if self._quit.is_set():
                break
        self._quit.set()
        self._inbox.put(lambda: None)
        limit = self.config.deadline + self.config.grace + self.config.leaving
        if not self._left.wait(limit):
            error = f"TransferTimeoutError: a call or closing still goes on after {limit:g} s"
            self._end(error)
            os._exit(3)

    def _hear(self, command: Command) -> None:
        """Answer at once, or leave it to the thread that makes the calls."""
        try:
            order = words.order_of(command)
        except KVConnectError as error:
            self._say(Said(number=command.number, error=_told(error)))
            return
        if isinstance(order, words.Quit):
            self._quit_number = command.number
            self._quit.set()
        elif isinstance(order, (words.Counts, words.Settings)):
            self._answer(order)
            self._say(Said(number=command.number))
        else:
            self._inbox.put(partial(self._obey, command.number, order))

    def _answer(self, order: words.Counts | words.Settings) -> None:
        if isinstance(order, words.Settings):
            self._batch = self._batch if order.batch is None else order.batch
            self._pause = self._pause if order.pause is None else order.pause
            return
        calls = self._calls
        held, stats = (0, {}) if calls is None else (calls.quarantined(), calls.stats())
        self._say(state(self.config.name, held, stats))

    def _obey(self, number: int, order: words.Order) -> None:
        assert self._calls is not None
        value = msgspec.Raw(b"null")
        try:
            value = self._do(self._calls, order)
        except BackendError as error:
            self._say(Said(number=number, error=_told(error)))
        else:
            self._say(Said(number=number, value=value))

    def _do(self, calls: Calls, order: words.Order) -> msgspec.Raw:
        if isinstance(order, (words.Start, words.Stop)):
            self._loading = isinstance(order, words.Start)
        elif isinstance(order, (words.Store, words.Load, words.Exists)):
            self._make(calls, type(order).__name__.lower(), order.ids)
        elif isinstance(order, words.Verify):
            verdict = calls.verify(order.ids, order.deadline)
            if (found := calls.watch()) is not None:
                self._say(found)
            return msgspec.Raw(msgspec.json.encode(verdict))
        return msgspec.Raw(b"null")


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def main() -> int:
    """Be one rank; 2 with one line on stderr where it cannot be started."""
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    voice = Voice()
    try:
        config = msgspec.json.decode(sys.stdin.readline(), type=WorkerConfig)
        worker = L3Worker(config, voice)
    except (KVConnectError, msgspec.MsgspecError) as error:
        sys.stderr.write(f"kvconnect: {error}\n")
        return 2
    try:
        return 0 if worker.serve() else 3
    except KVConnectError as error:
        voice.say(Said(number=0, error=_told(error)))
        sys.stderr.write(f"kvconnect: {error}\n")
        return 2
    except Exception:
        log.exception("a bug")
        return 1


if __name__ == "__main__":
    code = main()
    if code:
        # Something still runs, or waits for stdin: the interpreter would wait for it, or fail.
        sys.stderr.flush()
        os._exit(code)
