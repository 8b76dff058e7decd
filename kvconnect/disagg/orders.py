"""What one decode rank has asked a prefill rank for, and how far that is."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from kvconnect.disagg.endpoint import PeerRank
from kvconnect.disagg.messages import Grant, unpack_pages
from kvconnect.disagg.transport import PeerTransfer, Way
from kvconnect.page_index import U64, check_page_ids

Layers = tuple[int, int]


@dataclass(eq=False)
class Order:
    """What one decode rank asked for, and how far it is."""

    peer: PeerRank
    pages: U64
    slots: int
    way: Way
    checksum: bool
    until: float
    moved: list[Layers] = field(default_factory=list)
    jobs: int = 0
    lingering: list[PeerTransfer] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    complete: bool = False
    aborted: bool = False

    def quiet(self) -> bool:
        """Tell whether nothing of this order moves any more."""
        self.lingering = [transfer for transfer in self.lingering if not transfer.done()]
        return not self.jobs and not self.lingering

    def done(self, layers: Layers) -> None:
        """Count global layers as moved."""
        self.moved.append(layers)
        part = self.peer.part
        if part is not None:
            self.complete = sum(b - a for a, b in self.moved) == part.layers.extent

    @classmethod
    def of(cls, peer: PeerRank, grant: Grant) -> Order:
        """Read a grant; `PageIndexError` where its pages are not the peer's."""
        return cls(
            peer,
            check_page_ids(unpack_pages(grant.pages), peer.side.pool.pages),
            grant.slots,
            Way.PUSH if grant.way == "push" else Way.PULL,
            grant.checksum,
            time.monotonic() + grant.seconds,
            complete=peer.part is None,
        )


def pages_for(slots: int, page_size: int) -> int:
    """Return how many pages of `page_size` hold `slots` slots."""
    return -(-slots // page_size)
