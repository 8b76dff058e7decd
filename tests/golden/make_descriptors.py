"""Write descriptors.json: for small pools, where every object's bytes lie, run by run.

Independent of kvconnect on purpose (it imports the standard library only): every element of
an object is visited, its bytes are marked, and neighbouring bytes become ranges. There is no
planning here. The format is described in README.md.

    python tests/golden/make_descriptors.py          # writes descriptors.json beside this file
"""

import itertools
import json
import math
from pathlib import Path

LAYERS, SLOTS, HEADS, DIM, PAGES = 3, 4, 4, 8, 5
PAGE_IDS = (3, 0, 4)


def packed(itemsize, *extents):
    """Axes (name, extent, stride), outermost first, each on top of those after it."""
    axes, stride = [], itemsize
    for name, extent in reversed(extents):
        axes.insert(0, (name, extent, stride))
        stride *= extent
    return axes


K_V, PAGE, LAYER = ("component", 2), ("page", PAGES), ("layer", LAYERS)
SLOT, HEAD, D = ("slot", SLOTS), ("head", HEADS), ("dim", DIM)
GROUP, IN_GROUP = ("group", 2), ("head", HEADS // 2)  # the head axis in two groups

WHOLE_PAGE = ("page",)
ONE_COMPONENT = ("page", "component")
ONE_GROUP = ("page", "component", "group")
ONE_LAYER = ("page", "component", "layer")


def cases():
    """(name, axes, itemsize, offset, cut) of every case."""
    orders = {
        "layer_first": (K_V, LAYER, PAGE, SLOT, GROUP, IN_GROUP, D),
        "page_first": (K_V, PAGE, SLOT, LAYER, GROUP, IN_GROUP, D),
        "page_first_direct": (K_V, PAGE, LAYER, SLOT, GROUP, IN_GROUP, D),
        "page_head": (K_V, PAGE, GROUP, IN_GROUP, SLOT, LAYER, D),
        "page_unified": (PAGE, GROUP, LAYER, K_V, SLOT, IN_GROUP, D),
    }
    for name, order in orders.items():
        for what, cut in (
            ("K+V", WHOLE_PAGE),
            ("K or V", ONE_COMPONENT),
            ("head group", ONE_GROUP),
            ("one layer", ONE_LAYER),
        ):
            yield f"{name}: {what}", packed(2, *order), 2, 0, cut
    for what, cut in (("K+V", ("page", "group")), ("one layer", ("page", "group", "layer"))):
        yield f"page_unified by group: {what}", packed(2, *orders["page_unified"]), 2, 0, cut

    # K wider than V, in one allocation: V starts where K ends.
    tall = (PAGE, GROUP, IN_GROUP, SLOT, LAYER)
    keys, values = packed(2, *tall, ("dim", 12)), packed(2, *tall, ("dim", 8))
    end = PAGES * HEADS * SLOTS * LAYERS * 12 * 2
    for what, cut in (("page", WHOLE_PAGE), ("head group", ("page", "group"))):
        yield f"asymmetric K: {what}", keys, 2, 0, cut
        yield f"asymmetric V: {what}", values, 2, end, cut

    # MLA: one latent row per slot and layer, no head axis.
    latent = ("dim", 36)
    yield "mla layer_first: page", packed(2, LAYER, PAGE, SLOT, latent), 2, 0, WHOLE_PAGE
    yield "mla page_first: page", packed(2, PAGE, SLOT, LAYER, latent), 2, 0, WHOLE_PAGE
    yield "mla page_first: layer", packed(2, PAGE, SLOT, LAYER, latent), 2, 0, ("page", "layer")

    # MXFP8: one uint8 scale for 32 uint8 values.
    block = (PAGE, LAYER, SLOT, GROUP, IN_GROUP)
    data, scale = packed(1, *block, ("dim", 64)), packed(1, *block, ("dim", 2))
    end = PAGES * LAYERS * SLOTS * HEADS * 64
    for what, cut in (("page", WHOLE_PAGE), ("head group", ("page", "group"))):
        yield f"mxfp8 data: {what}", data, 1, 0, cut
        yield f"mxfp8 scale: {what}", scale, 1, end, cut

    # Padding: layers one token longer than their pages; rows padded to 24 bytes; far apart.
    row = HEADS * DIM * 2
    yield (
        "layer_first, a token of padding per layer",
        [
            ("layer", LAYERS, PAGES * SLOTS * row + row),
            ("page", PAGES, SLOTS * row),
            ("slot", SLOTS, row),
            ("head", HEADS, DIM * 2),
            ("dim", DIM, 2),
        ],
        2,
        row,
        WHOLE_PAGE,
    )
    yield (
        "page_first, padded rows, axes in another order",
        [("dim", 8, 2), ("page", PAGES, 24 * 12 + 8), ("layer", 3, 24), ("slot", 4, 72)],
        2,
        64,
        WHOLE_PAGE,
    )
    yield (
        "pages beyond 4 GiB",
        [("page", PAGES, 2**33 + 4096), ("head", 1, 7), ("slot", 4, 64), ("dim", 16, 2)],
        2,
        2**32 + 2,
        WHOLE_PAGE,
    )


def runs_of(axes, itemsize, offset, fixed):
    """The fewest equal runs of one object: [offset, nbytes], ascending."""
    steps = [[fixed[name]] if name in fixed else range(extent) for name, extent, _ in axes]
    occupied = set()
    for index in itertools.product(*steps):
        at = offset
        for step, (_, _, stride) in zip(index, axes, strict=True):
            at += step * stride
        for byte in range(at, at + itemsize):
            if byte in occupied:
                raise ValueError(f"byte {byte} belongs to two elements")
            occupied.add(byte)
    ranges = []
    for byte in sorted(occupied):
        if ranges and ranges[-1][1] == byte:
            ranges[-1][1] += 1
        else:
            ranges.append([byte, byte + 1])
    run = math.gcd(*(stop - start for start, stop in ranges))
    return [[at, run] for start, stop in ranges for at in range(start, stop, run)]


def describe(name, axes, itemsize, offset, cut):
    """One case of the corpus."""
    extents = {axis: extent for axis, extent, _ in axes}
    ranges = [PAGE_IDS if axis == "page" else range(extents[axis]) for axis in cut]
    objects = []
    for index in itertools.product(*ranges):
        fixed = dict(zip(cut, index, strict=True))
        objects.append({"index": fixed, "runs": runs_of(axes, itemsize, offset, fixed)})
    return {
        "name": name,
        "axes": [{"name": n, "extent": e, "stride": s} for n, e, s in axes],
        "itemsize": itemsize,
        "offset": offset,
        "cut": list(cut),
        "page_ids": list(PAGE_IDS),
        "objects": objects,
    }


def render():
    """The corpus as text: one object a line, so that a change shows where it is."""
    out = []
    for case in (describe(*case) for case in cases()):
        objects = case.pop("objects")
        head = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in case.items())
        lines = ",\n".join(f"   {json.dumps(o, separators=(',', ':'))}" for o in objects)
        out.append(f' {{\n{head},\n  "objects": [\n{lines}\n  ]\n }}')
    return '{"version": 1, "cases": [\n' + ",\n".join(out) + "\n]}\n"


if __name__ == "__main__":
    Path(__file__).with_name("descriptors.json").write_text(render(), encoding="utf-8")
