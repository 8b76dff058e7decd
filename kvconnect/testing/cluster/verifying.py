"""The end of a run: a fresh reader looks at every page that was acknowledged as stored."""

from __future__ import annotations

import time

import msgspec

from kvconnect.testing.cluster.journal import Journal, Verified
from kvconnect.testing.cluster.ledger import Ledger
from kvconnect.testing.cluster.topology import Topology

_LOOK_SECONDS = 20.0
_ANSWER_SECONDS = 5.0


class _Looked(msgspec.Struct):
    ok: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    wrong: tuple[int, ...] = ()


def verify(topology: Topology, journal: Journal) -> None:
    """Have a process that was not there before read them, of another TP size than the writers.

    Raises what starting it or asking it raises: then nothing can be said of the pages.
    """
    ledger = Ledger(topology.members, journal.entries())
    for group in ledger.groups:
        pages = list(ledger.acknowledged(group))
        with topology.reader(group) as reader:
            reader.start(topology.scenario.limits.start)
            told = reader.ask(
                "verify", _LOOK_SECONDS + _ANSWER_SECONDS, ids=pages, deadline=_LOOK_SECONDS
            )
            reader.quit(topology.scenario.limits.quit)
        looked = msgspec.convert(told, _Looked)
        journal.add(
            Verified(
                at=time.monotonic(),
                group=group,
                ok=looked.ok,
                missing=looked.missing,
                wrong=looked.wrong,
            )
        )
