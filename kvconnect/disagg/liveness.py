"""Whether peers are alive: signs of life, silence, and processes that have ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvconnect.disagg.peer_rank import PeerRank

_LAST_WORDS_SECONDS = 0.2
"""Between seeing that a peer's process has ended and counting it as lost: what it said last
may still be on the way."""


@dataclass(eq=False)
class Liveness:
    """Looks at the peers of one endpoint; used in the channel's thread only."""

    peers: dict[str, PeerRank]
    ping: float
    """Seconds between signs of life."""
    silence: float
    """Seconds after which a silent peer is lost."""
    call: Callable[[PeerRank], None]
    """Ask a peer for a sign of life."""
    lose: Callable[[PeerRank, str], None]
    gone: Callable[[PeerRank], None]
    """A lost peer's process has ended: it was dropped from `peers`, and can touch nothing."""
    _called: float = 0.0

    def tick(self, now: float) -> None:
        """Look at all peers once."""
        call = now - self._called >= self.ping
        if call:
            self._called = now
        for peer in list(self.peers.values()):
            if peer.ended is None and not peer.link.alive():
                peer.ended = now
            self._look(peer, now, call=call)

    def _look(self, peer: PeerRank, now: float, *, call: bool) -> None:
        if peer.lost is not None:
            # One that may still touch memory is kept: requests ask its link for their pages.
            if peer.ended is not None:
                del self.peers[peer.generation]
                self.gone(peer)
        elif peer.ended is not None:
            if now - peer.ended > _LAST_WORDS_SECONDS:
                self.lose(peer, "its process has ended")
        elif now - peer.heard > self.silence:
            self.lose(peer, f"it was silent for {self.silence:g} s")
        elif call:
            self.call(peer)
