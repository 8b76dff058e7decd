"""Several stores as one, fastest first (see `kvconnect.tiered.backend` and docs/tiered.md)."""

from kvconnect.tiered.backend import TieredBackend
from kvconnect.tiered.opening import open_backend, open_tiers
from kvconnect.tiered.options import TieredOptions

__all__ = ["TieredBackend", "TieredOptions", "open_backend", "open_tiers"]
