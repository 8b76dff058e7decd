"""The runner's end of a worker process: start it again and again, ask, hear all that it says."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec

from kvconnect.backend import Closing
from kvconnect.errors import BackendError, KVConnectError, TransferTimeoutError, UnavailableError
from kvconnect.testing.cluster.events import Call, Command, Lines, Said
from kvconnect.testing.cluster.host import Host
from kvconnect.testing.cluster.journal import Heard, Journal, Mark, Member, Phase, What
from kvconnect.testing.cluster.process import Process

_ANSWER_SECONDS = 15.0
_END_SECONDS = 10.0
_BY_RUNNER, _BY_ITSELF = -1, -2


class Worker(Closing):
    """One worker by name, over all its lives. Safe to use from many threads.

    `config` is its first line of stdin; the same at every start, so that what listens listens at
    the same address. A thread of its own takes what it says into the journal.
    """

    def __init__(
        self, member: Member, host: Host, module: str, config: msgspec.Struct, journal: Journal
    ) -> None:
        """Describe it; `start` starts it."""
        self.member, self.host, self.life = member, host, -1
        self._module, self._config, self._journal = module, config, journal
        self._changed = threading.Condition()
        self._process: Process | None = None
        self._reader: threading.Thread | None = None
        self._up, self._frozen, self._doomed = False, False, _BY_ITSELF
        self._number = 0
        self._answers: dict[int, Said] = {}
        self._ends: dict[str, Call] = {}
        self._awaited: set[str] = set()

    def __repr__(self) -> str:
        """Show who it is."""
        return f"Worker({self.name!r} on {self.host.name}, life {self.life}, up={self._up})"

    @property
    def name(self) -> str:
        """Its name in the run."""
        return self.member.name

    @property
    def up(self) -> bool:
        """Whether its process runs; a stopped one does."""
        return self._up

    @property
    def answers(self) -> bool:
        """Whether it can be expected to answer: it runs and is not stopped."""
        return self._up and not self._frozen

    def start(self, timeout: float) -> Any:
        """Start its process and return what it says first.

        Raises `UnavailableError` where it ends before, `TransferTimeoutError` where it is silent.
        """
        argv = [self.host.python, "-m", self._module]
        process = self.host.spawn(argv, name=self.name)
        # Before others can see it: whoever samples it meanwhile would be its first line.
        process.send(msgspec.json.encode(self._config).decode())
        with self._changed:
            self.life += 1
            self._process, self._up, self._frozen = process, True, False
            self._doomed = _BY_ITSELF
            self._answers.clear()
            self._ends.clear()
        self._reader = threading.Thread(
            target=self._read, args=(process, self.life), name=self.name, daemon=True
        )
        self._reader.start()
        said = self.answer(0, timeout)
        self._mark("born")
        return said

    def _read(self, process: Process, life: int) -> None:
        while (line := process.lines().get()) is not None:
            at, text = line
            try:
                event = Lines.event(text)
            except msgspec.MsgspecError as error:
                words = f"{self.name} said what is no event: {text[:200]!r} ({error})"
                self._journal.add(Phase(at=at, name="failed", words=words))
                continue
            with self._changed:
                if isinstance(event, Said):
                    self._answers[event.number] = event
                else:
                    if isinstance(event, Call) and event.request in self._awaited:
                        self._ends[event.request] = event
                    self._journal.add(Heard(at=at, worker=self.name, life=life, event=event))
                self._changed.notify_all()
        with self._changed:
            self._up = False
            words = process.last_words()[-500:] if self._doomed == _BY_ITSELF else ""
            self._mark("ended", fault=self._doomed, words=words)
            self._changed.notify_all()

    def _mark(self, what: What, **fields: Any) -> None:
        mark = Mark(at=time.monotonic(), worker=self.name, life=self.life, what=what, **fields)
        self._journal.add(mark)

    def tell(self, word: str, /, **arguments: object) -> int:
        """Send a command and return its number at once; `UnavailableError` if it is not up."""
        with self._changed:
            self._number += 1
            number, process = self._number, self._process
        if process is None or not self._up:
            raise UnavailableError(f"{self.name} is not up")
        process.send(Lines.write(Command(number=number, word=word, arguments=arguments)))
        return number

    def answer(self, number: int, timeout: float = _ANSWER_SECONDS) -> Any:
        """Wait for the answer to a command; `BackendError` with the worker's words if refused.

        Raises `TransferTimeoutError` after `timeout` seconds and `UnavailableError` if it ends.
        """
        with self._changed:
            there = self._changed.wait_for(
                lambda: number in self._answers or not self._up, max(timeout, 0)
            )
            said = self._answers.pop(number, None)
        if said is None and there:
            raise UnavailableError(f"{self.name} ended: {self._last_words()}")
        if said is None:
            raise TransferTimeoutError(f"{self.name}: no answer {number} in {timeout:g} s")
        if said.error:
            raise BackendError(f"{self.name}: {said.error}")
        return msgspec.json.decode(said.value)

    def ask(self, word: str, timeout: float = _ANSWER_SECONDS, /, **arguments: object) -> Any:
        """Send a command and return its answer."""
        return self.answer(self.tell(word, **arguments), timeout)

    def request(self, word: str, request: str, /, **arguments: object) -> int:
        """Send a command that begins a request, whose end `end_of` waits for."""
        with self._changed:
            self._awaited.add(request)
        return self.tell(word, request=request, **arguments)

    def end_of(self, request: str, number: int, until: float) -> Call | None:
        """Wait for a request's end, until the monotonic time `until`.

        None where there is none: it was refused, which is marked, or the worker is not up, or
        stopped, or too slow.
        """

        def settled() -> bool:
            refused = number in self._answers and bool(self._answers[number].error)
            return request in self._ends or refused or not self.answers

        with self._changed:
            self._changed.wait_for(settled, max(until - time.monotonic(), 0))
            self._awaited.discard(request)
            said = self._answers.pop(number, None)
            if said is not None and said.error:
                self._mark("refused", request=request, words=said.error)
            return self._ends.pop(request, None)

    def busy(self, seconds: float) -> None:
        """Say that it calls by itself from now on, each call within `seconds` of the last."""
        self._mark("busy", seconds=seconds)

    def idle(self) -> None:
        """Say that it does not call by itself any more."""
        self._mark("idle")

    def doom(self, fault: int) -> None:
        """Say before it happens that a fault, or the runner (-1), ends it."""
        self._doomed = fault

    def freeze(self) -> None:
        """Say that it was stopped."""
        with self._changed:
            self._frozen = True
            self._mark("frozen")
            self._changed.notify_all()

    def thaw(self) -> None:
        """Say that it goes on."""
        self._mark("thawed")
        self._frozen = False

    def wait_down(self, timeout: float = _END_SECONDS) -> bool:
        """Wait until its output has ended; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._up, timeout)

    @property
    def process(self) -> Process:
        """Its process of now, or of last; `UnavailableError` if it never had one."""
        if self._process is None:
            raise UnavailableError(f"{self.name} was never started")
        return self._process

    def _last_words(self) -> str:
        return self.process.last_words()[-500:]

    def quit(self, timeout: float, fault: int = _BY_RUNNER) -> bool:
        """Ask it to end and wait for that, by a fault's doing; False where it had to be killed."""
        self.doom(fault)
        try:
            self.tell("quit")
            code = self.process.wait(timeout)
        except KVConnectError:
            code = -1
        self.close()
        return code == 0

    def close(self) -> None:
        """Kill it; the second call does nothing."""
        if self._doomed == _BY_ITSELF:
            self.doom(_BY_RUNNER)
        if self._process is not None:
            self._process.close()
            self.wait_down()
