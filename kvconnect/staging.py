"""Staging: repack pages through a registered bounce buffer, whole batches at a time.

Used where a layout leaves runs too short or unaligned for the backend. The buffer is bounded,
allocated once and registered once. Each slot holds one page: its objects one after another,
each at a multiple of 4096 bytes, so that O_DIRECT and DMA take them as they are.

The repack is one strided torch copy per segment for all pages of a batch, not a loop over
pages: the copy plan's loops become tensor dimensions on both sides.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Batch, Closing, Op
from kvconnect.descriptors import Plan
from kvconnect.errors import ConfigError, TransferTimeoutError
from kvconnect.pool import U64
from kvconnect.region import Region

SLOT_ALIGNMENT = 4096


class StagingBuffer(Closing):
    """A bounce buffer of whole-page slots for one plan; safe to use from many threads."""

    def __init__(self, plan: Plan, nbytes: int) -> None:
        """Allocate at most `nbytes`; `ConfigError` if not even one page fits."""
        self.plan = plan
        sizes = np.array(plan.object_nbytes(), dtype=np.uint64)
        padded = -(-sizes // SLOT_ALIGNMENT) * np.uint64(SLOT_ALIGNMENT)
        self._sizes = sizes
        self._starts = np.concatenate([[0], np.cumsum(padded)[:-1]]).astype(np.uint64)
        self.slot_nbytes = int(padded.sum())
        self.slots = min(nbytes // self.slot_nbytes, plan.pool.pages)
        if self.slots < 1:
            raise ConfigError(
                f"staging={nbytes} B is too small: one page takes {self.slot_nbytes} B; give at "
                f"least that"
            )
        self._map: mmap.mmap | None = mmap.mmap(-1, self.slots * self.slot_nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.region = Region("staging", address, self.slots * self.slot_nbytes)
        self._free = list(range(self.slots))
        self._changed = threading.Condition()
        self._views: list[list[tuple[Any, Any]]] | None = None

    @property
    def batch_pages(self) -> int:
        """Pages to move at once, so that two batches can be under way."""
        return max(self.slots // 2, 1)

    def acquire(self, pages: int, timeout: float) -> NDArray[np.int64]:
        """Take `pages` slots; `TransferTimeoutError` if they are not free in time."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while len(self._free) < pages:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise TransferTimeoutError(
                        f"staging: {pages} slots wanted, {len(self._free)} of {self.slots} free "
                        f"after {timeout:.3g} s; earlier transfers still hold the rest"
                    )
            self._free.sort()
            taken, self._free = self._free[:pages], self._free[pages:]
        return np.array(taken, dtype=np.int64)

    def release(self, slots: NDArray[np.int64]) -> None:
        """Give slots back once no transfer can touch them."""
        with self._changed:
            self._free.extend(slots.tolist())
            self._changed.notify_all()

    def batch(
        self,
        op: Op,
        keys: list[str],
        slots: NDArray[np.int64],
        *,
        ttl: float | None = None,
        pin: bool = False,
    ) -> Batch:
        """Build the batch of whole pages lying in `slots`: one run per object."""
        base = slots.astype(np.uint64) * np.uint64(self.slot_nbytes)
        address = base[:, None] + self._starts[None, :] + np.uint64(self.region.address)
        nbytes = np.tile(self._sizes, len(slots))
        return Batch(op, keys, address.reshape(-1), nbytes, np.arange(len(keys) + 1), ttl, pin)

    def gather(self, page_ids: U64, slots: NDArray[np.int64]) -> None:
        """Copy pages from the pool into slots."""
        self._copy(page_ids, slots, to_pool=False)

    def scatter(self, page_ids: U64, slots: NDArray[np.int64]) -> None:
        """Copy slots into pages of the pool."""
        self._copy(page_ids, slots, to_pool=True)

    def _copy(self, page_ids: U64, slots: NDArray[np.int64], *, to_pool: bool) -> None:
        if not len(page_ids):
            return
        pages, rows = page_ids.astype(np.int64), slots
        for views in self._all_views():
            for in_pool, in_slot in views:
                if to_pool:
                    _put(in_pool, pages, _take(in_slot, rows))
                else:
                    _put(in_slot, rows, _take(in_pool, pages))

    def _all_views(self) -> list[list[tuple[Any, Any]]]:
        if self._views is None:
            self._views = [
                [self._pair(number, at) for at in range(len(shape.segments))]
                for number, shape in enumerate(self.plan.shapes)
            ]
        return self._views

    def _pair(self, number: int, at: int) -> tuple[Any, Any]:
        """Return (pages, loops..., run) views of a segment in the pool and in the slots."""
        plan = self.plan
        copy, segment = plan.copies[number][at], plan.shapes[number].segments[at]
        region = plan.pool.planes[segment.plane].region
        page = segment.source.axis("page")
        extents = [loop.extent for loop in copy.loops]
        pool_steps = [page.stride, *(loop.dst_stride for loop in copy.loops)]
        slot_steps = [self.slot_nbytes, *(loop.src_stride for loop in copy.loops)]
        slot_start = int(self._starts[number]) + copy.src_offset
        unit = math.gcd(
            8, copy.run, region.address, copy.dst_offset, slot_start, *pool_steps, *slot_steps
        )
        in_pool = _view(
            region, copy.dst_offset, [page.extent, *extents], pool_steps, copy.run, unit
        )
        in_slot = _view(self.region, slot_start, [self.slots, *extents], slot_steps, copy.run, unit)
        return in_pool, in_slot

    def close(self) -> None:
        """Drop the views and the memory; the second call does nothing."""
        self._views = None
        self._map = None


def _view(
    region: Region, offset: int, extents: list[int], steps: list[int], run: int, unit: int
) -> Any:
    import torch  # noqa: PLC0415 - importing kvconnect must not import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    buffer = (ctypes.c_uint8 * region.nbytes).from_address(region.address)
    usable = region.nbytes // unit * unit
    flat = torch.frombuffer(buffer, dtype=torch.uint8, count=usable).view(kinds[unit])
    strides = [step // unit for step in steps]
    return flat.as_strided([*extents, run // unit], [*strides, 1], offset // unit)


def _take(view: Any, rows: NDArray[np.int64]) -> Any:
    import torch  # noqa: PLC0415

    if _consecutive(rows):
        return view[int(rows[0]) : int(rows[0]) + len(rows)]
    return view.index_select(0, torch.from_numpy(rows))


def _put(view: Any, rows: NDArray[np.int64], values: Any) -> None:
    import torch  # noqa: PLC0415

    if _consecutive(rows):
        view[int(rows[0]) : int(rows[0]) + len(rows)].copy_(values)
    else:
        view.index_copy_(0, torch.from_numpy(rows), values.contiguous())


def _consecutive(rows: NDArray[np.int64]) -> bool:
    return bool(rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all())
