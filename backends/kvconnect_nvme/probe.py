"""Which engine is fastest here: the same blocks on the same disk by each, for a short while.

Why measured at open: it depends on the disk, the kernel and the file system, and no table of
them would be right for long.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from kvconnect.backend import Op
from kvconnect.errors import BackendError, KVConnectError
from kvconnect.region import Region
from kvconnect_nvme.bounce import address_of, aligned
from kvconnect_nvme.engine import Group, IoEngine, Lent, Work
from kvconnect_nvme.lent import Bounced
from kvconnect_nvme.slabs import DEVICE_BASE, Direct, Slabs

log = logging.getLogger("kvconnect.nvme")

BYTES, PIECE = 16 << 20, 1 << 20
"""Moved by each engine in each direction, twice; bytes of one group."""
SECONDS = 0.4
"""When to stop: on a disk so slow, the engine does not matter."""

Make = Callable[[Slabs], IoEngine]
K = TypeVar("K")


def measure(makers: Mapping[K, Make], slabs: Slabs) -> dict[K, float]:
    """Return bytes per second of each engine on the disk of `slabs`, both directions together.

    A device is only read. Engines that cannot be made here, as where io_uring is forbidden, or
    that the time did not suffice for, are left out. Raises `OSError` where there is no room for
    16 MiB, and `BackendError` where an engine fails.
    """
    with ExitStack() as rest:
        ground = slabs if slabs.device else rest.enter_context(_scratch(slabs))
        memory = aligned(BYTES)
        region = Region("probe", address_of(memory), BYTES)
        begin = time.monotonic()
        made = {name: _made(make, ground, region, rest) for name, make in makers.items()}
        engines = {name: engine for name, engine in made.items() if engine is not None}
        work, groups = _Block(memory, region.address), _groups(ground)
        ops = [Op.LOAD] if slabs.device else [Op.STORE, Op.LOAD]
        best: dict[K, dict[Op, float]] = {}
        for name, engine in [*engines.items()] * 2:
            if best and time.monotonic() - begin > SECONDS:
                break
            known = best.setdefault(name, {})
            for op in ops:
                seconds = _time(engine, op, groups, work)
                known[op] = min(seconds, known.get(op, seconds))
        return {name: len(ops) * BYTES / sum(known.values()) for name, known in best.items()}


def _made(make: Make, slabs: Slabs, region: Region, rest: ExitStack) -> IoEngine | None:
    try:
        engine = rest.enter_context(make(slabs))
        engine.register(region, own=True)
    except KVConnectError as error:
        log.info("nvme: an engine is left out of the probe: %s", error)
        return None
    return engine


def _time(engine: IoEngine, op: Op, groups: Sequence[Group], work: Work) -> float:
    begin = time.perf_counter()
    errors = engine.run(op, groups, work)
    for error in errors:
        if error is not None:
            raise BackendError(f"nvme: probe of io={engine.name}: {error}") from error
    if fallbacks := engine.stats().get("io_fallbacks"):
        raise BackendError(f"nvme: probe of io={engine.name}: {fallbacks} groups failed")
    return time.perf_counter() - begin


@contextmanager
def _scratch(slabs: Slabs) -> Iterator[Slabs]:
    """Yield a file without a name on the same file system, written once.

    Without a name, because a killed process then leaves nothing behind. Everybody opens it by
    its descriptor's path, which makes it one file for all, as a device is.
    """
    fd = os.open(slabs.path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        total = DEVICE_BASE + BYTES
        os.posix_fallocate(fd, 0, total)
        # What was never written is not read from disk either.
        for offset in range(0, total, PIECE):
            os.pwrite(fd, bytes(PIECE), offset)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        direct: Direct = "auto" if slabs.direct else "off"
        with Slabs(Path(f"/proc/self/fd/{fd}"), BYTES, direct, device=True) as scratch:
            yield scratch
    finally:
        os.close(fd)


def _groups(slabs: Slabs) -> list[Group]:
    count = min(BYTES, slabs.slab_bytes) // PIECE
    places = [slabs.locate(number * PIECE) for number in range(count)]
    return [
        Group(0, fd, offset, PIECE, (number,), (0,), bounced=True)
        for number, (fd, offset) in enumerate(places)
    ]


class _Block:
    """The work around moving: none."""

    def __init__(self, memory: memoryview, address: int) -> None:
        """`memory`: as many pieces as there are groups."""
        self._memory, self._address = memory, address

    @contextmanager
    def lend(self, group: Group, *, wait: bool = True) -> Iterator[Lent]:  # noqa: ARG002
        """Lend the piece of the group."""
        start = group.objects[0] * PIECE
        yield Bounced(self._memory[start : start + PIECE], self._address + start)

    def landed(self, group: Group, lent: Lent) -> None:
        """Nothing to do with what was read."""

    def check(self) -> None:
        """Nobody asks to stop."""


_: type[Work] = _Block
