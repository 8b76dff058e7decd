"""Opening a peer transport by name: ``shm``, ``mooncake``, ``nixl``, or one that was installed.

Others register themselves under the entry-point group ``kvconnect.peer_transports``, with a
function of one mapping of options.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points

from kvconnect.config import parse_options
from kvconnect.disagg.shm import ShmTransport
from kvconnect.disagg.transport import PeerTransport
from kvconnect.errors import ConfigError

GROUP = "kvconnect.peer_transports"
_BUILT_IN = {
    "shm": "kvconnect.disagg.transports:open_shm",
    "mooncake": "kvconnect_mooncake.peers:open_transport",
    "nixl": "kvconnect_nixl.peers:open_transport",
}

Opener = Callable[[Mapping[str, object]], PeerTransport]


@dataclass(frozen=True, slots=True)
class ShmOptions:
    """Options of shm; `threads` copy at the same time."""

    threads: int = 2

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if not 1 <= self.threads <= 64:
            raise ConfigError(f"shm: threads={self.threads}; it must be 1 to 64")


def open_shm(options: Mapping[str, object]) -> PeerTransport:
    """Open the shared-memory transport; memory from its `allocate` is shared."""
    return ShmTransport(threads=parse_options(options, ShmOptions, "shm").threads)


def open_transport(name: str, options: Mapping[str, object] | None = None) -> PeerTransport:
    """Open the transport called `name`.

    Raises `ConfigError` with close matches for names and options that are unknown, and
    `UnavailableError` where a library is missing or cannot be used here.
    """
    transport: PeerTransport = _opener(name)(options or {})
    return transport


def known() -> list[str]:
    """Return the names of all transports, sorted; loads none."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


def _opener(name: str) -> Opener:
    if name in _BUILT_IN:
        module, _, function = _BUILT_IN[name].partition(":")
        found: Opener = getattr(importlib.import_module(module), function)
        return found
    for point in entry_points(group=GROUP, name=name):
        loaded: Opener = point.load()
        return loaded
    close = difflib.get_close_matches(name, known(), n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise ConfigError(f"no peer transport is called {name!r}{hint} (known: {', '.join(known())})")
