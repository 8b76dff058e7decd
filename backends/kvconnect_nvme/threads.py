"""The threads engine: preadv and pwritev on a few threads; needs nothing but the kernel."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kvconnect.backend import Closable, Closing, Op
from kvconnect.region import Region
from kvconnect_nvme.engine import Group, IoEngine, Work

T = TypeVar("T")
R = TypeVar("R")

IOV_MAX = os.sysconf("SC_IOV_MAX")
CALL_BYTES = 64 << 20
"""Bytes per system call at most, far below the 2 GiB where the kernel cuts calls short."""
CORES = len(os.sched_getaffinity(0))
_NOT_AT_ONCE = frozenset({errno.EAGAIN, errno.EOPNOTSUPP})
"""What the kernel says of bytes that are not in the page cache, or of files it cannot ask."""


class Nothing(Closing):
    """The registration of memory that needs none."""

    def close(self) -> None:
        """Nothing to give back."""


class ThreadsEngine(Closing):
    """`threads` threads that live as long as the engine."""

    name = "threads"
    in_place = True
    group_bytes = 4 << 20

    def __init__(self, threads: int, reason: str = "", *, cached: bool = False) -> None:
        """Threads start when first needed; `reason`: why this engine, for the statistics.

        `cached`: the files are read through the page cache, so ask it first.
        """
        self._reason, self._threads, self._cached = reason, threads, cached
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvconnect-nvme-io")

    def register(self, region: Region, *, own: bool = False) -> Closable:  # noqa: ARG002
        """Take any memory: system calls do."""
        return Nothing()

    def stats(self) -> Mapping[str, int | str]:
        """Say which engine it is, and why."""
        return {"io": self.name, "io_reason": self._reason}

    def run(self, op: Op, groups: Sequence[Group], work: Work) -> list[Exception | None]:
        """Move all groups; return each one's error."""
        if self._cached and op is Op.LOAD:
            return self._run_cached(groups, work)
        return self.each(lambda group: _guarded(op, group, work), groups)

    def _run_cached(self, groups: Sequence[Group], work: Work) -> list[Exception | None]:
        """Copy what is in memory on as many threads as there are cores, then read the rest.

        A disk wants many requests at once, but copies by more threads than cores only take each
        other's core and caches.
        """
        errors: list[Exception | None] = [None] * len(groups)
        todo = deque(enumerate(groups))

        def copy(_: int) -> None:
            while True:
                try:
                    number, group = todo.popleft()
                except IndexError:
                    return  # all are taken
                errors[number] = _guarded(Op.LOAD, group, work, os.RWF_NOWAIT)

        self.each(copy, range(min(CORES, self._threads, len(groups))))
        late = [number for number, error in enumerate(errors) if _not_at_once(error)]
        again = self.each(lambda number: _guarded(Op.LOAD, groups[number], work), late)
        for number, error in zip(late, again, strict=True):
            errors[number] = error
        return errors

    def start(self, call: Callable[[], R]) -> Future[R]:
        """Call on one of the threads."""
        return self._pool.submit(call)

    def each(self, call: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Call for every item; one item alone runs here, to spare the hand-over."""
        todo = list(items)
        if len(todo) == 1:
            return [call(todo[0])]
        futures = [self._pool.submit(call, item) for item in todo]
        # No deadline here: the memory is in use until the last call returns, however long
        # that takes. The caller's own wait is the one that ends early.
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]

    def close(self) -> None:
        """Let the threads end; the caller has seen to it that none is at work."""
        self._pool.shutdown(wait=False)


def _not_at_once(error: Exception | None) -> bool:
    return isinstance(error, OSError) and error.errno in _NOT_AT_ONCE


def _guarded(op: Op, group: Group, work: Work, flags: int = 0) -> Exception | None:
    try:
        work.check()
        with work.lend(group) as lent:
            move(op, group, lent.views(), flags)
            work.landed(group, lent)
    except Exception as error:  # noqa: BLE001 - one group's failure is data for the caller
        return error
    return None


def move(op: Op, group: Group, buffers: Sequence[memoryview], flags: int = 0) -> None:
    """Move every byte of a group, however short single calls are; `OSError` if it stops.

    `flags`: of preadv2 and pwritev2.
    """
    call = os.pwritev if op is Op.STORE else os.preadv
    queue, at, moved = list(buffers), 0, 0
    while at < len(queue):
        part = _portion(queue, at)
        count = call(group.fd, part, group.offset + moved, flags)
        if count <= 0:
            raise OSError(
                errno.EIO,
                f"{op.value} ended after {moved} of {group.nbytes} B at offset {group.offset}",
            )
        moved += count
        while at < len(queue) and count >= len(queue[at]):
            count -= len(queue[at])
            at += 1
        if count:
            queue[at] = queue[at][count:]


def _portion(queue: Sequence[memoryview], at: int) -> list[memoryview]:
    """Return the buffers of the next call: at least one, at most IOV_MAX and `CALL_BYTES`."""
    first = queue[at]
    if len(first) > CALL_BYTES:
        return [first[:CALL_BYTES]]
    part, nbytes = [first], len(first)
    for buffer in queue[at + 1 : at + IOV_MAX]:
        nbytes += len(buffer)
        if nbytes > CALL_BYTES:
            break
        part.append(buffer)
    return part


_: type[IoEngine] = ThreadsEngine
