"""`Peer`: a second process that has the same store open, driven by lines of JSON.

A fresh interpreter, not a fork: that is how the ranks of an engine see each other, and no
lock, handle or mapping is inherited by accident.
"""

from __future__ import annotations

import importlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kvconnect.backend import Backend, Closing, Op
from kvconnect.testing.memory import Objects, payload

ANSWER_SECONDS = 60.0


class Peer(Closing):
    """The other process; `ask` sends a command and waits for its answer.

    Invariant: one answer per command, in order; leaving the ``with`` block ends the process.
    """

    def __init__(self, opener: str, location: str, options: Mapping[str, str]) -> None:
        """Start it; `opener` is ``module:function``, called with `location` and `options`."""
        config = json.dumps([opener, location, dict(options)])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", "kvconnect.testing.peer", config],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )

    @property
    def pid(self) -> int:
        """Process id, for tests that kill it."""
        return self._process.pid

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and return its answer."""
        self.send(command, **arguments)
        return self.receive()

    def send(self, command: str, **arguments: Any) -> None:
        """Send a command without waiting."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def answered(self) -> bool:
        """Tell, without waiting, whether an answer is there (or the process has ended)."""
        return self._readable(0)

    def receive(self) -> dict[str, Any]:
        """Return the next answer; AssertionError after a minute or if the process died."""
        assert self._readable(ANSWER_SECONDS), f"no answer after {ANSWER_SECONDS} s"
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the peer process ended with {self._process.wait(5)}"
        return dict(json.loads(line))

    def _readable(self, timeout: float) -> bool:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            return bool(selector.select(timeout))

    def kill(self) -> None:
        """Kill the process at once."""
        self._process.kill()
        self._process.wait(10)

    def close(self) -> None:
        """End the process; the second call does nothing."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()


def _content(name: str, nbytes: int, version: str) -> bytes:
    return payload(f"{version}:{name}", nbytes)


def _put(store: Backend, names: Sequence[str], sizes: Sequence[int], version: str) -> list[int]:
    held = Objects([[size] for size in sizes])
    for index, name in enumerate(names):
        held.write(index, _content(name, sizes[index], version))
    with store.register([held.region]):
        return [int(s) for s in store.submit(held.batch(Op.STORE, names)).wait(30).status]


def _get(store: Backend, names: Sequence[str], sizes: Sequence[int]) -> dict[str, Any]:
    held = Objects([[size] for size in sizes])
    with store.register([held.region]):
        outcome = store.submit(held.batch(Op.LOAD, names)).wait(30)
    right = [held.read(i) == _content(n, sizes[i], "") for i, n in enumerate(names)]
    return {"status": [int(s) for s in outcome.status], "right": right}


def answer(store: Backend, request: dict[str, Any]) -> dict[str, Any]:
    """Do one command: put, get, exists, or storm (versions in turn, round after round)."""
    names, sizes = request["keys"], request["sizes"]
    match request["command"]:
        case "put":
            return {"status": _put(store, names, sizes, request.get("version", ""))}
        case "get":
            return _get(store, names, sizes)
        case "exists":
            return {"found": store.exists(names, sizes).tolist()}
        case "storm":
            turns = request["versions"]
            rounds = range(request["rounds"])
            done = [_put(store, names, sizes, turns[n % len(turns)]) for n in rounds]
            return {"failed": sum(status != 0 for statuses in done for status in statuses)}
    raise ValueError(request["command"])


def main(config: str) -> None:
    """Open the store and answer commands until standard input ends."""
    opener, location, options = json.loads(config)
    module, _, function = opener.partition(":")
    with getattr(importlib.import_module(module), function)(location, options) as store:
        for line in sys.stdin:
            sys.stdout.write(json.dumps(answer(store, json.loads(line))) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
