"""What a chunk leaves behind that the library, or the kernel, has not let go of.

A store that failed may leave bytes in a socket, and the kernel goes on delivering them after the
library has closed it: to an owner that was cut off they come when the link is back. Their place
in its memory must not be another object's by then. So such a put is given up late: the master
keeps the space of one that is open (600 s; ``put_start_release_timeout_sec``), but gives it to
others at once when it is told that the put is given up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvconnect.errors import BackendError
from kvconnect_mooncake.core import Core
from kvconnect_mooncake.job import Chunk
from kvconnect_mooncake.quiet import Held


@dataclass(frozen=True, slots=True)
class Hold:
    """`took`: seconds of the call that failed; `longest`: entries of its largest object.

    `slots` are given back once all is quiet, puts of `open_names` given up `linger` seconds later;
    `runs` is memory that may still be written.
    """

    took: float
    longest: int
    slots: list[int]
    runs: Sequence[tuple[int, int]] = ()
    open_names: Sequence[str] = ()


def quarantine(core: Core, chunk: Chunk, hold: Hold) -> None:
    """Keep the memory of a chunk leased until it is quiet."""
    rule = core.keeper.rule
    seconds = rule.seconds(hold.took, hold.longest)
    core.count("quarantined")

    def release() -> None:
        core.slots.give(hold.slots)
        if hold.open_names:
            _linger(core, hold.open_names)
        chunk.job.let_go()

    until = time.monotonic() + seconds
    core.keeper.hold(Held(hold.runs, until, rule.settle, release, sum(chunk.nbytes)))


def _linger(core: Core, names: Sequence[str]) -> None:
    """Give puts up when their bytes can come no more."""

    def release() -> None:
        core.movers.submit(lambda: give_up(core, names))

    until = time.monotonic() + core.options.linger
    core.keeper.hold(Held((), until, core.keeper.rule.settle, release, 0))


def give_up(core: Core, names: Sequence[str]) -> None:
    """Revoke puts that were begun; a failure only means that the master does it later."""
    try:
        core.client.revoke_put(list(names))
    except (BackendError, RuntimeError):
        core.count("revoke.failed")
    core.claims.give(names)
