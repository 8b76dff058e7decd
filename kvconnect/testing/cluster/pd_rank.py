"""A P/D rank as a process of a cluster test: `python -m kvconnect.testing.cluster.pd_rank`.

It reads its configuration and commands from stdin and writes events to stdout, one JSON line
each (`pd_messages`, `events`); the first event answers command 0 and says where it listens and
which generation it is. Every request ends in exactly one `Call`: a prefill rank's tells in
`acked` what all decode ranks have got, a decode rank's in `hits` what is here, compared byte
for byte. A request that fails keeps its pages until the endpoint says that nothing touches them;
only then are they used for something else, and from then on watched.

One thread does all of it, in turn; others only wait: for a line, for a request's end.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from kvconnect.disagg.decode import DecodeEndpoint
from kvconnect.disagg.prefill import PrefillEndpoint
from kvconnect.disagg.requests import Request, RequestOutcome
from kvconnect.disagg.transports import open_transport
from kvconnect.errors import ConfigError, KVConnectError, TransferTimeoutError
from kvconnect.hostpool import HostPool
from kvconnect.testing.cluster import pd_messages as words
from kvconnect.testing.cluster.events import Call, Lines, Said, State
from kvconnect.testing.cluster.page_book import PageBook, Pages
from kvconnect.testing.cluster.pd_messages import RankConfig
from kvconnect.testing.cluster.pd_rank_flip import Flipping
from kvconnect.testing.cluster.voice import Voice, state

log = logging.getLogger("kvconnect.testing.cluster")

_LOOK_SECONDS = 0.5


@dataclass(eq=False)
class _Load:
    """A request under way here: which numbers in which pages, and since when."""

    request: str
    numbers: tuple[int, ...]
    pages: Pages
    deadline: float
    handle: Request
    started: float = field(default_factory=time.monotonic)


class PDRank:
    """One rank: its pool, its endpoint, and what is under way."""

    def __init__(self, config: RankConfig, stack: ExitStack, voice: Voice) -> None:
        """Open the transport and start to listen, where it is a prefill rank."""
        self.config, self._say = config, voice.say
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._calls, self._held, self._running = 0, dict[str, _Load](), True
        options = dict(config.transport_options)
        if config.transport != "shm":
            options["host"] = config.host
        self._transport = stack.enter_context(Flipping(open_transport(config.transport, options)))
        self._pool = stack.enter_context(self._make_pool())
        self._book = PageBook(self._pool, config.placement, config.content)
        kind: Any = PrefillEndpoint if config.role == "prefill" else DecodeEndpoint
        self._end: Any = kind(
            self._pool,
            config.placement,
            config.identity,
            self._transport,
            keys=config.keys,
            options=config.options,
        )
        stack.callback(self._close)
        address = self._end.listen(config.listen) if config.listen else ""
        ready = {"ready": config.name, "address": address, "generation": self._end.generation}
        self._say(Said(number=0, value=msgspec.Raw(msgspec.json.encode(ready))))

    def _make_pool(self) -> HostPool:
        plan = self.config.plan()
        return plan.place(self._transport.allocate(plan.nbytes, plan.label))

    def serve(self) -> None:
        """Do what is asked until `quit`, or until stdin ends with whoever asked."""
        threading.Thread(target=self._read, name="stdin", daemon=True).start()
        while self._running:
            self._inbox.get()()

    def _read(self) -> None:
        for line in sys.stdin:
            self._inbox.put(partial(self._obey, line))
        self._inbox.put(self._stop)

    def _stop(self) -> None:
        self._running = False

    def _obey(self, line: str) -> None:
        command = Lines.command(line)
        try:
            order = words.order_of(command)
            self._check_role(order)
            if isinstance(order, words.Connect):
                # Apart: it may wait for a host that is cut off, while requests end here.
                self._apart(command.number, partial(self._connect, order))
            else:
                self._do(order)
                self._say(Said(number=command.number))
        except KVConnectError as error:
            self._say(Said(number=command.number, error=f"{type(error).__name__}: {error}"))

    def _check_role(self, order: words.Order) -> None:
        mine = words.Send if self.config.role == "prefill" else (words.Receive, words.Connect)
        others = isinstance(order, (words.Send, words.Receive, words.Connect))
        if others and not isinstance(order, mine):
            raise ConfigError(
                f"{type(order).__name__.lower()} is not for a {self.config.role} rank"
            )

    def _do(self, order: words.Order) -> None:
        if isinstance(order, words.Send):
            self._send(order)
        elif isinstance(order, words.Receive):
            self._receive(order)
        elif isinstance(order, words.Abort):
            self._end.abort(order.request, order.reason)
        elif isinstance(order, words.Flip):
            self._transport.flip(order.batches)
        elif isinstance(order, words.Verify):
            self._tell(
                started=time.monotonic(), seconds=0.0, deadline=self.config.deadline, asked=0
            )
        elif isinstance(order, words.Counts):
            self._say(self._state())
        else:
            self._stop()

    def _apart(self, number: int, work: Callable[[], None]) -> None:
        def run() -> None:
            error = ""
            try:
                work()
            except KVConnectError as caught:
                error = f"{type(caught).__name__}: {caught}"
            self._inbox.put(lambda: self._say(Said(number=number, error=error)))

        threading.Thread(target=run, name="connect", daemon=True).start()

    def _connect(self, order: words.Connect) -> None:
        self._end.connect(order.addresses, order.timeout)

    def _send(self, order: words.Send) -> None:
        held = self.config.placement.layers
        step = order.step or held.extent
        pages = self._book.take(order.ids)
        load: _Load | None = None
        for start in range(held.start, held.stop, step):
            layers = range(start, min(start + step, held.stop))
            self._book.fill(pages, order.ids, layers)
            load = self._offer(order, pages, layers, load)

    def _offer(self, order: words.Send, pages: Pages, layers: range, load: _Load | None) -> _Load:
        """Offer some layers; the first offer begins the request."""
        deadline = self.config.deadline if order.deadline is None else order.deadline
        started = time.monotonic()
        try:
            handle = self._end.send(
                order.request, pages, layers=(layers.start, layers.stop), timeout=deadline
            )
        except KVConnectError:
            if load is None:
                self._book.give(pages, ())
            raise
        if load is not None:
            return load
        return self._begin(_Load(order.request, order.ids, pages, deadline, handle, started))

    def _receive(self, order: words.Receive) -> None:
        pages = self._book.take(order.ids)
        deadline = self.config.deadline if order.deadline is None else order.deadline
        started = time.monotonic()
        try:
            handle = self._end.receive(
                order.request,
                pages,
                slots=len(order.ids) * self.config.unit,
                timeout=deadline,
                checksum=order.checksum,
                way=order.way,
            )
        except KVConnectError:
            self._book.give(pages, ())
            raise
        self._begin(_Load(order.request, order.ids, pages, deadline, handle, started))

    def _begin(self, load: _Load) -> _Load:
        self._held[load.request] = load
        watch = partial(self._watch, load)
        threading.Thread(target=watch, name=f"wait {load.request}", daemon=True).start()
        return load

    def _watch(self, load: _Load) -> None:
        """Wait for a request's end, then until its pages are free; tell the inbox of both."""
        outcome = load.handle.wait(load.deadline + self.config.grace)
        seconds = time.monotonic() - load.started
        self._inbox.put(partial(self._ended, load, outcome, seconds))
        while self._running and not load.handle.quiet(_LOOK_SECONDS):
            pass
        self._inbox.put(partial(self._quiet, load))

    def _ended(self, load: _Load, outcome: RequestOutcome, seconds: float) -> None:
        """Say how a request ended; one that has not is a miss that took too long."""
        hits, wrong, misses = tuple[int, ...](), list[int](), dict[str, int]()
        if outcome.ok and self.config.role == "decode":
            wrong = self._book.wrong(load.pages, load.numbers)
            wrong += self._book.spilled(load.pages, load.numbers)
            hits = tuple(n for n in load.numbers if n not in wrong)
        elif not outcome.ok:
            misses[_kind(outcome)] = len(load.numbers)
            log.info("%s: %s: %s", load.request, outcome.state.value, outcome.reason)
        self._tell(
            started=load.started,
            seconds=seconds,
            deadline=load.deadline,
            asked=len(load.numbers),
            acked=load.numbers if outcome.ok and self.config.role == "prefill" else (),
            hits=hits,
            wrong=tuple(wrong),
            misses=misses,
            nbytes=outcome.nbytes if outcome.ok else 0,
            request=load.request,
        )

    def _quiet(self, load: _Load) -> None:
        del self._held[load.request]
        self._book.give(load.pages, load.numbers)

    def _tell(self, **fields: Any) -> None:
        """Say how a call ended, and what of the memory that is somebody else's has changed."""
        reused = tuple(self._book.changed())
        number, self._calls = self._calls, self._calls + 1
        name = self.config.name
        self._say(Call(op="transfer", worker=name, number=number, reused=reused, **fields))

    def _state(self) -> State:
        quarantined = self._end.quarantined() if self.config.role == "decode" else []
        stats = {
            "requests": len(self._held),
            "free_pages": self._book.free,
            "peers": len(self._end.peers),
            "free_slots": self._end.ring.free,
        }
        held = len(quarantined) * self._book.page_nbytes
        return state(self.config.name, held, stats | self._end.counters())

    def _close(self) -> None:
        """Close the endpoint; a peer that is stopped is cut off by closing the transport first."""
        with contextlib.suppress(TransferTimeoutError):
            self._end.close()
            return
        self._transport.close()
        self._end.close()


def _kind(outcome: RequestOutcome) -> str:
    """Return why a request is no success, in a word."""
    return "UNDER_WAY" if outcome.cause is None else outcome.cause.name


def main() -> int:
    """Be one rank; 2 with one line on stderr where it cannot be started."""
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    voice = Voice()
    try:
        config = msgspec.json.decode(sys.stdin.readline(), type=RankConfig)
        with ExitStack() as stack:
            PDRank(config, stack, voice).serve()
    except (KVConnectError, msgspec.MsgspecError) as error:
        sys.stderr.write(f"kvconnect: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
