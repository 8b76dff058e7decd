"""One rank of the other side, as this side knows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvconnect.disagg.cause import Cause
from kvconnect.disagg.conform import Side
from kvconnect.disagg.messages import Hello
from kvconnect.disagg.pair_plan import PairPlan
from kvconnect.disagg.sections import Section, extent_of
from kvconnect.disagg.transport import Peer
from kvconnect.placement import Placement


@dataclass(eq=False)
class PeerRank:
    """One generation of a rank of the other side."""

    route: str
    generation: str
    hello: Hello
    sides: Mapping[str, Side]
    """What it holds, by pool."""
    link: Peer
    parts: Mapping[str, Placement]
    """What moves between the two, by pool; pools of which nothing does are not in it."""
    heard: float
    lost: str | None = None
    """Why the peer counts as lost."""
    cause: Cause = Cause.PEER_LOST
    ended: float | None = None
    """When its process was seen to have ended."""
    plans: dict[Section, PairPlan] = field(default_factory=dict)

    def sections(self) -> list[Section]:
        """Return all that moves between the two."""
        return [
            Section(name, part.layers.start, part.layers.stop) for name, part in self.parts.items()
        ]

    def common(self, section: Section) -> Section | None:
        """Return what of a section moves between the two, or None."""
        part = self.parts.get(section.pool)
        if part is None:
            return None
        start = max(section.start, part.layers.start)
        stop = min(section.stop, part.layers.stop)
        return Section(section.pool, start, stop) if start < stop else None

    def all_of(self, sections: Iterable[Section]) -> bool:
        """Tell whether sections of what moves, none of which meet, are all of it."""
        return extent_of(sections) == extent_of(self.sections())

    def __str__(self) -> str:
        return f"{self.hello.role} {self.hello.fleet}/{self.hello.name}"
