"""Putting the presence table right where it contradicts the entries, which are what counts.

A word can be lost or stay behind only by damage: a flipped bit in the table or in an entry, two
objects with one word. Whoever notices has it corrected: a store of what is stored already, a
load that misses, `verify`.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from kvconnect_nvme.builder import build
from kvconnect_nvme.core import Core
from kvconnect_nvme.pending import Changed
from kvconnect_nvme.tables import Session

Object = tuple[bytes, int]
"""Packed key and size."""


def contradicted(core: Core, expected: Changed) -> list[Object]:
    """Return the objects of which the table says something else; none where there is none."""
    if not expected:
        return []
    with core.env.read() as session:
        view = core.env.presence.view(session)
    if view is None:
        return []
    words = view.pending.words([key for key, _ in expected], [size for _, size in expected])
    how = list(expected.values())
    there = words | np.array([bool(one) for one in how], dtype=np.uint64)
    wanted = np.where([one is None for one in how], np.uint64(0), there)
    wrong = view.find(words) != wanted
    return [one for one, differs in zip(expected, wrong.tolist(), strict=True) if differs]


def correct(core: Core, objects: Collection[Object]) -> int:
    """Have the table say of these objects what the entries say now; return how many are there."""
    if not objects:
        return 0

    def change(session: Session) -> int:
        index = core.index(session)
        return sum(index.recall(key, nbytes) for key, nbytes in objects)

    return core.env.write(change)


def complete(core: Core) -> None:
    """Finish the table, and make it anew where it holds words of no entry."""
    env = core.env
    build(env)
    if not env.write(env.presence.is_exact):
        build(env, afresh=True)
