"""Registration with every tier, or with none."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from kvconnect.backend import Backend, Closing, Registration
from kvconnect.region import Region


def register_everywhere(
    backends: Sequence[Backend], regions: Sequence[Region]
) -> list[Registration]:
    """Register with each backend; on failure the ones done are closed again, last first."""
    with contextlib.ExitStack() as undo:
        handles = [undo.enter_context(backend.register(regions)) for backend in backends]
        undo.pop_all()
        return handles


class Joint(Closing):
    """The store's own registration and its tiers', closed as one; twice is fine."""

    def __init__(self, own: Registration, tiers: Sequence[Registration]) -> None:
        """Take over all of them."""
        self._own, self._tiers = own, tiers

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions as the caller gave them."""
        return self._own.regions

    def close(self) -> None:
        """Wait for transfers over all tiers, then release them, the last registered first."""
        self._own.close()
        with contextlib.ExitStack() as stack:
            for handle in self._tiers:
                stack.callback(handle.close)

    def __repr__(self) -> str:
        return f"{self._own!r} in {len(self._tiers)} tiers"
