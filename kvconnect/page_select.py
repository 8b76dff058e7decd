"""`select`: which descriptors a call should use, chosen by what the layout can do.

Engines answer "not implemented" where one formula does not fit (K and V of different head
dimensions, heads inside slots). A correct answer exists for each of them; this module finds
the best one and says why it is that one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvconnect.errors import CapacityError, ConfigError
from kvconnect.page_index import I64, U64
from kvconnect.page_rows import ObjectRows
from kvconnect.region import Region
from kvconnect.run_copy import copy_runs

if TYPE_CHECKING:
    from kvconnect.pool import Pool

SLOT_ALIGNMENT = 4096
"""Staged objects start at multiples of this, as O_DIRECT and DMA want them."""


@dataclass(frozen=True, slots=True)
class BufferMeta:
    """Descriptors of whole pages, object by object, and why they are these.

    `address`, `nbytes`: (runs,) uint64. Object i owns the runs first[i]:first[i+1] ((objects +
    1,) int64) and its bytes are those runs in order. Objects come page by page; `names` says
    what each object of a page is (``k[0:2]``: heads 0 and 1 of K). `mode` is ``split_heads``,
    ``per_page``, ``scatter_gather`` or ``staged``; `reason` says in words why.
    """

    address: U64
    nbytes: U64
    first: I64
    mode: str
    reason: str
    names: tuple[str, ...]
    staged: Staged | None = None

    def gather(self) -> None:
        """Bring the pool's bytes to where the descriptors point; nothing to do unless staged."""
        if self.staged:
            self.staged.copy(to_pool=False)

    def scatter(self) -> None:
        """Bring loaded bytes from where the descriptors point to the pool, if staged."""
        if self.staged:
            self.staged.copy(to_pool=True)


@dataclass(frozen=True, slots=True)
class Staged:
    """The runs behind staged descriptors: `pool` and `slot` (runs,) uint64 addresses."""

    pool: U64
    slot: U64
    nbytes: U64
    regions: tuple[Region, ...]
    staging: Region

    def copy(self, *, to_pool: bool) -> None:
        """Copy every run, all runs of a size at once."""
        inside, outside = (self.pool, self.regions), (self.slot, (self.staging,))
        source, target = (outside, inside) if to_pool else (inside, outside)
        copy_runs(*source, *target, self.nbytes)


def select(
    pool: Pool,
    token_indices: Any,
    split_factor: int | None = None,
    *,
    min_run_bytes: int = 1,
    max_runs: int | None = None,
    staging: Region | None = None,
    fallback: str | None = None,
    join: bool = False,
) -> BufferMeta:
    """Describe pages, each cut into `split_factor` head groups (None or 1: whole pages).

    An object is a head group of a component (of all of them, with `join`). In this order:

    1. one run per object and component, where the layout allows: ``split_heads``/``per_page``;
    2. ``per_page`` instead of a split, if `fallback` is ``"per_page"``;
    3. ``scatter_gather``, if runs are at least `min_run_bytes` and at most `max_runs` an object;
    4. ``staged`` in the registered region `staging`: call `gather` before a store and `scatter`
       after a load;
    5. ``scatter_gather`` all the same, where no `staging` is given: correct, if slow.

    Raises `PageIndexError` on bad indices, `LayoutError` on a factor that does not divide the
    heads, `CapacityError` where the pages do not fit into `staging`.
    """
    if fallback not in {None, "per_page"}:
        raise ConfigError(f"fallback={fallback!r} is not one of: None, 'per_page'")
    factor = 1 if split_factor is None else split_factor
    group = pool.head_group(factor)
    page_ids = pool.page_ids(token_indices)
    objects = pool.object_rows(None if factor == 1 else group, join=join)
    if objects.one_run:
        whole = "per_page" if factor == 1 else "split_heads"
        return _direct(objects, page_ids, whole, _why_one_run(objects, factor))
    broken = pool.why_not_split(factor)
    if factor > 1 and fallback == "per_page":
        meta = select(
            pool,
            token_indices,
            min_run_bytes=min_run_bytes,
            max_runs=max_runs,
            staging=staging,
            join=join,
        )
        return _because(meta, f"per page, as asked, because {broken}")
    return _scattered(pool, objects, page_ids, broken, min_run_bytes, max_runs, staging)


def _scattered(
    pool: Pool,
    objects: ObjectRows,
    page_ids: U64,
    broken: str,
    min_run_bytes: int,
    max_runs: int | None,
    staging: Region | None,
) -> BufferMeta:
    least, most = int(objects.rows.nbytes.min()), objects.most_runs
    words = f"{broken}; {most} runs per object of at least {least} B"
    limit = None
    if least < min_run_bytes:
        limit = f"runs are below min_run_bytes {min_run_bytes}"
    elif max_runs is not None and most > max_runs:
        limit = f"more than max_runs {max_runs}"
    if limit is None:
        return _direct(objects, page_ids, "scatter_gather", words)
    if staging is None:
        words += f" ({limit}, but no staging region was given)"
        return _direct(objects, page_ids, "scatter_gather", words)
    return _stage(pool, objects, page_ids, staging, f"{words}, and {limit}")


def _direct(objects: ObjectRows, page_ids: U64, mode: str, reason: str) -> BufferMeta:
    address, nbytes = objects.rows.expand(page_ids)
    first = objects.bounds(len(page_ids))
    return BufferMeta(address, nbytes, first, mode, reason, objects.names)


def _stage(
    pool: Pool, objects: ObjectRows, page_ids: U64, staging: Region, reason: str
) -> BufferMeta:
    """Pack the runs of each object together, objects at multiples of `SLOT_ALIGNMENT`."""
    sizes = np.add.reduceat(objects.rows.nbytes, objects.first[:-1])
    padded = -(-sizes.astype(np.int64) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    starts, slot_nbytes = np.cumsum(padded) - padded, int(padded.sum())
    lead = -staging.address % SLOT_ALIGNMENT
    need = len(page_ids) * slot_nbytes + lead
    if need > staging.nbytes:
        raise CapacityError(
            f"staging: {len(page_ids)} pages take {need} B ({slot_nbytes} B each), the region "
            f"has {staging.nbytes} B; give a larger one or fewer pages"
        )
    base = np.arange(len(page_ids), dtype=np.uint64) * np.uint64(slot_nbytes)
    base += np.uint64(staging.address + lead)
    address = np.add.outer(base, starts.astype(np.uint64)).reshape(-1)
    pool_side, run_nbytes = objects.rows.expand(page_ids)
    slot_side = np.add.outer(base, _packed(objects, starts)).reshape(-1)
    return BufferMeta(
        address=address,
        nbytes=np.tile(sizes, len(page_ids)),
        first=np.arange(len(address) + 1, dtype=np.int64),
        mode="staged",
        reason=reason,
        names=objects.names,
        staged=Staged(pool_side, slot_side, run_nbytes, pool.regions, staging),
    )


def _packed(objects: ObjectRows, starts: I64) -> U64:
    """Return where in a slot each run of a page lies: (runs,) uint64."""
    nbytes = objects.rows.nbytes.astype(np.int64)
    ends = np.cumsum(nbytes)
    begins = ends - nbytes
    counts = np.diff(objects.first)
    shift = starts - begins[objects.first[:-1]]
    return np.asarray(begins + np.repeat(shift, counts), dtype=np.uint64)


def _why_one_run(objects: ObjectRows, factor: int) -> str:
    what = "a page" if factor == 1 else f"each of {factor} head groups"
    return f"{what} is one run of {int(objects.rows.nbytes.min())} B or more per component"


def _because(meta: BufferMeta, reason: str) -> BufferMeta:
    return BufferMeta(
        meta.address,
        meta.nbytes,
        meta.first,
        meta.mode,
        f"{reason}; {meta.reason}",
        meta.names,
        meta.staged,
    )
