"""Arguments of the library's calls: rows of runs, cut where an object has too many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvconnect_mooncake.job import Chunk


class Part(NamedTuple):
    """Some runs of one object, one after the other from `offset` bytes in."""

    addresses: list[int]
    sizes: list[int]
    offset: int


def with_slots(
    chunk: Chunk, objects: list[int], slots: list[int], trailer: list[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return addresses and sizes of objects with their trailers, if they have slots."""
    if not slots:
        return [chunk.addresses[at] for at in objects], [chunk.sizes[at] for at in objects]
    return (
        [[*chunk.addresses[at], slot] for at, slot in zip(objects, slots, strict=True)],
        [[*chunk.sizes[at], size] for at, size in zip(objects, trailer, strict=True)],
    )


def starts(sizes: list[int], offset: int = 0) -> list[int]:
    """Return where runs begin that lie one after the other from `offset`.

    >>> starts([3, 4, 5], 10)
    [10, 13, 17]
    """
    out = []
    for size in sizes:
        out.append(offset)
        offset += size
    return out


def parts(addresses: list[int], sizes: list[int], most: int) -> Iterator[Part]:
    """Cut the runs of one object into parts of at most `most`."""
    offset = 0
    for low in range(0, len(sizes), most):
        some = sizes[low : low + most]
        yield Part(addresses[low : low + most], some, offset)
        offset += sum(some)
