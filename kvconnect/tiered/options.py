"""Options of a tiered store; sizes in bytes, times in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from kvconnect.config import Bytes
from kvconnect.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TieredOptions:
    """How the tiers work together; every queue and buffer has its bound here."""

    write: Literal["through", "back"] = "through"
    """through: a put stores in all tiers at once. back: in the first, in the others later."""
    require: Literal["first", "all"] = "first"
    """Which tiers must have a key for a write-through put to be OK: one that answers, or all."""
    timeout: float = 30.0
    """Deadline of one batch over all tiers; each but the last gets half of what is left."""
    promote_bytes: Bytes = 64 << 20
    """Copies waiting to go into a faster tier; 0 promotes nothing."""
    promote_ttl: float | None = None
    """TTL of promoted copies: a store does not tell how long an object has left."""
    queue_entries: int = 1 << 16
    """Keys waiting for write-back."""
    queue_bytes: Bytes = 4 << 30
    """Bytes those keys have; they lie in the first tier, not in memory."""
    copy_bytes: Bytes = 32 << 20
    """Buffer through which write-back copies go; a larger object is written through."""
    close_timeout: float = 30.0
    """How long `close` goes on writing back; what is left then is only in the first tier."""
    negative_ttl: float = 1.0
    """How long a key that a slower tier lacked is not asked for again; 0 asks each time."""
    negative_entries: int = 1 << 16
    trip_after: int = 3
    """Failed calls in a row that open a tier's circuit; a time-out opens it at once."""
    retry_after: float = 5.0
    """How long an open circuit waits before one call may try the tier again."""

    def __post_init__(self) -> None:
        """Refuse what waits for ever, or holds nothing."""
        for name in ("timeout", "close_timeout", "retry_after"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"tiered: {name}={getattr(self, name)} s; it must be above 0 and finite"
                )
        for name in ("queue_entries", "queue_bytes", "copy_bytes", "trip_after"):
            if getattr(self, name) < 1:
                raise ConfigError(f"tiered: {name}={getattr(self, name)}; it must be at least 1")
        if not (self.negative_ttl >= 0 and self.negative_entries >= 0):
            raise ConfigError("tiered: negative_ttl and negative_entries must be at least 0")
        if self.promote_ttl is not None and not self.promote_ttl > 0:
            raise ConfigError(f"tiered: promote_ttl={self.promote_ttl} s; it must be above 0")
        if self.write == "back" and self.require == "all":
            raise ConfigError(
                "tiered: write=back stores in the first tier only before it says OK; "
                "require=all needs write=through"
            )
