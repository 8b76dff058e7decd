"""The memory of a group, as buffers and as rows: in place, or gathered in a bounce buffer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvconnect.batch_memory import BatchMemory
from kvconnect_nvme.engine import Group, Lent
from kvconnect_nvme.options import up


@dataclass(frozen=True, slots=True)
class InPlace:
    """The caller's own memory; `pad` stands for the bytes between objects."""

    memory: BatchMemory
    group: Group
    pad: memoryview

    def views(self) -> list[memoryview]:
        """Return the runs of all objects, each object filled up to whole blocks."""
        buffers: list[memoryview] = []
        for i in self.group.objects:
            buffers += self.memory.views(i)
            size = int(self.memory.sizes[i])
            if up(size) > size:
                buffers.append(self.pad[: up(size) - size])
        return buffers

    def rows(self) -> NDArray[np.uint64]:
        """Return the runs of all objects: (n, 3) address, nbytes, offset."""
        return self.memory.table(
            np.array(self.group.objects, dtype=np.int64),
            np.array(self.group.starts, dtype=np.uint64),
        )


@dataclass(frozen=True, slots=True)
class Bounced:
    """One buffer with the whole group, padding included, at `address`."""

    view: memoryview
    address: int

    def views(self) -> list[memoryview]:
        """Return the buffer."""
        return [self.view]

    def rows(self) -> NDArray[np.uint64]:
        """Return its one row."""
        return np.array([[self.address, len(self.view), 0]], dtype=np.uint64)


_: tuple[type[Lent], type[Lent]] = (InPlace, Bounced)
