"""Comparing objects that are there with those to store, by their trailers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvconnect.backend import Status
from kvconnect_mooncake import trailer
from kvconnect_mooncake.core import Core
from kvconnect_mooncake.job import Chunk
from kvconnect_mooncake.tails import read_trailers
from kvconnect_mooncake.trailer import Trailer


@dataclass(frozen=True, slots=True)
class Compared:
    """Of objects to store: those that are there, and those of which nothing is known now.

    Nothing says that the latter may be replaced: another writer has them open, or their trailers
    cannot be read.
    """

    same: set[int] = field(default_factory=set)
    unread: set[int] = field(default_factory=set)


def compare(core: Core, chunk: Chunk, taken: Sequence[int], sealed: Sequence[Trailer]) -> Compared:
    """Compare objects `taken` of a chunk with what is there; `sealed`: trailers of the chunk."""
    found = core.client.find([chunk.names[at] for at in taken])
    told = Compared(unread={at for at in taken if chunk.names[at] not in found})
    for tail in (trailer.PLAIN, trailer.EXPIRING):
        fits = [
            at
            for at in taken
            if at not in told.unread and found[chunk.names[at]].nbytes == chunk.nbytes[at] + tail
        ]
        trailers = read_trailers(
            core,
            [chunk.keys[at] for at in fits],
            [chunk.nbytes[at] for at in fits],
            tail,
            chunk.job.until,
        )
        for at, one in zip(fits, trailers, strict=True):
            if isinstance(one, Trailer) and one.serves(sealed[at]):
                told.same.add(at)
            elif isinstance(one, Status) and one not in {Status.CHECKSUM, Status.IDENTITY}:
                told.unread.add(at)
    return told
