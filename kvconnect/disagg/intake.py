"""One request on the decode side: what each prefill rank was to move, and what is here."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from kvconnect.disagg.endpoint import PeerRank
from kvconnect.disagg.messages import Moved
from kvconnect.disagg.orders import Layers
from kvconnect.disagg.requests import Request
from kvconnect.disagg.transport import PeerTransfer, Way
from kvconnect.errors import ConfigError


@dataclass(eq=False)
class Heap:
    """Packed pieces of some layers: how many have come, are being unpacked, and the last word."""

    pieces: int = 0
    unpacking: int = 0
    moved: Moved | None = None


@dataclass(eq=False)
class Intake:
    """One prefill rank's share of a request, and how much of it is here."""

    peer: PeerRank
    layers: list[Layers] = field(default_factory=list)
    checking: int = 0
    nbytes: int = 0
    lingering: list[PeerTransfer] = field(default_factory=list)
    heaps: dict[Layers, Heap] = field(default_factory=dict)
    complete: bool = False
    quiet: bool = False

    def expects(self, layers: Layers) -> None:
        """Count layers in; `ConfigError` where they are not this share's, or came before."""
        self.check(layers)
        self.layers.append(layers)

    def check(self, layers: Layers) -> None:
        """Raise `ConfigError` where layers are not this share's, or came before."""
        part = self.peer.part
        if part is None or not (part.layers.start <= layers[0] < layers[1] <= part.layers.stop):
            raise ConfigError(f"layers {layers} are not what {self.peer} was to move")
        if any(a < layers[1] and layers[0] < b for a, b in self.layers):
            raise ConfigError(f"layers {layers} came twice from {self.peer}")

    def look(self) -> bool:
        """Tell whether all layers are here and checked."""
        part = self.peer.part
        done = sum(b - a for a, b in self.layers)
        return part is None or (done == part.layers.extent and not self.checking)

    def told_all(self, way: Way) -> bool:
        """Tell whether everything has arrived by the peer's word: what is left is done here."""
        if self.complete or self.peer.part is None:
            return True
        last = {layers for layers, heap in self.heaps.items() if heap.moved is not None}
        layers = last.union(self.layers)
        return way is Way.PUSH and sum(b - a for a, b in layers) == self.peer.part.layers.extent

    def at_rest(self) -> bool:
        """Tell whether this share can no longer touch the pages."""
        self.lingering = [transfer for transfer in self.lingering if not transfer.done()]
        if self.checking or self.lingering:
            return False
        return self.quiet or self.peer.part is None or not self.peer.link.alive()


@dataclass(eq=False)
class Receiving(Request):
    """A request on the decode side; see `DecodeEndpoint.receive`."""

    slots: int = 0
    way: Way = Way.PUSH
    checked: bool = False
    intakes: dict[str, Intake] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)
