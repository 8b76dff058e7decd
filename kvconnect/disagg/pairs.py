"""Which prefill rank sends what to which decode rank.

Derived from the placements alone, so both sides come to the same answer without talking: a
decode rank takes every (layer, head) it holds from exactly one prefill rank. Among prefill
ranks that hold the same ranges (replicated heads, MLA) the one is taken whose replica number
is the decode rank's own, modulo their count, so that the load spreads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvconnect.errors import LayoutError
from kvconnect.placement import Placement


@dataclass(frozen=True, slots=True)
class Share:
    """What source rank `source` (an index into the list of sources) sends: `part`."""

    source: int
    part: Placement


def share_of(source: Placement, target: Placement) -> Placement | None:
    """Return what `source` sends to `target`, None where another replica does or nothing."""
    if source.replica != target.replica % source.replicas:
        return None
    return source.meet(target)


def shares(sources: Sequence[Placement], target: Placement) -> tuple[Share, ...]:
    """Return the shares that together fill `target`, in the order of `sources`.

    Raises `LayoutError` naming the first (layer, head) that no source holds, or that two
    sources with different ranges hold (then neither is the right one to ask).

    >>> whole = Placement.whole(layers=2, heads=4)
    >>> half = Placement.tensor_parallel(layers=2, heads=4, rank=1, size=2)
    >>> shares([whole], half)[0].part.heads
    Span(start=2, stop=4, total=4)
    """
    parts = [share_of(source, target) for source in sources]
    found = [Share(index, part) for index, part in enumerate(parts) if part is not None]
    _check_filled(found, target)
    return tuple(found)


def _check_filled(found: Sequence[Share], target: Placement) -> None:
    layers, heads = target.layers, target.heads
    count = np.zeros((layers.extent, heads.extent), dtype=np.int64)
    for share in found:
        rows = slice(share.part.layers.start - layers.start, share.part.layers.stop - layers.start)
        columns = slice(share.part.heads.start - heads.start, share.part.heads.stop - heads.start)
        count[rows, columns] += 1
    wrong = np.argwhere(count != 1)
    if len(wrong):
        layer, head = (int(v) for v in wrong[0])
        raise LayoutError(
            f"layer {layers.start + layer}, head {heads.start + head} of the target (layers "
            f"{layers}, heads {heads}) is held by {int(count[layer, head])} of the sources; "
            f"exactly one must hold it"
        )
