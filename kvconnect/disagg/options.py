"""How an endpoint works: its options, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from kvconnect.config import Bytes
from kvconnect.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    """How an endpoint works; sizes in bytes, times in seconds."""

    name: str = "rank"
    """For messages and tables."""
    fleet: str = "fleet"
    """Which instance of the engine this rank belongs to; the same on all its ranks."""
    ranks: int = 1
    """How many ranks that instance has."""
    timeout: float = 30.0
    """Deadline of a request where the call gives none, and of connecting."""
    ping: float = 0.5
    peer_timeout: float = 3.0
    """Silence after which a peer counts as lost."""
    batch_bytes: Bytes = 64 << 20
    """Most bytes in one transport batch; two of a request are under way at a time."""
    workers: int = 2
    staging: Bytes = 256 << 20
    """Memory for packed pieces, registered once; when it is full senders wait."""
    slot: Bytes = 8 << 20
    """Bytes of a staging slot."""
    stage: Literal["auto", "always", "never"] = "auto"
    """Prefill side: send packed where that is computed to be faster, or as told."""
    min_run_bytes: Bytes | None = None
    """Prefill side, with `stage` auto: send packed what has runs below this, and nothing else,
    instead of by computed cost."""
    min_slots: int = 1
    """Fewest slots that a piece common to both page sizes may have."""

    def __post_init__(self) -> None:
        """Check ranges; `ConfigError` names the option."""
        for name in ("timeout", "ping", "peer_timeout", "batch_bytes", "staging", "slot"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be above 0 and finite")
        if self.min_run_bytes is not None and self.min_run_bytes < 0:
            raise ConfigError(f"min_run_bytes={self.min_run_bytes!r} must not be below 0")
        if self.min_run_bytes is not None and self.stage != "auto":
            raise ConfigError(
                f"min_run_bytes={self.min_run_bytes} with stage={self.stage!r}: nothing is chosen "
                f"there; leave one of them out"
            )
        for name in ("ranks", "workers", "min_slots"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be at least 1")
