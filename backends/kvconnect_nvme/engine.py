"""I/O engines: they move between runs of memory and ranges of a file, and know nothing else.

A `Piece` is one contiguous range of one file and the memory it goes to or comes from. Engines
run many pieces at once; `before` and `after` (checksums, bounce copies) run beside the I/O of
other pieces, so that hashing costs no time of its own. The threads engine is preadv/pwritev;
NIXL plug-ins take the same pieces as descriptor arrays.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from kvconnect.backend import Closing, Op

Views = list[memoryview]

IOV_MAX = 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """One contiguous file range [offset, offset + nbytes) and its memory, in order.

    `memory` is asked for the views when the piece runs (a bounce buffer is taken then, not
    before). `after` is called with the views once they are moved, `finish` always.
    """

    fd: int
    offset: int
    nbytes: int
    memory: Callable[[], Views]
    after: Callable[[Views], None] | None = None
    finish: Callable[[], None] | None = None


class IoEngine(Protocol):
    """Moves pieces. Closes twice safely."""

    name: str

    def run(
        self, op: Op, pieces: Sequence[Piece], stop: Callable[[], bool]
    ) -> list[BaseException | None]:
        """Move all pieces and wait for them; the error of each, None where it moved whole.

        `stop` is asked before each piece starts; a piece that did not start has a
        `PieceSkipped`. When this returns, no memory of the pieces is touched any more.
        """

    def close(self) -> None:
        """Stop the engine's threads."""


class PieceSkipped(Exception):  # noqa: N818 - not an error: the caller asked to stop
    """The piece did not start."""


class ThreadsEngine(Closing):
    """preadv and pwritev on a pool of threads; the GIL is released while they run."""

    name = "threads"

    def __init__(self, threads: int) -> None:
        """Use `threads` threads, which bounds pieces (and bounce buffers) under way."""
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvconnect-nvme-io")

    def run(
        self, op: Op, pieces: Sequence[Piece], stop: Callable[[], bool]
    ) -> list[BaseException | None]:
        """Move all pieces; see `IoEngine.run`."""
        futures: list[Future[None]] = [
            self._threads.submit(_move, op, piece, stop) for piece in pieces
        ]
        return [future.exception() for future in futures]

    def close(self) -> None:
        """Wait for the threads and end them; the second call does nothing."""
        self._threads.shutdown(wait=True)


def _move(op: Op, piece: Piece, stop: Callable[[], bool]) -> None:
    if stop():
        raise PieceSkipped
    try:
        views = piece.memory()
        call = os.pwritev if op is Op.STORE else os.preadv
        transfer(call, piece.fd, views, piece.offset, piece.nbytes)
        if piece.after is not None:
            piece.after(views)
    finally:
        if piece.finish is not None:
            piece.finish()


def transfer(
    call: Callable[[int, Views, int], int], fd: int, views: Views, offset: int, nbytes: int
) -> None:
    """Call preadv or pwritev until all `nbytes` moved; OSError(EIO) where the file ends early."""
    moved = call(fd, views, offset)
    while moved < nbytes:
        rest = _skip(views, moved)
        step = call(fd, rest, offset + moved)
        if step <= 0:
            raise OSError(errno.EIO, f"{moved} of {nbytes} bytes moved at offset {offset}")
        moved += step


def _skip(views: Views, nbytes: int) -> Views:
    out = []
    for view in views:
        if nbytes >= len(view):
            nbytes -= len(view)
        else:
            out.append(view[nbytes:] if nbytes else view)
            nbytes = 0
    return out
