"""What the fault tests share: ranks of one transport, requests between them, and their ends.

After every fault: the survivor's request ends in bounded time, its pages come back in bounded
time, they are used at once for something else and nothing late lands in them, the same pages
carry a good request afterwards, and at the end fds, threads and handles are where they were.
"""

import collections
import logging
import os
import random
import signal
import statistics
import time
from typing import ClassVar

import pytest

from tests.disagg.ranks import Rank, settles

OUTCOME_SECONDS = 3.0
"""Until a request's end is known; far above what it takes: a busy machine is no fault."""
PAINT = 21930
EVERYTHING = list(range(40))
STAGES = ("never", "always")

log = logging.getLogger("tests.disagg.faults")


class FaultBase:
    """Hooks, and what differs between transports."""

    transport = ""
    options: ClassVar = {}
    environment: ClassVar = {}
    rounds = int(os.environ.get("KVCONNECT_FAULT_ROUNDS", "20"))
    """Of each fault, over both ways of sending; a multiple of 4."""
    pages = 32
    """Of a request, 64 KiB each; it goes in batches of 32 KiB."""
    silence = 0.8
    """Seconds of silence after which a stopped peer counts as lost."""
    quiet_seconds = 3.0
    """Until the pages of a failed request are free, once everybody runs or is dead."""
    kept = 0
    """Files and threads that the library may keep, over all rounds."""

    @pytest.fixture(autouse=True)
    def _rounds(self, request):
        """Numbers of a test's own, and the times it saw in the log."""
        self.rng, self.seconds = random.Random(5), collections.defaultdict(list)
        self.source, self.target = list(range(self.pages)), list(range(4, 4 + self.pages))
        yield
        for what, seconds in self.seconds.items():
            log.info(
                "%s %s, %s: %d rounds, median %.4f s, at most %.4f s", self.transport,
                request.node.name, what, len(seconds), statistics.median(seconds), max(seconds),
            )  # fmt: skip

    @property
    def _carrier(self):
        return self.transport, self.options, self.environment

    def prefill(self, name="p", stage="never", address="tcp://127.0.0.1:*", seed=1, **options):
        rank = Rank("prefill", name, stage=stage, carrier=self._carrier, **options)
        rank.address = rank.listen(address)
        rank.fill(self.pages * 16, seed)
        return rank

    def decode(self, name="d", **options):
        rank = Rank("decode", name, carrier=self._carrier, **options)
        rank.paint(EVERYTHING, PAINT)
        return rank

    def meet(self, source, target):
        target.connect([source.address], 5.0)

    def begin(self, source, target, name, way="push", seconds=15.0):
        target.receive(name, self.target, seconds, way)
        source.send(name, self.source, seconds)

    def good(self, source, target, name, seed=1, way="push"):
        """A whole request into the same pages, every byte checked, and none beside them."""
        for rank in (source, target):
            rank.slow(None)
        self.begin(source, target, name, way)
        self.arrives(source, target, name, seed)

    def arrives(self, source, target, name, seed=1):
        """A request that is under way ends well on both sides, every byte in its place."""
        outcome = target.wait(name, 15.0)
        assert outcome[0] == "done", outcome
        assert source.wait(name, 5.0)[0] == "done"
        assert target.quiet(name, 1.0)
        assert target.holds(self.target, seed, PAINT)

    def ends(self, rank, name):
        """The request has ended, within bounded time since the fault; returns how and why."""
        state, reason = rank.wait(name, 10.0)
        seconds = time.monotonic() - self.began
        assert state in {"done", "failed"}
        assert seconds < OUTCOME_SECONDS, (reason, seconds)
        self.seconds[f"{rank.role} {state}"].append(seconds)
        return state, reason

    def fails(self, rank, name, *words):
        """The request has failed, within bounded time, for one of these reasons."""
        state, reason = self.ends(rank, name)
        assert state == "failed"
        assert any(word in reason for word in words), reason

    def rests(self, rank, name):
        """Nothing touches the request's pages any more, within bounded time."""
        assert rank.quiet(name, self.quiet_seconds + 10.0)
        seconds = time.monotonic() - self.began
        assert seconds < self.quiet_seconds
        self.seconds[f"{rank.role} quiet"].append(seconds)

    def pages_come_back(self, target, name):
        """The request's pages are free within bounded time; they are painted at once."""
        self.rests(target, name)
        target.paint(self.target, PAINT)

    def middle(self, mover):
        """Return a function that waits until some batches of the next request have been started.

        The rest takes time; when it returns, one may be in the transport, or between two.
        """
        count = mover.batches(0, 0) + self.rng.randrange(2, self.pages // 2)
        mover.slow(count)

        def reached():
            mover.batches(count, 10.0)
            time.sleep(self.rng.uniform(0, 0.01))
            self.began = time.monotonic()

        return reached

    def go_on(self, rank):
        """Let a stopped rank go on; what comes of it is counted from here."""
        rank.signal(signal.SIGCONT)
        self.began = time.monotonic()

    def back_to(self, rank, baseline):
        """A rank holds again what it held at the `baseline`, and no more."""
        wrong = settles(rank, baseline, kept=self.kept)
        now = rank.counts()
        grown = [now[name] - baseline[name] for name in ("fds", "tasks")]
        log.info("%s: %d files and %d threads more than at the baseline", rank.role, *grown)
        assert not wrong

    def alone(self, rank):
        """Counts of a rank whose last peer has gone."""
        assert not settles(rank, {"peers": 0, "links": 0})
        time.sleep(0.3)  # ZeroMQ closes the last socket in a thread of its own
        return rank.counts()
