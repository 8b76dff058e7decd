"""`Wrapper`: forwards everything, so that a subclass says only what it changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvconnect import backend as protocols
from kvconnect.backend import Backend, Batch, Capabilities, Closing, Registration, Transfer
from kvconnect.region import Region

OPTIONAL: tuple[type, ...] = (
    protocols.SupportsDelete,
    protocols.SupportsListing,
    protocols.SupportsClear,
    protocols.SupportsRecords,
    protocols.SupportsStats,
    protocols.SupportsLocate,
)
"""Every protocol beyond the core; a test compares it with what `kvconnect.backend` defines."""


def members(protocol: type) -> list[str]:
    """Return the names of the methods that `protocol` itself defines."""
    return [name for name in vars(protocol) if not name.startswith("_")]


class Wrapper(Closing):
    """A backend that does what `inner` does.

    Invariant: for each optional protocol, the wrapper has it exactly when `inner` has it
    (or the subclass implements it). Closing the wrapper closes `inner`.
    """

    def __init__(self, inner: Backend) -> None:
        """Take over `inner`; nothing else should call it from now on."""
        self.inner = inner
        # Bound into the instance, not answered by __getattr__: from Python 3.12 on,
        # isinstance with a runtime protocol looks attributes up statically and would not see
        # a forwarded one; a method on the class would claim abilities `inner` lacks.
        for protocol in OPTIONAL:
            if isinstance(inner, protocol):
                for name in members(protocol):
                    if not hasattr(type(self), name):
                        setattr(self, name, getattr(inner, name))

    @property
    def name(self) -> str:
        """The wrapper and what it wraps, as in ``metered(memory)``."""
        return f"{type(self).__name__.lower()}({self.inner.name})"

    @property
    def capabilities(self) -> Capabilities:
        """What `inner` can take."""
        return self.inner.capabilities

    def register(self, regions: Sequence[Region]) -> Registration:
        """Register with `inner`."""
        return self.inner.register(regions)

    def exists(self, keys: Sequence[str], nbytes: Sequence[int]) -> NDArray[np.bool_]:
        """Ask `inner`: (keys,) bool."""
        return self.inner.exists(keys, nbytes)

    def submit(self, batch: Batch) -> Transfer:
        """Submit to `inner`."""
        return self.inner.submit(batch)

    def close(self) -> None:
        """Close `inner`."""
        self.inner.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"


_: type[Backend] = Wrapper
