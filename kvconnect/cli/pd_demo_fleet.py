"""The processes of the P/D demo, as the parent sees them: start, talk, watch, end all.

Ranks are forked from the parent, which has imported everything and started no thread yet:
importing torch costs each of them more than all its work.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvconnect.backend import Closing
from kvconnect.cli import pd_demo_rank
from kvconnect.cli.pd_demo_job import Event, Job, Order
from kvconnect.errors import KVConnectError, TransferTimeoutError

_END_SECONDS = 10.0
"""How long a rank that has ended its work may take to close."""


@dataclass
class _Rank:
    """A rank process: its id and the parent's ends of its stdin and stdout."""

    pid: int
    stdin: int
    stdout: int
    heard: bytes = b""
    code: int | None = None


class Fleet(Closing):
    """Rank processes by name ("prefill 0"); `close` leaves none behind, whatever happened."""

    def __init__(self, job: Job, until: float) -> None:
        """Start none yet. No wait goes on after `until` (monotonic seconds)."""
        self.job, self.until = job, until
        self._ranks: dict[str, _Rank] = {}

    def start(self, name: str) -> None:
        """Fork one rank. To be called before the process starts a thread."""
        (child_in, stdin), (stdout, child_out) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            # A rank that held another's pipe would keep it from seeing that the parent is gone.
            ends = [end for rank in self._ranks.values() for end in (rank.stdin, rank.stdout)]
            _be(self.job, name, child_in, child_out, self._words(name), [stdin, stdout, *ends])
        os.close(child_in)
        os.close(child_out)
        self._ranks[name] = _Rank(pid, stdin, stdout)

    def _words(self, name: str) -> Path:
        return Path(self.job.scratch) / f"{name}.log"

    def tell(self, name: str, order: Order) -> None:
        """Give a rank an order; one that has ended is noticed when its events are read."""
        with contextlib.suppress(OSError):
            os.write(self._ranks[name].stdin, msgspec.json.encode(order) + b"\n")

    def events(self, names: Sequence[str]) -> Iterator[tuple[str, Event]]:
        """Yield what ranks say, until these have ended well.

        Raises `KVConnectError` with the last words of a rank that failed, and
        `TransferTimeoutError` where the time is up.
        """
        decoder = msgspec.json.Decoder(Event)
        running = {self._ranks[name].stdout: name for name in names}
        while running:
            left = max(self.until - time.monotonic(), 0)
            ready, _, _ = select.select(list(running), [], [], left)
            if not ready:
                raise TransferTimeoutError(
                    f"{', '.join(sorted(running.values()))} did not end in "
                    f"{self.job.timeout:g} s; a busy machine may need a higher --timeout or a "
                    f"lower --limit"
                )
            for end in ready:
                name = running[end]
                rank, data = self._ranks[name], os.read(end, 1 << 16)
                *lines, rank.heard = (rank.heard + data).split(b"\n")
                for line in lines:
                    yield name, decoder.decode(line)
                if not data:
                    del running[end]
                    self._ended(name, rank)

    def _ended(self, name: str, rank: _Rank) -> None:
        until = time.monotonic() + _END_SECONDS
        while not _reap(rank, os.WNOHANG):
            if time.monotonic() > until:
                raise TransferTimeoutError(f"{name} does not end")
            time.sleep(0.01)
        if rank.code:
            words = self._words(name).read_text(errors="replace").strip().splitlines()[-3:]
            raise KVConnectError(f"{name} ended with code {rank.code}: {' | '.join(words)}")

    def close(self) -> None:
        """End every rank that still runs; the second call does nothing."""
        for rank in self._ranks.values():
            if rank.code is None:
                os.kill(rank.pid, signal.SIGKILL)
        for rank in self._ranks.values():
            _reap(rank, 0)
            os.close(rank.stdin)
            os.close(rank.stdout)
        self._ranks = {}


def _reap(rank: _Rank, flags: int) -> bool:
    """Wait for a rank's end, or look (WNOHANG); tell whether it has ended."""
    if rank.code is None:
        pid, status = os.waitpid(rank.pid, flags)
        if pid:
            rank.code = os.waitstatus_to_exitcode(status)
    return rank.code is not None


def _be(job: Job, name: str, stdin: int, stdout: int, words: Path, others: list[int]) -> None:
    """Be the rank `name`, in the forked process; does not return."""
    code = 1
    try:
        for end in others:
            os.close(end)
        log = os.open(words, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for place, end in enumerate((stdin, stdout, log)):
            os.dup2(end, place)
            os.close(end)
        role, number = name.split()
        code = pd_demo_rank.run(job, role, int(number))
    except BaseException:  # noqa: BLE001 - the child must never go on as the parent
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)
