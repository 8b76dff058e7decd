"""The seam between the store and what moves bytes: groups in, an error or none per group out.

An engine knows nothing of keys, checksums or the index. It gets ranges of open files and asks
the work for the memory that belongs to each, as buffers whose (address, nbytes) are what a
descriptor-taking engine (NIXL POSIX, GDS, GUSLI) registers and posts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvconnect.backend import Closable, Op

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


class Work(Protocol):
    """What the store does around the moving of one group; called from any thread."""

    def lend(self, group: Group) -> AbstractContextManager[Sequence[memoryview]]:
        """Lend the group's memory, `group.nbytes` in all; filled already, when storing."""

    def landed(self, group: Group, buffers: Sequence[memoryview]) -> None:
        """Take note that every byte of the group has been moved."""

    def check(self) -> None:
        """Raise when the transfer should stop: asked before each group."""


class IoEngine(Closable, Protocol):
    """Moves groups between files and memory."""

    def run(self, op: Op, groups: Sequence[Group], work: Work) -> list[Exception | None]:
        """Move all groups; return each one's error. All memory is quiet on return."""

    def each(self, call: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Call for every item on the engine's threads; the first error is raised at the end."""
