"""What a chunk leaves behind that the library has not let go of."""

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

    `slots` are given back, puts of `open_names` given up once all is quiet; `runs` is memory
    that may still be written. A put that is not given up keeps its space from other objects.
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
            core.movers.submit(lambda: give_up(core, hold.open_names))
        chunk.job.let_go()

    until = time.monotonic() + seconds
    core.keeper.hold(Held(hold.runs, until, rule.settle, release, sum(chunk.nbytes)))


def give_up(core: Core, names: Sequence[str]) -> None:
    """Revoke puts that were begun; a failure only means that the master does it later."""
    try:
        core.client.revoke_put(list(names))
    except (BackendError, RuntimeError):
        core.count("revoke.failed")
    core.claims.give(names)
