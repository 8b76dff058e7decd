"""What every service of a scenario can do: start, break, restart, and name what is opened.

A service is one process on a host, or none; its address is the same over all its starts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal
from urllib.parse import urlencode

from kvconnect.backend import Closing
from kvconnect.errors import ConfigError, TransferTimeoutError, UnavailableError
from kvconnect.testing.cluster.host import Host
from kvconnect.testing.cluster.process import Process

Value = str | int | float | bool
"""An option, as a scenario file has it."""

Keeps = Literal["all", "nothing"]
"""What is left of acknowledged pages after a process of the service died: all, or no promise."""

_END_SECONDS = 10.0
_LOOK_SECONDS = 20.0
_POLL_SECONDS = 0.2

_ASK = """
import json, sys, urllib.request
answers = []
for url in sys.argv[1:]:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            answers.append(answer.read().decode())
    except OSError:
        answers.append("")
print(json.dumps(answers))
"""


class Service(Closing):
    """A server on a host. Nothing runs before `start`.

    `of` is the service it belongs to. Subclasses say which kinds that may be, and raise
    `ConfigError` for another one or for an option they do not know.
    """

    kind: ClassVar[str]
    keeps: Keeps = "all"
    settles: float = 0.0
    """Seconds that a page must have been acknowledged before a death to be kept by it."""
    evicts: ClassVar[bool] = False
    """Whether a full disk of its host costs old pages: it is a cache, and new ones go first."""

    def __init__(
        self, name: str, host: Host, of: Service | None, options: Mapping[str, Value]
    ) -> None:
        """Describe it; `start` starts it."""
        self.name, self.host, self.of, self.given = name, host, of, dict(options)
        self._process: Process | None = None

    def __repr__(self) -> str:
        """Show what and where it is."""
        return f"{type(self).__name__}({self.name!r} on {self.host.name}, alive={self.alive})"

    @property
    def alive(self) -> bool:
        """Whether its process runs; a stopped one does. Never for a service without one."""
        return self._process is not None and self._process.alive

    def start(self) -> None:
        """Start it and return once it serves; one that runs is killed first.

        Raises `UnavailableError` with its last words if it ends before, `TransferTimeoutError`
        if it takes too long.
        """
        self.close()
        self._process = self._launch()
        if self._process is not None:
            try:
                self._await(self._process)
            except BaseException:
                self.close()
                raise

    def _launch(self) -> Process | None:
        """Start its process, None where it has none."""
        raise NotImplementedError

    def _await(self, process: Process) -> None:
        """Wait until it serves."""

    def restart(self) -> None:
        """Start it again at the same address, whether it still runs or not."""
        self.start()

    def kill(self) -> None:
        """Kill it (SIGKILL) and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_END_SECONDS)

    def stop(self) -> None:
        """Stop it where it is (SIGSTOP)."""
        if self._process is not None:
            self._process.stop()

    def go_on(self) -> None:
        """Let it go on (SIGCONT)."""
        if self._process is not None:
            self._process.go_on()

    def terminate(self, timeout: float) -> None:
        """Ask it to end (SIGTERM); kill it after `timeout` seconds."""
        if self._process is not None:
            self._process.terminate(timeout)

    def url(self, host: Host, **options: Value) -> str:
        """Return what a worker on `host` opens; `options` win over those of the service.

        Raises `ConfigError` where it is nothing to be opened there.
        """
        raise ConfigError(
            f"{self.name}: a worker on {host.name} cannot open a {self.kind} "
            f"(options {sorted(options)}); name the store it belongs to"
        )

    def close(self) -> None:
        """Kill it; the second call does nothing."""
        if self._process is not None:
            self._process.close()


def refuse_of(service: Service, *kinds: type[Service]) -> None:
    """Raise `ConfigError` unless `service` is of one of `kinds`, or of nothing if there is none."""
    of = service.of
    if isinstance(of, kinds) if kinds else of is None:
        return
    wanted = " or ".join(kind.kind for kind in kinds) or "no other service"
    got = "nothing" if of is None else f"{of.name!r}, a {of.kind}"
    raise ConfigError(f"{service.name}: a {service.kind} is of {wanted}; here of {got}")


def url_of(scheme: str, location: str, options: Mapping[str, Value]) -> str:
    """Return a store URL; values are quoted, truth values written as true and false."""
    texts = {name: _text(value) for name, value in options.items()}
    return f"{scheme}://{location}?{urlencode(texts)}"


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def ask(host: Host, urls: Sequence[str]) -> list[str]:
    """Return what each URL answers, asked from `host`; "" where nobody answers well."""
    done = host.run([host.python, "-I", "-S", "-c", _ASK, *urls], timeout=_LOOK_SECONDS)
    if done.returncode:
        raise UnavailableError(f"asking {urls} from {host.name}: {done.stderr[-500:]}")
    answers: list[str] = json.loads(done.stdout)
    return answers


def await_answers(
    process: Process, host: Host, urls: Sequence[str], serves: Callable[[list[str]], Any],
    timeout: float,
) -> None:  # fmt: skip
    """Ask until `serves` is true of the answers.

    Raises `UnavailableError` as soon as `process` has ended, `TransferTimeoutError` with the last
    answers after `timeout` seconds.
    """
    until, answers = time.monotonic() + timeout, [""]
    while not serves(answers):
        if not process.alive:
            raise UnavailableError(f"{process!r} ended: {process.last_words()}")
        if time.monotonic() > until:
            raise TransferTimeoutError(f"{process!r} does not serve after {timeout:g} s: {answers}")
        time.sleep(_POLL_SECONDS)
        with suppress(TransferTimeoutError):  # a host that is stopped answers nothing
            answers = ask(host, urls)
