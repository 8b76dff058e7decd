"""One request on the decode side: what each prefill rank was to move, and what is here."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from kvconnect.disagg.messages import Moved
from kvconnect.disagg.peer_rank import PeerRank
from kvconnect.disagg.requests import Filled, Request
from kvconnect.disagg.sections import Section
from kvconnect.disagg.transport import PeerTransfer, Way
from kvconnect.errors import ConfigError


@dataclass(eq=False)
class Heap:
    """Packed pieces of a section: how many have come, are being unpacked, and the last word."""

    pieces: int = 0
    unpacking: int = 0
    moved: Moved | None = None


@dataclass(eq=False)
class Intake:
    """One prefill rank's share of a request, and how much of it is here."""

    peer: PeerRank
    sections: list[Section] = field(default_factory=list)
    checking: int = 0
    nbytes: int = 0
    lingering: list[PeerTransfer] = field(default_factory=list)
    heaps: dict[Section, Heap] = field(default_factory=dict)
    complete: bool = False
    quiet: bool = False

    def expects(self, section: Section) -> None:
        """Count a section in; `ConfigError` where it is not this share's, or came before."""
        self.check(section)
        self.sections.append(section)

    def check(self, section: Section) -> None:
        """Raise `ConfigError` where a section is not this share's, or came before."""
        if section.extent < 1 or self.peer.common(section) != section:
            raise ConfigError(f"{section} are not what {self.peer} was to move")
        if any(section.meets(other) for other in self.sections):
            raise ConfigError(f"{section} came twice from {self.peer}")

    def look(self) -> bool:
        """Tell whether all layers of all pools are here and checked."""
        return self.peer.all_of(self.sections) and not self.checking

    def told_all(self, way: Way) -> bool:
        """Tell whether everything has arrived by the peer's word: what is left is done here."""
        if self.complete or not self.peer.parts:
            return True
        last = {section for section, heap in self.heaps.items() if heap.moved is not None}
        return way is Way.PUSH and self.peer.all_of(last.union(self.sections))

    def at_rest(self) -> bool:
        """Tell whether this share can no longer touch the pages."""
        self.lingering = [transfer for transfer in self.lingering if not transfer.done()]
        if self.checking or self.lingering:
            return False
        return self.quiet or not self.peer.parts or not self.peer.link.alive()


@dataclass(eq=False)
class Receiving(Request):
    """A request on the decode side; see `DecodeEndpoint.receive`. `filled` is by pool."""

    filled: dict[str, Filled] = field(default_factory=dict)
    way: Way = Way.PUSH
    checked: bool = False
    intakes: dict[str, Intake] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)
