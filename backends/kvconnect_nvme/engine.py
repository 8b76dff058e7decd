"""The seam between the store and what moves bytes: groups in, an error or none per group out.

An engine knows nothing of keys, checksums or the index. It gets ranges of open files and asks
the work for the memory that belongs to each: as buffers, for system calls, or as rows of
(address, nbytes, offset), for what takes descriptors (NIXL POSIX, GDS, GUSLI).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Closable, Op
from kvconnect.region import Region

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Group:
    """Objects that are neighbours in one file: one read or write of `nbytes` at `offset`.

    `objects`: index in the batch of each, by file offset; `starts`: where each begins, in
    bytes from `offset`; `bounced`: whether they pass through a bounce buffer.
    """

    slab: int
    fd: int
    offset: int
    nbytes: int
    objects: tuple[int, ...]
    starts: tuple[int, ...]
    bounced: bool


class NoSlotError(Exception):
    """No bounce buffer is free at the moment, and the caller did not want to wait."""


class Lent(Protocol):
    """The memory of one group, in file order."""

    def views(self) -> Sequence[memoryview]:
        """Return buffers that cover the group without gaps, `group.nbytes` in all."""

    def rows(self) -> NDArray[np.uint64]:
        """Return (n, 3) rows: address, nbytes, bytes from the group's offset.

        Padding between objects has no row: it need not be moved.
        """


class Work(Protocol):
    """What the store does around the moving of one group; called from any thread."""

    def lend(self, group: Group, *, wait: bool = True) -> AbstractContextManager[Lent]:
        """Lend the group's memory, filled already when storing; it is quiet before the exit.

        `wait=False` raises `NoSlotError` rather than wait for a bounce buffer: whoever holds
        one must not wait for another.
        """

    def landed(self, group: Group, lent: Lent) -> None:
        """Take note that every byte of the group has been moved."""

    def check(self) -> None:
        """Raise when the transfer should stop: asked before each group."""


class IoEngine(Closable, Protocol):
    """Moves groups between files and memory."""

    @property
    def name(self) -> str:
        """What `io=` calls it."""

    @property
    def in_place(self) -> bool:
        """Whether callers' memory is moved in place; all passes through bounce buffers if not."""

    @property
    def group_bytes(self) -> int:
        """Bytes per group that it moves best: efficient, and enough groups to overlap."""

    def register(self, region: Region, *, own: bool = False) -> Closable:
        """Make memory known, once for all transfers; `RegistrationError` if it is refused.

        `own`: the store's own buffer, whose contents nobody misses.
        """

    def run(self, op: Op, groups: Sequence[Group], work: Work) -> list[Exception | None]:
        """Move all groups; return each one's error. All memory is quiet on return."""

    def each(self, call: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Call for every item on the engine's threads; the first error is raised at the end."""

    def stats(self) -> Mapping[str, int | str]:
        """Return what is worth knowing of it."""
