"""Words of several tiers about one key."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Outcome, Status


def note_causes(
    causes: dict[int, str], label: str, index: NDArray[np.int64], outcome: Outcome
) -> None:
    """Add what a tier said about the keys at `index` that failed there; plain misses say nothing.

    A loop over failures only: where all is well there is none.
    """
    silent = np.isin(outcome.status, (Status.OK, Status.ABSENT))
    for at in sorted({*np.flatnonzero(~silent).tolist(), *outcome.causes}):
        if outcome.status[at] == Status.OK:
            continue
        words = f"{label}: {Status(int(outcome.status[at])).name}"
        if cause := outcome.causes.get(at):
            words += f", {cause}"
        key = int(index[at])
        causes[key] = f"{causes[key]}; {words}" if key in causes else words
