"""Driving one worker of a cluster test by hand: a command, its answer, the events in between.

For tests that need a handful of calls in an exact order, where a load that runs by itself would
blur which call showed what.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from kvconnect.backend import Closing
from kvconnect.errors import BackendError, TransferTimeoutError
from kvconnect.testing.cluster.events import Call, Command, Event, Lines, Said, State
from kvconnect.testing.cluster.process import Process

_ANSWER_SECONDS = 15.0


class Driven(Closing):
    """A worker process. `calls` are all that it told of, oldest first. Used by one thread."""

    def __init__(self, process: Process) -> None:
        """Drive a worker that has been started and told its configuration."""
        self.process = process
        self.calls: list[Call] = []
        self._answers: dict[int, Said] = {}
        self._states: list[State] = []
        self._number = 0

    def answer(self, number: int, timeout: float = _ANSWER_SECONDS) -> Any:
        """Wait for the answer to command `number`; `BackendError` with the worker's words."""
        self._until(lambda: number in self._answers, timeout, f"answer {number}")
        said = self._answers.pop(number)
        if said.error:
            raise BackendError(f"{self.process.name}: {said.error}")
        return msgspec.json.decode(said.value)

    def tell(self, word: str, /, **arguments: object) -> int:
        """Send a command and return its number at once."""
        self._number += 1
        command = Command(number=self._number, word=word, arguments=arguments)
        self.process.send(Lines.write(command))
        return self._number

    def ask(self, word: str, timeout: float = _ANSWER_SECONDS, /, **arguments: object) -> Any:
        """Send a command and return its answer."""
        return self.answer(self.tell(word, **arguments), timeout)

    def state(self) -> State:
        """Return what it holds now."""
        self.ask("counts")
        return self._states[-1]

    def call(self, request: str, timeout: float = _ANSWER_SECONDS) -> Call:
        """Wait for the end of a request and return its event."""
        self._until(lambda: self._found(request) is not None, timeout, f"end of {request}")
        found = self._found(request)
        assert found is not None
        return found

    def _found(self, request: str) -> Call | None:
        return next((call for call in self.calls if call.request == request), None)

    def _until(self, there: Any, timeout: float, what: str) -> None:
        until = time.monotonic() + timeout
        while not there():
            try:
                self._take(Lines.event(self.process.receive(until - time.monotonic())))
            except TransferTimeoutError:
                raise TransferTimeoutError(
                    f"{self.process.name} on {self.process.host}: no {what} in {timeout:g} s"
                ) from None

    def _take(self, event: Event) -> None:
        if isinstance(event, Call):
            self.calls.append(event)
        elif isinstance(event, State):
            self._states.append(event)
        else:
            self._answers[event.number] = event

    def close(self) -> None:
        """Kill the worker."""
        self.process.close()
