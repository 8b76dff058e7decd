"""`Held`: a pool in guarded memory whose every element address is one numpy broadcast.

It is the oracle of this directory and calls no planner, so planners can be compared with it.
"""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from kvconnect.identity import Identity
from kvconnect.layout import Axis, Layout
from kvconnect.placement import Placement
from kvconnect.pool import Plane, Pool
from kvconnect.testing.memory import GuardedBuffer

steady = settings(deadline=None, max_examples=60)
"""The machine is shared: time is not what these properties are about."""

LETTERS = {
    "c": "component",
    "p": "page",
    "l": "layer",
    "s": "slot",
    "b": "head_block",
    "h": "head",
    "d": "dim",
}
NAMED = {
    "layer_first": "clpshd",
    "page_first": "cpslhd",
    "page_first_direct": "cplshd",
    "page_head": "cphsld",
    "fused": "plcshd",
}
"""Axis orders of the pools that engines have, outermost first."""


def stretched(extents, itemsize, pads=(), offset=0, turn=0):
    """Return a layout in this order, with `pads` bytes of padding after each axis, from inside.

    `turn` rotates the order in which the layout lists its axes, which has no meaning.
    """
    stride, axes = itemsize, []
    for at, (name, extent) in enumerate(reversed(extents)):
        axes.append(Axis(name, extent, stride))
        stride = stride * extent + (pads[at] if at < len(pads) else 0)
    listed = axes[::-1]
    return Layout(tuple(listed[turn:] + listed[:turn]), itemsize, offset)


def places(layout, component):
    """Return the offset of every element: (pages, layers, slots, heads, dims) int64."""
    at = {axis.name: np.arange(axis.extent) * axis.stride for axis in layout.axes}
    zero = np.zeros(1, dtype=np.int64)
    heads = (at.get("head_block", zero)[:, None] + at.get("head", zero)[None, :]).reshape(-1)
    step = layout.axis("component").stride if "component" in layout else 0
    grid = np.ix_(*(at.get(n, zero) for n in ("page", "layer", "slot")), heads, at["dim"])
    return sum(grid[1:], grid[0]) + layout.offset + component * step


@dataclass
class Held:
    """One rank's pool; `content` arrays are (n, layers, slots, heads, dims, itemsize) uint8."""

    pool: Pool
    buffers: list[GuardedBuffer]
    place: dict[str, tuple[int, np.ndarray]] = field(default_factory=dict)

    def __post_init__(self):
        for number, plane in enumerate(self.pool.planes):
            for at, name in enumerate(plane.components):
                self.place[name] = (number, places(plane.layout, at))
        self.itemsize = self.pool.planes[0].layout.itemsize

    def _bytes(self, name, ids):
        number, offsets = self.place[name]
        index = offsets[np.asarray(ids, dtype=np.int64)][..., None] + np.arange(self.itemsize)
        return self.buffers[number].view, index

    def write(self, ids, content):
        for name in self.place:
            view, index = self._bytes(name, ids)
            view[index] = content[name]

    def read(self, ids):
        found = {}
        for name in self.place:
            view, index = self._bytes(name, ids)
            found[name] = view[index]
        return found

    def random(self, n, seed=0):
        """Return content for `n` pages that never repeats."""
        rng = np.random.default_rng(seed)
        return {
            name: rng.integers(0, 256, (n, *offsets.shape[1:], self.itemsize), dtype=np.uint8)
            for name, (_, offsets) in self.place.items()
        }

    def snapshot(self):
        return [buffer.view.copy() for buffer in self.buffers]

    def untouched_outside(self, ids, before):
        """Tell whether every byte is as `before` but the elements of the pages `ids`."""
        free = [np.zeros(len(view), dtype=bool) for view in before]
        for name, (number, _) in self.place.items():
            free[number][self._bytes(name, ids)[1].reshape(-1)] = True
        for buffer in self.buffers:
            buffer.check()
        return all(
            bool(((buffer.view == old) | may).all())
            for buffer, old, may in zip(self.buffers, before, free, strict=True)
        )

    def canonical(self, page, layers, heads):
        """Return the canonical object of local ranges: component, head, slot, layer, dim."""
        content = self.read([page])
        return b"".join(
            content[name][0][layers][:, :, heads].transpose(2, 1, 0, 3, 4).tobytes()
            for name in self.place
        )

    def native(self, page, layers, heads):
        """Return the native object of local ranges: each plane's bytes by rising address."""
        out = []
        for number, buffer in enumerate(self.buffers):
            mine = [
                offsets[page][layers][:, :, heads].reshape(-1)
                for plane, offsets in self.place.values()
                if plane == number
            ]
            starts = np.sort(np.concatenate(mine))
            out.append(buffer.view[starts[:, None] + np.arange(self.itemsize)].tobytes())
        return b"".join(out)

    def stored(self, page, layers, heads, object_layout):
        return getattr(self, object_layout)(page, layers, heads)


def held(
    order="cplshd",
    *,
    pages=4,
    size=2,
    layers=3,
    heads=4,
    dims=(4, 4),
    itemsize=2,
    pads=(),
    offset=0,
    block=0,
    dtype="bfloat16",
    turn=0,
):
    """Build a pool: one plane with a component axis, or one for each component without "c"."""
    names = ["k", "v"][: 1 + (dims[1] > 0)]
    groups = [tuple(names)] if "c" in order else [(name,) for name in names]
    planes, buffers = [], []
    for number, components in enumerate(groups):
        extent = {
            "c": len(components),
            "p": pages,
            "l": layers,
            "s": size,
            "b": heads // (block or heads),
            "h": block or heads,
            "d": dims[number],
        }
        layout = stretched([(LETTERS[x], extent[x]) for x in order], itemsize, pads, offset, turn)
        buffers.append(GuardedBuffer(layout.end))
        planes.append(Plane(buffers[-1].region, layout, components))
    return Held(Pool(tuple(planes), size, layers, heads, *dims, dtype), buffers)


def identity_of(pool, placement, **changes):
    """Return the identity of a model that this pool holds a part of."""
    fields = {
        "model": "org/model",
        "weights": "w1",
        "dtype": pool.dtype,
        "page_size": pool.page_size,
        "layers": placement.layers.total,
        "heads": placement.heads.total,
        "head_dim": pool.head_dim,
        "v_head_dim": pool.v_head_dim,
    }
    return Identity(**fields | changes)


def whole(pool):
    return Placement.whole(layers=pool.layers, heads=pool.heads)


def local(span, held_span):
    return slice(span.start - held_span.start, span.stop - held_span.start)


@st.composite
def pools(draw, *, max_extent=3):
    """Any axis order, padding, K and V apart or not, heads in blocks or not, MLA or not."""
    kind = draw(st.sampled_from(["joint", "apart", "blocks", "mla"]))
    letters = {"joint": "cplshd", "apart": "plshd", "blocks": "cplsbhd", "mla": "plsd"}[kind]
    order = "".join(draw(st.permutations(letters)))
    heads = 1 if kind == "mla" else draw(st.sampled_from([1, 2, 4]))
    dim = draw(st.integers(1, max_extent))
    v_dim = {"apart": draw(st.integers(1, max_extent)), "mla": 0}.get(kind, dim)
    return held(
        order,
        pages=draw(st.integers(1, 4)),
        size=draw(st.integers(1, max_extent)),
        layers=draw(st.integers(1, max_extent)),
        heads=heads,
        dims=(dim, v_dim),
        itemsize=draw(st.sampled_from([1, 2, 4])),
        pads=draw(st.lists(st.integers(0, 3), max_size=7)),
        offset=draw(st.integers(0, 9)),
        turn=draw(st.integers(0, 5)),
        block=draw(st.sampled_from([n for n in (1, 2, 4) if n <= heads]))
        if kind == "blocks"
        else 0,
    )
