"""Ranks with side pools: shapes, what must lie in them, and both sides of a fleet connected.

What lies where follows from numbers alone, as in `fleet`: the number of a token (0 for a state,
of which a request has one), its layer, head, dim, component and pool.
"""

import contextlib
from dataclasses import dataclass

import numpy as np

from kvconnect import hostmem
from kvconnect.disagg.conform import Side
from kvconnect.disagg.decode import DecodeEndpoint
from kvconnect.disagg.options import EndpointOptions
from kvconnect.disagg.pools import SidePool
from kvconnect.disagg.prefill import PrefillEndpoint
from kvconnect.disagg.sections import KV
from kvconnect.disagg.shm import ShmTransport
from kvconnect.identity import Identity
from kvconnect.layout import Layout
from kvconnect.placement import Placement, Span
from kvconnect.pool import Plane, Pool
from kvconnect.region import Region
from tests.disagg.endpoints import identity_of
from tests.disagg.fleet import truth, u64

AXES = ("page", "layer", "slot", "head", "dim")


@dataclass(frozen=True)
class Kind:
    """A side pool of one side: `order` of its axes, dims by component, layers by stage (0: none).

    Without a head axis every rank of a stage holds the same; `heads` are then 1.
    """

    name: str
    order: tuple[str, ...]
    dims: dict[str, int]
    stages: tuple[int, ...]
    heads: int = 1
    page_size: int = 1
    pages: int = 6

    def on(self, stage, rank, tp):
        """What rank `rank` of `tp` on a stage holds: a `SidePool`."""
        total, layers = sum(self.stages), self.stages[stage]
        identity = Identity(
            model="org/m", weights="w", dtype="int16", page_size=self.page_size, layers=total,
            heads=self.heads, head_dim=next(iter(self.dims.values())), v_head_dim=0,
            pool=self.name,
        )  # fmt: skip
        if not layers:
            return SidePool(None, None, identity)
        start = sum(self.stages[:stage])
        place = Placement.tensor_parallel(
            layers=Span(start, start + layers, total), heads=self.heads, rank=rank, size=tp
        )
        planes, memory = [], []
        for component, dim in self.dims.items():
            extents = {
                "page": self.pages, "layer": layers, "slot": self.page_size,
                "head": place.heads.extent, "dim": dim,
            }  # fmt: skip
            layout = Layout.packed({axis: extents[axis] for axis in self.order}, 2)
            memory.append(hostmem.allocate(layout.nbytes, f"{self.name}.{component}"))
            region = Region(component, memory[-1].address, layout.nbytes)
            planes.append(Plane(region, layout, (component,)))
        pool = Pool(
            tuple(planes),
            page_size=self.page_size,
            layers=layers,
            heads=place.heads.extent,
            head_dim=identity.head_dim,
            v_head_dim=0,
            dtype="int16",
            label=self.name,
            owner=memory,
        )
        return SidePool(pool, place, identity)


def grid(side, component):
    """A component as (page, layer, slot, head, dim), whatever it lacks."""
    array, layout = side.pool.array(component), side.pool.plane_of(component).layout
    if "head_block" in layout:
        shape = array.shape
        return array.reshape(*shape[:-3], shape[-3] * shape[-2], shape[-1])
    missing = tuple(at for at, axis in enumerate(AXES) if axis not in layout)
    return np.expand_dims(array, missing)


def expected(name, side, component, tokens):
    """What the slots of `tokens` (their numbers) must hold: (token, layer, head, dim)."""
    place = side.placement
    return truth(
        f"{name}.{component}",
        np.asarray(tokens),
        np.arange(place.layers.start, place.layers.stop),
        np.arange(place.heads.start, place.heads.stop),
        grid(side, component).shape[-1],
    )


def rows_of(side, component, pages):
    """What pages do hold, in the order of their slots: (slot, layer, head, dim)."""
    found = grid(side, component)[np.asarray(pages, dtype=np.int64)]
    return found.transpose(0, 2, 1, 3, 4).reshape(-1, *(found.shape[i] for i in (1, 3, 4)))


def fill(name, side, pages, tokens):
    """Write the truth of `tokens` into `pages`; everything else gets noise."""
    rng = np.random.default_rng(len(pages))
    for component in side.pool.components:
        view = grid(side, component)
        size = view.shape[2]
        view[...] = rng.integers(1, 1 << 16, view.shape).astype(view.dtype)
        values = expected(name, side, component, tokens).view(view.dtype)
        for at in range(len(tokens)):
            view[int(pages[at // size]), :, at % size] = values[at]


def holds(name, side, pages, tokens):
    """Tell whether `pages` hold the truth, and everything else is zero still."""
    for component in side.pool.components:
        rows, wanted = rows_of(side, component, pages), expected(name, side, component, tokens)
        good = np.array_equal(rows[: len(tokens)].view(np.int16), wanted)
        others = np.delete(grid(side, component), np.asarray(pages, dtype=np.int64), axis=0)
        if not good or rows[len(tokens) :].any() or others.any():
            return False
    return True


def nbytes_of(name, side, tokens):
    """Bytes of `tokens` in one rank's pool."""
    return sum(expected(name, side, c, tokens).nbytes for c in side.pool.components)


@dataclass(frozen=True)
class Where:
    """Pages of one pool on both sides, and the numbers of the tokens in them.

    Of a pool whose pages are one row each, those of the pages.
    """

    src: tuple[int, ...]
    dst: tuple[int, ...]
    tokens: range


class Hybrid:
    """Both sides with side pools, their endpoints, and requests over all pools.

    `prefill`, `decode`: (fleet, kinds). `where`: `Where` by pool, the KV's too.
    """

    def __init__(self, prefill, decode, where, transport=ShmTransport, **options):
        self.stack, self.where = contextlib.ExitStack(), where
        self.prefills, self.sources = self._start(PrefillEndpoint, *prefill, transport, options)
        self.decodes, self.targets = self._start(DecodeEndpoint, *decode, transport, options)
        self.addresses = [end.listen() for end in self.prefills]

    def _start(self, kind, fleet, kinds, transport, options):
        ends, held, sides = [], [], fleet.sides()
        for number, side in enumerate(sides):
            extra = [k.on(number // fleet.tp, number % fleet.tp, fleet.tp) for k in kinds]
            carrier = self.stack.enter_context(transport())
            name = f"{kind.role[0]}{number}"
            settings = {"timeout": 10.0, "peer_timeout": 30.0} | options
            end = kind(
                side.pool, side.placement, identity_of(fleet), carrier, side_pools=extra,
                options=EndpointOptions(name=name, ranks=len(sides), **settings),
            )  # fmt: skip
            ends.append(self.stack.enter_context(end))
            pools = {one.identity.pool: Side(one.pool, one.placement) for one in extra if one.pool}
            held.append({KV: side} | pools)
        return ends, held

    def connect(self):
        for end in self.decodes:
            end.connect(self.addresses)
        return self

    def fill(self):
        """Write what must arrive into the prefill side, and zeros over the decode side."""
        for pools in self.sources:
            for name, side in pools.items():
                where = self.where[name]
                fill(name, side, where.src, where.tokens)
        self.blank()
        return self

    def blank(self):
        for pools in self.targets:
            for side in pools.values():
                for component in side.pool.components:
                    grid(side, component)[...] = 0

    def side_of(self, pools, which, *without):
        return {
            name: u64(getattr(self.where[name], which))
            for name in pools
            if name != KV and name not in without
        }

    def send(self, request, *without, **more):
        """Offer all on every prefill rank, less some side pools."""
        return [
            end.send(
                request, u64(self.where[KV].src), side=self.side_of(pools, "src", *without), **more
            )
            for end, pools in zip(self.prefills, self.sources, strict=True)
        ]

    def receive(self, request, **more):
        return [self.receive_on(number, request, **more) for number in range(len(self.decodes))]

    def receive_on(self, number, request, **more):
        pools = self.targets[number]
        side = self.side_of(pools, "dst")
        slots = {
            name: len(self.where[name].tokens)
            for name in side
            if all("slot" in plane.layout for plane in pools[name].pool.planes)
        }
        return self.decodes[number].receive(
            request, u64(self.where[KV].dst), side=side, slots=len(self.where[KV].tokens),
            side_slots=slots, **more,
        )  # fmt: skip

    def holds(self):
        """Tell for each decode rank and pool whether all is as it must be."""
        return {
            (number, name): holds(name, side, self.where[name].dst, self.where[name].tokens)
            for number, pools in enumerate(self.targets)
            for name, side in pools.items()
        }

    def nbytes(self):
        """Bytes of a request on all decode ranks."""
        return sum(
            nbytes_of(name, side, self.where[name].tokens)
            for pools in self.targets
            for name, side in pools.items()
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stack.close()
