"""Descriptors and their selection: `describe(pool, placement, capabilities)` gives a `Plan`.

The choice is made by what the layout can do and what the backend takes, in this order:
split-heads or per-page (one run per component), scatter-gather, staged through a bounce
buffer. Every alternative that was passed over is kept with the number that decided, so that
`Plan.explain()` can say why. Planning is pure; a plan touches no memory.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Batch, Capabilities, Op
from kvconnect.errors import CapabilityError, ConfigError, LayoutError
from kvconnect.identity import Cell
from kvconnect.objects import (
    ObjectShape,
    Segment,
    cells_of,
    head_group_of,
    object_shapes,
    signature,
)
from kvconnect.placement import Placement
from kvconnect.pool import U64, PageRows, Pool
from kvconnect.reshard import CopyPlan, plan_copy

OBJECT_LAYOUTS = ("native", "canonical")


class Mode(enum.Enum):
    """How the objects of a page reach the backend."""

    SPLIT_HEADS = "split_heads"
    PER_PAGE = "per_page"
    SCATTER_GATHER = "scatter_gather"
    STAGED = "staged"


@dataclass(frozen=True, slots=True)
class Plan:
    """Which descriptors a page becomes, and why.

    `rows` are the direct runs of page 0 (address, page stride, nbytes), `first` their bounds
    per object: (objects + 1,) int64. In mode STAGED the rows are not handed to the backend;
    `copies` say how each segment moves between pool and bounce buffer.
    """

    pool: Pool
    placement: Placement
    mode: Mode
    reason: str
    rejected: tuple[tuple[Mode, str], ...]
    shapes: tuple[ObjectShape, ...]
    signature: str
    rows: PageRows
    first: NDArray[np.int64]
    copies: tuple[tuple[CopyPlan, ...], ...]
    head_group: int | None
    layer_chunk: int | None
    object_layout: str

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The cells of a page in object order."""
        return tuple(shape.cell for shape in self.shapes)

    @property
    def objects(self) -> int:
        """Objects of one page."""
        return len(self.shapes)

    @property
    def page_nbytes(self) -> int:
        """Bytes stored for one page."""
        return sum(shape.nbytes for shape in self.shapes)

    def object_nbytes(self) -> list[int]:
        """Bytes of each object of a page."""
        return [shape.nbytes for shape in self.shapes]

    def batch(
        self,
        op: Op,
        keys: Sequence[str],
        page_ids: U64,
        *,
        ttl: float | None = None,
        pin: bool = False,
    ) -> Batch:
        """Build the batch of whole pages: `keys` page-major, (pages * objects) of them."""
        address, nbytes = self.rows.expand(page_ids)
        runs = len(self.rows.nbytes)
        starts = np.arange(len(page_ids), dtype=np.int64)[:, None] * runs + self.first[None, :-1]
        first = np.append(starts.reshape(-1), len(address))
        return Batch(op, keys, address, nbytes, first, ttl, pin)

    def explain(self) -> str:
        """Say in words what is stored, how, and why: see `kvconnect.explain`."""
        from kvconnect.explain import explain_plan  # noqa: PLC0415 - text is not hot-path code

        return explain_plan(self)


def describe(
    pool: Pool,
    placement: Placement,
    capabilities: Capabilities,
    want: str | Mode = "auto",
    *,
    object_layout: str = "native",
    tp_sizes: Sequence[int] = (),
    head_group: int | None = None,
    layer_chunk: int | None = None,
) -> Plan:
    """Choose descriptors for `pool` on a backend with `capabilities`.

    `want` forces a mode; ``auto`` takes the first that works, in the module's order. The head
    grid comes from `tp_sizes` (all TP sizes that share pages) or `head_group`. Raises
    `ConfigError` on options that contradict each other and `LayoutError` when nothing (or not
    what was wanted) fits, naming the axis that does not chain and both numbers; `CapabilityError`
    for memory on a device that the backend cannot reach.
    """
    if object_layout not in OBJECT_LAYOUTS:
        raise ConfigError(f"object_layout={object_layout!r} is not one of {OBJECT_LAYOUTS}")
    forced = _mode(want)
    _check_devices(pool, capabilities)
    group = head_group_of(
        total_heads=placement.heads.total, tp_sizes=tp_sizes, head_group=head_group
    )
    if forced is Mode.PER_PAGE:
        group = None
    cells = cells_of(placement, group, layer_chunk)
    shapes = tuple(object_shapes(pool, placement, cells, object_layout))
    copies = tuple(tuple(_copy(segment) for segment in shape.segments) for shape in shapes)
    rows, first = _rows(pool, shapes, copies)
    mode, reason, rejected = _choose(pool, shapes, copies, rows, first, capabilities, forced)
    return Plan(
        pool=pool,
        placement=placement,
        mode=mode,
        reason=reason,
        rejected=rejected,
        shapes=shapes,
        signature=signature(shapes[0]),
        rows=rows,
        first=first,
        copies=copies,
        head_group=group,
        layer_chunk=layer_chunk,
        object_layout=object_layout,
    )


def _check_devices(pool: Pool, capabilities: Capabilities) -> None:
    for region in pool.regions:
        if region.device not in capabilities.devices:
            raise CapabilityError(
                f"pool {pool.label!r}: {region} is on device {region.device!r}, the backend takes "
                f"{', '.join(capabilities.devices)}; offload through a host pool"
            )


def _mode(want: str | Mode) -> Mode | None:
    if isinstance(want, Mode):
        return want
    if want == "auto":
        return None
    try:
        return Mode(want)
    except ValueError:
        words = ", ".join(mode.value for mode in Mode)
        raise ConfigError(f"want={want!r} is not one of: auto, {words}") from None


def _copy(segment: Segment) -> CopyPlan:
    """Plan object <-> page 0; offsets are relative to the object and to the region."""
    return plan_copy(segment.target, segment.source.narrow("page", 0, 1))


def _rows(
    pool: Pool, shapes: Sequence[ObjectShape], copies: Sequence[Sequence[CopyPlan]]
) -> tuple[PageRows, NDArray[np.int64]]:
    """Lay the runs of page 0 out object by object, in the byte order of the object."""
    address, stride, nbytes, first = [], [], [], [0]
    for shape, plans in zip(shapes, copies, strict=True):
        for segment, plan in zip(shape.segments, plans, strict=True):
            in_object, in_region = plan.offsets()
            runs = in_region[np.argsort(in_object, kind="stable")]
            base = pool.planes[segment.plane].region.address
            address.append(runs + np.uint64(base))
            page_stride = segment.source.axis("page").stride
            stride.append(np.full(len(runs), page_stride, dtype=np.uint64))
            nbytes.append(np.full(len(runs), plan.run, dtype=np.uint64))
        first.append(sum(plan.runs for plan in plans) + first[-1])
    rows = PageRows(np.concatenate(address), np.concatenate(stride), np.concatenate(nbytes))
    return rows, np.array(first, dtype=np.int64)


def _choose(
    pool: Pool,
    shapes: Sequence[ObjectShape],
    copies: Sequence[Sequence[CopyPlan]],
    rows: PageRows,
    first: NDArray[np.int64],
    capabilities: Capabilities,
    forced: Mode | None,
) -> tuple[Mode, str, tuple[tuple[Mode, str], ...]]:
    split = shapes[0].cell.heads.extent < pool.heads
    whole = Mode.SPLIT_HEADS if split else Mode.PER_PAGE
    cannot: dict[Mode, str] = {}
    other = Mode.PER_PAGE if split else Mode.SPLIT_HEADS
    cannot[other] = (
        f"pages are shared across TP sizes: {shapes[0].cell.heads.extent} of {pool.heads} "
        f"local heads to an object"
        if split
        else f"an object holds all {pool.heads} local heads"
    )
    most = int(np.diff(first).max())
    least = int(rows.nbytes.min())
    limits = _limits(rows, most, capabilities)
    chained = _why_not_one_run(shapes, copies)
    if chained or limits:
        cannot[whole] = chained or str(limits)
    least_allowed = capabilities.min_run_bytes
    if limits:
        cannot[Mode.SCATTER_GATHER] = limits
    elif least < least_allowed:
        cannot[Mode.SCATTER_GATHER] = f"runs are {least} B, below min_run_bytes {least_allowed}"
    return _first_that_works(whole, most, least, cannot, forced)


def _first_that_works(
    whole: Mode, most: int, least: int, cannot: dict[Mode, str], forced: Mode | None
) -> tuple[Mode, str, tuple[tuple[Mode, str], ...]]:
    reasons = {
        whole: "one run per object and component",
        Mode.SCATTER_GATHER: f"{most} runs per object of at least {least} B each",
        Mode.STAGED: "repacked through a registered bounce buffer",
    }
    order = [forced] if forced else [whole, Mode.SCATTER_GATHER, Mode.STAGED]
    for mode in order:
        if mode not in cannot:
            passed = tuple((m, why) for m, why in cannot.items() if m is not mode)
            return mode, reasons[mode], passed
    assert forced is not None
    raise LayoutError(f"want={forced.value!r} is not possible: {cannot[forced]}")


def _limits(rows: PageRows, most: int, capabilities: Capabilities) -> str | None:
    """Say which limit of the backend the direct runs break, or None."""
    if most > 1 and not capabilities.scatter_gather:
        return f"{most} runs per object, the backend takes one"
    if most > capabilities.max_runs_per_object:
        return f"{most} runs per object, the backend takes {capabilities.max_runs_per_object}"
    need = capabilities.alignment
    if need > 1:
        step = math.gcd(*(int(v) for v in (*rows.address, *rows.page_stride, *rows.nbytes)))
        if step % need:
            return f"runs are aligned to {step & -step} B, the backend needs {need} B"
    return None


def _why_not_one_run(
    shapes: Sequence[ObjectShape], copies: Sequence[Sequence[CopyPlan]]
) -> str | None:
    for shape, plans in zip(shapes, copies, strict=True):
        for segment, plan in zip(shape.segments, plans, strict=True):
            if plan.runs > 1:
                return (
                    f"{segment.name}, {shape.cell.heads.extent} heads: {plan.runs} runs of "
                    f"{plan.run} B; {_break(segment, plan)}"
                )
    return None


def _break(segment: Segment, plan: CopyPlan) -> str:
    for axis in segment.source.narrow("page", 0, 1).by_stride():
        if axis.stride >= plan.run and axis.extent > 1:
            stored = segment.target.axis(axis.name).stride
            return (
                f"{axis.name} stride {axis.stride} B in the pool and {stored} B in the object, "
                f"run ends at {plan.run} B"
            )
    return f"runs end at {plan.run} B"
