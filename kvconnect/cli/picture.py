"""A small picture of one page: its rows in address order, coloured by head group."""

from __future__ import annotations

import numpy as np
from rich.text import Text

from kvconnect.cli.demo_job import Strip
from kvconnect.pool import Plane, Pool

COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta")
GAP = -1
_LOOPS = ("component", "layer", "slot", "head_block", "head")


def strips(pool: Pool, head_group: int, limit: int = 256) -> list[Strip]:
    """Describe the first `limit` rows of each plane of page 0, in address order."""
    return [_strip(plane, head_group, limit) for plane in pool.planes]


def _strip(plane: Plane, head_group: int, limit: int) -> Strip:
    layout = plane.layout
    axes = [layout.axis(name) for name in _LOOPS if name in layout]
    row = layout.itemsize * (layout.axis("dim").extent if "dim" in layout else 1)
    index = np.indices([axis.extent for axis in axes]).reshape(len(axes), -1)
    offset = np.zeros(index.shape[1], dtype=np.int64)
    head = np.zeros_like(offset)
    for axis, step in zip(axes, index, strict=True):
        offset += step * axis.stride
        if axis.name == "head_block":
            head += step * layout.axis("head").extent
        elif axis.name == "head":
            head += step
    rank = np.argsort(offset, kind="stable")
    cells: list[int] = []
    end = 0
    shown = rank[:limit]
    for at, group in zip(shown, (head[shown] // head_group).tolist(), strict=True):
        if cells and offset[at] != end:
            cells.append(GAP)
        cells.append(group)
        end = int(offset[at]) + row
    return Strip("+".join(plane.components), layout.order(), cells, len(rank) - len(shown), row)


def draw(strip: Strip, width: int = 64) -> Text:
    """Draw a strip: one block for each row, a thin bar where the next row lies elsewhere."""
    text, used = Text(), 0
    for cell in strip.cells:
        if used and used % width == 0:
            text.append("\n")
            used = 0
        used += 1
        if cell == GAP:
            text.append("┊", style="dim")
        else:
            text.append("█", style=COLOURS[cell % len(COLOURS)])
    if strip.left_out:
        text.append(f" and {strip.left_out} more", style="dim")
    return text


def legend(groups: int, heads_each: int) -> Text:
    """Name the colours."""
    text = Text("heads ")
    for group in range(groups):
        first = group * heads_each
        text.append(f"█ {first}-{first + heads_each - 1}  ", style=COLOURS[group % len(COLOURS)])
    return text
