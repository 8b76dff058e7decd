"""Ranks as processes: started by a fork server that has everything imported, driven, killed."""

import multiprocessing
import os
import signal
import time

import msgspec

from kvconnect.testing.frozen import freeze

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.disagg.rank_process"])


class RankError(Exception):
    """What a rank raised: (class name, words)."""


class Rank:
    """A rank process, as the test sees it."""

    def __init__(self, role, name, keys=None, pace=0.001, carrier=("shm", {}, {}), **options):
        """`carrier`: the transport's name, its options, and the environment of its library."""
        from tests.disagg.rank_process import main

        ours, theirs = _context.Pipe()
        settings = {
            "peer_timeout": 3.0, "ping": 0.1, "batch_bytes": 32 << 10, "staging": 1 << 20,
            "slot": 64 << 10, "timeout": 20.0,
        }  # fmt: skip
        self.conn, self.role, self.name = ours, role, name
        self.process = _context.Process(
            target=main,
            args=(theirs, role, name, keys, carrier, settings | options, pace),
            daemon=True,
        )
        self.process.start()
        theirs.close()
        self._answer(30)

    def __getattr__(self, word):
        def ask(*arguments):
            self.conn.send_bytes(msgspec.json.encode([word, *arguments]))
            return self._answer(30)

        return ask

    def _answer(self, seconds):
        assert self.conn.poll(seconds), f"{self.name} does not answer"
        kind, value = msgspec.json.decode(self.conn.recv_bytes())
        if kind != "ok":
            raise RankError(kind, value)
        return value

    def signal(self, number):
        os.kill(self.process.pid, number)

    def freeze(self):
        freeze(self.process.pid)

    def kill(self):
        self.signal(signal.SIGKILL)
        self.process.join(10)
        assert not self.process.is_alive()
        self.conn.close()
        self.process.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if not self.conn.closed:
            self.kill()


def settles(rank, wanted, seconds=5.0, kept=0):
    """Wait until a rank's counts, those in `wanted`, are as wanted; returns what differs.

    `kept`: how many more files and threads than wanted a library may keep.
    """
    deadline = time.monotonic() + seconds
    while True:
        now = rank.counts()
        wrong = {n: (v, wanted[n]) for n, v in now.items() if v != wanted.get(n, v)}
        for name in ("fds", "tasks"):
            if name in wrong and now[name] <= wanted[name] + kept:
                del wrong[name]
        if not wrong or time.monotonic() > deadline:
            return wrong
        time.sleep(0.02)
