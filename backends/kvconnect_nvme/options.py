"""Options of ``nvme://``, parsed and checked once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvconnect.config import Bytes, parse_options
from kvconnect.errors import ConfigError

BLOCK = 4096
"""Bytes that every extent's address and length are multiples of: what any disk takes."""

GIB = 1 << 30
MAX_SLABS = 64
"""Slab files by default at most: each holds a file descriptor open in every process."""

Io = Literal["auto", "threads", "nixl-posix", "nixl-gds", "nixl-gds-mt", "nixl-gusli"]
UringOrAio = Literal["aio", "uring"]
Durability = Literal["data", "index", "none"]
Eviction = Literal["sieve", "fifo"]


@dataclass(frozen=True, slots=True)
class NvmeOptions:
    """What a URL may say.

    `capacity`, `slab`, `bounce`: bytes; `timeout`: seconds per transfer and per wait.
    `durability`: what a power cut may cost. ``data``: the newest keys, never bytes; ``index``:
    nothing that was reported OK; ``none``: everything (a killed process still costs nothing).
    `io`: what moves bytes; ``auto`` measures at open. `nixl_api`: the kernel interface of
    ``nixl-posix``. `io_threads`: threads, or groups of objects under way at once.
    `high`, `low`: fractions of the capacity where eviction starts and stops.
    `index`: directory of the index, `format`: take over a foreign disk; block devices only.
    """

    capacity: Bytes | None = None
    slab: Bytes | None = None
    io: Io = "auto"
    nixl_api: UringOrAio = "aio"
    io_threads: int = 8
    durability: Durability = "data"
    checksum: bool = True
    direct: Literal["auto", "on", "off"] = "auto"
    bounce: Bytes = 256 << 20
    high: float = 0.95
    low: float = 0.90
    eviction: Eviction = "sieve"
    timeout: float = 60.0
    index: str | None = None
    format: bool = False

    def __post_init__(self) -> None:
        """Refuse numbers that no store can have."""
        for name in ("capacity", "slab", "bounce"):
            value = getattr(self, name)
            if value is not None and value < BLOCK:
                raise ConfigError(f"nvme: {name}={value} B; it must be at least {BLOCK} B")
        if not 1 <= self.io_threads <= 256:
            raise ConfigError(f"nvme: io_threads={self.io_threads}; it must be 1 to 256")
        if not 0 < self.timeout < math.inf:
            raise ConfigError(f"nvme: timeout={self.timeout} s; it must be above 0 and finite")
        if not 0 < self.low <= self.high <= 1:
            raise ConfigError(
                f"nvme: low={self.low} and high={self.high}; they must be fractions of the "
                f"capacity with 0 < low <= high <= 1"
            )


def parse(options: Mapping[str, str]) -> NvmeOptions:
    """Parse the options of a URL; `ConfigError` names the option and close matches."""
    return parse_options(options, NvmeOptions, "nvme")


def down(nbytes: int) -> int:
    """Round bytes down to whole blocks."""
    return nbytes // BLOCK * BLOCK


def up(nbytes: int) -> int:
    """Round bytes up to whole blocks.

    >>> up(2304), up(4096)
    (4096, 4096)
    """
    return -(-nbytes // BLOCK) * BLOCK


def up_all(nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Round many sizes up to whole blocks: (objects,) int64."""
    return -(-nbytes // BLOCK) * BLOCK


def default_slab(capacity: int) -> int:
    """Bytes per slab file: at least 1 GiB and at most 64 files, or the whole capacity."""
    steps = -(-capacity // (MAX_SLABS * GIB))
    return min(down(capacity), max(steps, 1) * GIB)
