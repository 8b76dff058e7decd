"""Keys that come twice in one call, which an engine may send and a connector refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rounds:
    """A call cut so that each round names every key once.

    `rounds` hold places in the call; `same_as` maps each place left out to the place whose
    result is its own.
    """

    rounds: tuple[tuple[int, ...], ...]
    same_as: dict[int, int]


def rounds_of(keys: Sequence[str], pages: Sequence[int], *, every_page: bool) -> Rounds:
    """Cut a call of `keys` with one page id each.

    A load must fill every page that is named (`every_page`), so a key with another page goes
    into a later round; a store keeps the first page of a key, because one key is one content.

    >>> rounds_of(["a", "b", "a"], [0, 1, 2], every_page=True).rounds
    ((0, 1), (2,))
    >>> rounds_of(["a", "b", "a"], [0, 1, 2], every_page=False).same_as
    {2: 0}
    """
    first: dict[object, int] = {}
    seen: dict[str, int] = {}
    same_as: dict[int, int] = {}
    rounds: list[list[int]] = []
    for place, (key, page) in enumerate(zip(keys, pages, strict=True)):
        name = (key, page) if every_page else key
        earlier = first.setdefault(name, place)
        if earlier != place:
            same_as[place] = earlier
            continue
        turn = seen.get(key, 0)
        seen[key] = turn + 1
        if turn == len(rounds):
            rounds.append([])
        rounds[turn].append(place)
    return Rounds(tuple(map(tuple, rounds)), same_as)
