"""What one decode rank has asked a prefill rank for, and how far that is."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from kvconnect.disagg.messages import Grant, unpack_pages
from kvconnect.disagg.peer_rank import PeerRank
from kvconnect.disagg.requests import Filled
from kvconnect.disagg.sections import KV, Section
from kvconnect.disagg.transport import PeerTransfer, Way
from kvconnect.errors import ConfigError
from kvconnect.page_index import check_page_ids


@dataclass(eq=False)
class Order:
    """What one decode rank asked for, and how far it is; `filled` are its pages by pool."""

    peer: PeerRank
    filled: dict[str, Filled]
    way: Way
    checksum: bool
    until: float
    moved: list[Section] = field(default_factory=list)
    jobs: int = 0
    lingering: list[PeerTransfer] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    complete: bool = False
    aborted: bool = False

    def quiet(self) -> bool:
        """Tell whether nothing of this order moves any more."""
        self.lingering = [transfer for transfer in self.lingering if not transfer.done()]
        return not self.jobs and not self.lingering

    def done(self, section: Section) -> None:
        """Count a section as moved."""
        self.moved.append(section)
        self.complete = self.peer.all_of(self.moved)

    @classmethod
    def of(cls, peer: PeerRank, grant: Grant) -> Order:
        """Read a grant; `PageIndexError` where its pages are not the peer's.

        `ConfigError` unless it names every pool that the peer holds, once.
        """
        given = [(KV, grant.pages, grant.slots)]
        given += [(one.pool, one.pages, one.slots) for one in grant.side]
        names = sorted(name for name, _, _ in given)
        if names != sorted(peer.sides):
            raise ConfigError(f"pages of {names} are granted, {peer} holds {sorted(peer.sides)}")
        filled = {
            name: Filled(check_page_ids(unpack_pages(pages), peer.sides[name].pool.pages), slots)
            for name, pages, slots in given
        }
        return cls(
            peer,
            filled,
            Way.PUSH if grant.way == "push" else Way.PULL,
            grant.checksum,
            time.monotonic() + grant.seconds,
            complete=not peer.parts,
        )


def pages_for(slots: int, page_size: int) -> int:
    """Return how many pages of `page_size` hold `slots` slots."""
    return -(-slots // page_size)
