"""A rank in a process of its own: memory with a pattern, on any transport, driven by JSON lines."""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Closing
from kvconnect.disagg.transport import Peer, PeerTransfer, PeerTransport, Runs, Way
from kvconnect.disagg.transports import open_transport
from kvconnect.region import Region
from kvconnect.testing.frozen import freeze

GUARD = 4096
"""Bytes of canary on each side of a region."""
CANARY = 0xC5
ANSWER_SECONDS = 60.0
_MAIN = "import sys; from kvconnect.testing.peer_suite.rank import main; main(sys.argv[1])"


def pattern(nbytes: int) -> NDArray[np.uint8]:
    """Return what a rank's memory holds at the start."""
    return (np.arange(nbytes, dtype=np.uint32) % 251).astype(np.uint8)


def digest(data: NDArray[np.uint8]) -> str:
    """Return a digest of bytes."""
    return hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()


class Rank(Closing):
    """The other process, as seen from here."""

    def __init__(self, transport: str, options: Mapping[str, object], nbytes: int) -> None:
        """Start it and wait until its memory is registered."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        config = json.dumps([transport, dict(options), nbytes])
        self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and code
            [sys.executable, "-c", _MAIN, config],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        hello = self._answer()
        self.metadata = bytes.fromhex(hello["metadata"])
        self.address, self.nbytes = int(hello["address"]), nbytes

    def ask(self, command: str, *arguments: Any) -> Any:
        """Send a command and return its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *arguments]).encode() + b"\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(ANSWER_SECONDS), f"no answer after {ANSWER_SECONDS} s"
        line = self.process.stdout.readline()
        assert line, f"the rank ended with {self.process.wait(5)}"
        return json.loads(line)

    def stop(self) -> None:
        """Stop it (SIGSTOP) and wait until all of its threads are."""
        freeze(self.process.pid)

    def go_on(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it and wait for its end."""
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        """Kill it if it still runs."""
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class _Served:
    """The rank's own side: its memory and what it is told to do."""

    def __init__(self, transport: PeerTransport, nbytes: int) -> None:
        self._transport = transport
        self._memory = transport.allocate(nbytes + 2 * GUARD, "rank")
        self._whole: NDArray[np.uint8] = np.ndarray(
            [nbytes + 2 * GUARD], dtype=np.uint8, buffer=self._memory.keep_alive()
        )
        self._whole[:] = CANARY
        self.data = self._whole[GUARD : GUARD + nbytes]
        self.data[:] = pattern(nbytes)
        self.region = Region("rank", int(self.data.ctypes.data), nbytes)
        self._handle = transport.register([self.region])
        self._pushed: list[PeerTransfer] = []
        self._peer: Peer | None = None

    def ask_digest(self) -> str:
        return digest(self.data)

    def ask_intact(self) -> bool:
        guards = (self._whole[:GUARD], self._whole[-GUARD:])
        return all(bool((guard == CANARY).all()) for guard in guards)

    def ask_fill(self, value: int) -> bool:
        self.data[:] = value
        return True

    def ask_bytes(self, start: int, stop: int) -> str:
        return self.data[start:stop].tobytes().hex()

    def ask_push(self, metadata: str, address: int, times: int) -> bool:
        """Push all of the memory `times` times to a peer and answer before it is there."""
        self._peer = self._transport.connect(bytes.fromhex(metadata), ANSWER_SECONDS)
        here = np.array([self.region.address], dtype=np.uint64)
        there = np.array([address], dtype=np.uint64)
        size = np.array([self.region.nbytes], dtype=np.uint64)
        for _ in range(times):
            runs = Runs(here, there, size)
            transfer = self._transport.submit(self._peer, Way.PUSH, runs, ANSWER_SECONDS)
            self._pushed.append(transfer)
        return True

    def ask_pushed(self) -> list[int]:
        """Return the status of each push, waited for."""
        return [int(transfer.wait(ANSWER_SECONDS).status) for transfer in self._pushed]

    def ask_unregister(self) -> bool:
        self._handle.close()
        return True


def main(config: str) -> None:
    """Serve commands until standard input ends."""
    name, options, nbytes = json.loads(config)
    with open_transport(name, options) as transport:
        served = _Served(transport, nbytes)
        answer: Any = {"metadata": transport.describe().hex(), "address": served.region.address}
        print(json.dumps(answer), flush=True)  # noqa: T201 - the protocol is lines on stdout
        for line in sys.stdin:
            command, *arguments = json.loads(line)
            answer = getattr(served, f"ask_{command}")(*arguments)
            print(json.dumps(answer), flush=True)  # noqa: T201
