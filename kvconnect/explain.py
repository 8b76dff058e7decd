"""`Plan.explain()`: geometry, objects, runs and the reasons, in words and numbers."""

from __future__ import annotations

import math

import numpy as np

from kvconnect.descriptors import Mode, Plan
from kvconnect.identity import Identity


def explain_plan(plan: Plan) -> str:
    """Return a dozen lines about a plan; the same text `Connector.explain` prints."""
    pool, lines = plan.pool, []
    lines.append(
        f"pool {pool.label!r}: {pool.pages} pages x {pool.page_size} slots, layers "
        f"{plan.placement.layers}, heads {plan.placement.heads}, dims {pool.head_dim}/"
        f"{pool.v_head_dim}, {pool.dtype}, {size(pool.page_nbytes)} a page"
    )
    lines += [
        f"  plane {'+'.join(p.components)}: {p.layout.order()} at {p.region}" for p in pool.planes
    ]
    lines.append(f"object layout {plan.object_layout}: {plan.signature}")
    each = sorted(set(plan.object_nbytes()))
    lines.append(
        f"objects: {plan.objects} a page ({plan.head_group or pool.heads} heads x "
        f"{plan.layer_chunk or pool.layers} layers each), "
        f"{' or '.join(size(n) for n in each)} each; {plan.cells[0]}"
        + (f" ... {plan.cells[-1]}" if plan.objects > 1 else "")
    )
    lines.append(f"descriptors: {plan.mode.value} - {plan.reason}; {_runs(plan)}")
    lines += [f"  not {mode.value}: {why}" for mode, why in plan.rejected]
    lines.append(f"registered: {size(sum(r.nbytes for r in pool.regions))} in {_names(plan)}")
    return "\n".join(lines)


def explain_identity(identity: Identity) -> str:
    """Return the key record, field by field."""
    fields = ", ".join(f"{name}={value!r}" for name, value in identity.fields())
    return f"key record (namespace {identity.namespace}): {fields}"


def _runs(plan: Plan) -> str:
    per_object = np.diff(plan.first)
    runs = (
        f"{int(per_object.min())}-{int(per_object.max())}"
        if per_object.min() != per_object.max()
        else str(int(per_object[0]))
    )
    least, most = int(plan.rows.nbytes.min()), int(plan.rows.nbytes.max())
    span = size(least) if least == most else f"{size(least)} to {size(most)}"
    step = math.gcd(*(int(v) for v in (*plan.rows.address, *plan.rows.page_stride)))
    text = f"{runs} runs an object of {span}, aligned to {step & -step} B"
    return text + (" before repacking" if plan.mode is Mode.STAGED else "")


def _names(plan: Plan) -> str:
    return ", ".join(str(region) for region in plan.pool.regions)


def size(nbytes: int) -> str:
    """Write a byte count with the largest unit that keeps it whole.

    >>> size(5898240), size(2304), size(1 << 20)
    ('5760 KiB', '2304 B', '1 MiB')
    """
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes and nbytes % 1024**power == 0:
            return f"{nbytes // 1024**power} {unit}"
    return f"{nbytes} B"
