"""What layouts mean, element by element: slow, plain, and independent of the planners.

Nothing here imports `kvconnect.cover` or `kvconnect.reshard`; tests compare those with this.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping

from kvconnect.layout import Layout
from kvconnect.placement import Placement

Index = tuple[tuple[str, int], ...]
"""Steps along named axes, sorted by name; axes of one step are left out."""


def elements(layout: Layout, at: Mapping[str, int] | None = None) -> dict[Index, int]:
    """Return the offset of every element of one object, by its index.

    `at` fixes axes to a step; those axes are not part of the index.
    """
    fixed = dict(at or {})
    free = sorted((a for a in layout.axes if a.name not in fixed), key=lambda a: a.name)
    start = layout.offset
    for axis in layout.axes:
        if axis.name in fixed:
            start += fixed[axis.name] * axis.stride
    found: dict[Index, int] = {}
    for steps in itertools.product(*(range(axis.extent) for axis in free)):
        offset, index = start, []
        for axis, step in zip(free, steps, strict=True):
            offset += step * axis.stride
            if axis.extent > 1:
                index.append((axis.name, step))
        found[tuple(index)] = offset
    return found


def byte_offsets(layout: Layout, at: Mapping[str, int] | None = None) -> set[int]:
    """Return the offset of every byte of one object."""
    starts = elements(layout, at).values()
    return {start + byte for start in starts for byte in range(layout.itemsize)}


def cut_indices(layout: Layout, cut: Collection[str]) -> list[dict[str, int]]:
    """Return every way to fix the axes in `cut`: one per object of the layout."""
    names = [axis.name for axis in layout.axes if axis.name in cut]
    ranges = [range(layout.axis(name).extent) for name in names]
    return [dict(zip(names, steps, strict=True)) for steps in itertools.product(*ranges)]


def maximal_runs(offsets: Iterable[int]) -> list[tuple[int, int]]:
    """Join byte offsets into the fewest (offset, nbytes) runs, ascending.

    >>> maximal_runs({4, 5, 6, 9})
    [(4, 3), (9, 1)]
    """
    runs: list[tuple[int, int]] = []
    for offset in sorted(offsets):
        if runs and sum(runs[-1]) == offset:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((offset, 1))
    return runs


def byte_copies(src: Layout, dst: Layout, at: Mapping[str, int] | None = None) -> dict[int, int]:
    """Return, for every target byte of one object, the source byte that belongs there."""
    source = elements(src, at)
    return {
        target + byte: source[index] + byte
        for index, target in elements(dst, at).items()
        for byte in range(src.itemsize)
    }


def global_elements(
    layout: Layout, held: Placement, at: Mapping[str, int] | None = None
) -> dict[Index, int]:
    """Return element offsets by *global* layer and head: what a rank holds of the model.

    Both axes appear in every index, whatever their extent, so that ranks can be compared.
    """
    starts = {"layer": held.layers.start, "head": held.heads.start}
    found: dict[Index, int] = {}
    for index, offset in elements(layout, at).items():
        steps = {name: start for name, start in starts.items() if name in layout}
        for name, step in index:
            steps[name] = step + starts.get(name, 0)
        found[tuple(sorted(steps.items()))] = offset
    return found
