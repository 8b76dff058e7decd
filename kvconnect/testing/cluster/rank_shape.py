"""What any worker is told of the model and of its share of it, and what follows from that."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvconnect.hostpool import HostPool, PoolPlan
from kvconnect.identity import Identity
from kvconnect.layouts import itemsize_of
from kvconnect.placement import Placement, Span
from kvconnect.testing.cluster.content import Content

Positive = Annotated[int, msgspec.Meta(ge=1)]


class RankShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's pool. `layers` and `heads` are those of the whole model, `stage` is what it holds.

    `head_dim` and `v_head_dim` are elements; `seed` is that of the content.
    """

    layout: str
    dtype: str = "bfloat16"
    page_size: Positive
    layers: Positive
    heads: Positive
    head_dim: Positive
    v_head_dim: int
    stage: tuple[int, int] | None = None
    tp_rank: int = 0
    tp_size: Positive = 1
    head_blocks: int | None = None
    pages: Positive
    seed: int

    @property
    def placement(self) -> Placement:
        """The layers and heads that it holds."""
        start, stop = self.stage or (0, self.layers)
        return Placement.tensor_parallel(
            layers=Span(start, stop, self.layers),
            heads=self.heads,
            rank=self.tp_rank,
            size=self.tp_size,
        )

    @property
    def identity(self) -> Identity:
        """What fixes the bytes; the seed is the weights'."""
        return Identity(
            model="kvconnect/cluster-test",
            weights=f"seed {self.seed}",
            dtype=self.dtype,
            page_size=self.page_size,
            layers=self.layers,
            heads=self.heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
        )

    def plan(self) -> PoolPlan:
        """Plan its pool."""
        place = self.placement
        return HostPool.plan(
            layout=self.layout,
            pages=self.pages,
            page_size=self.page_size,
            layers=place.layers.extent,
            heads=place.heads.extent,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            dtype=self.dtype,
            head_blocks=self.head_blocks,
        )

    def content_of(self, slots: int) -> Content:
        """Return what every number of `slots` slots must contain."""
        return Content(
            seed=self.seed,
            page_size=slots,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            itemsize=itemsize_of(self.dtype),
        )
