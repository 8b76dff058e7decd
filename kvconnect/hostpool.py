"""Host pools that kvconnect allocates itself, in any named layout.

A `HostPool` is a `Pool` that owns its memory. It exists so that an engine, a test or the demo
gets page-aligned, registrable memory with the geometry already checked, including the shapes
that engines refuse (K and V of different head dimensions in every layout).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvconnect import hostmem
from kvconnect.backend import Closing
from kvconnect.errors import LayoutError
from kvconnect.layouts import Geometry
from kvconnect.page_index import U64
from kvconnect.pool import Plane, Pool
from kvconnect.region import Region

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PoolPlan:
    """What a pool would take, before anything is allocated; `str()` says it in a line."""

    geometry: Geometry
    label: str = "pool"
    huge_pages: str | bool = False
    numa_node: int | None = None
    shared: bool = False
    pin: bool | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory (all of it pinned, where the pool is pinned)."""
        return self.geometry.nbytes

    def __str__(self) -> str:
        g = self.geometry
        wishes = [
            f"huge pages {self.huge_pages}" if self.huge_pages else "",
            f"NUMA node {self.numa_node}" if self.numa_node is not None else "",
            "shared" if self.shared else "",
            "pinned" if self.pin else "",
        ]
        words = "".join(f", {wish}" for wish in wishes if wish)
        return (
            f"pool {self.label!r}: {g.pages} pages x {g.page_nbytes} B in {g.layout}, "
            f"{self.nbytes} B ({self.nbytes / 2**30:.2f} GiB) of host memory{words}"
        )

    def allocate(self) -> HostPool:
        """Allocate it; the line of this plan is logged first."""
        _log.info("allocating %s", self)
        memory = hostmem.allocate(
            self.nbytes,
            self.label,
            huge_pages=self.huge_pages,
            numa_node=self.numa_node,
            shared=self.shared,
            pin=self.pin,
        )
        return _build(self.geometry, memory, self.label)

    def place(self, memory: hostmem.HostMemory) -> HostPool:
        """Put it into memory allocated elsewhere, which the pool takes over.

        `LayoutError` if it is too small.
        """
        if memory.nbytes < self.nbytes:
            raise LayoutError(
                f"pool {self.label!r} takes {self.nbytes} B; the memory has {memory.nbytes} B"
            )
        return _build(self.geometry, memory, self.label)


@dataclass(frozen=True, repr=False, eq=False)
class HostPool(Pool, Closing):
    """A pool that owns its memory: a context manager that closes twice safely.

    After `close` no descriptor can be made (`ClosedError`); views already taken stay valid.
    """

    memory: hostmem.HostMemory = field(kw_only=True)
    geometry: Geometry = field(kw_only=True)

    @classmethod
    def plan(
        cls,
        *,
        layout: str,
        pages: int,
        page_size: int,
        layers: int,
        heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: str = "bfloat16",
        head_blocks: int | None = None,
        components: Mapping[str, int] | None = None,
        huge_pages: str | bool = False,
        numa_node: int | None = None,
        shared: bool = False,
        pin: bool | None = None,
        label: str = "pool",
    ) -> PoolPlan:
        """Check the geometry and say what it takes; the arguments are those of `allocate`."""
        geometry = Geometry(
            layout=layout,
            pages=pages,
            page_size=page_size,
            layers=layers,
            heads=heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            dtype=dtype,
            head_blocks=head_blocks,
            components=dict(components or {}),
        )
        return PoolPlan(geometry, label, huge_pages, numa_node, shared, pin)

    @classmethod
    def allocate(
        cls,
        *,
        layout: str,
        pages: int,
        page_size: int,
        layers: int,
        heads: int,
        head_dim: int,
        **options: Any,
    ) -> HostPool:
        """Allocate a zeroed pool; sizes are per rank, head dims in elements.

        Options: `v_head_dim` (None: as head_dim; 0: one latent component ``kv``, as in MLA),
        `dtype` (torch name), `head_blocks` (page_unified), `components` (name -> bytes per page
        and layer of further opaque rows), `huge_pages` (False, "thp", "2MiB", "1GiB"),
        `numa_node`, `shared` (memfd: `fd`, for `attach`), `pin` (None: where CUDA is present)
        and `label`. Raises `LayoutError` on a geometry, `ConfigError` on an option, and
        `CapacityError` on a size that cannot be.
        """
        plan = cls.plan(
            layout=layout,
            pages=pages,
            page_size=page_size,
            layers=layers,
            heads=heads,
            head_dim=head_dim,
            **options,
        )
        return plan.allocate()

    @classmethod
    def attach(cls, fd: int, *, label: str = "pool", **geometry: Any) -> HostPool:
        """Map the memory of a shared pool of another process, given the same geometry.

        `fd` is duplicated and may be closed afterwards. `LayoutError` if it is too small.
        """
        plan = cls.plan(label=label, shared=True, **geometry)
        return _build(plan.geometry, hostmem.attach(fd, plan.nbytes), label)

    @property
    def fd(self) -> int | None:
        """The memfd of a shared pool, None for others and after `close`."""
        return self.memory.fd

    def page_ids(self, token_indices: Any) -> U64:
        """Turn token indices into page ids, as `Pool.page_ids`; `ClosedError` after `close`."""
        self.memory.keep_alive()
        return super().page_ids(token_indices)

    def check_page_ids(self, page_ids: Any) -> U64:
        """Check page ids, as `Pool.check_page_ids`; `ClosedError` after `close`."""
        self.memory.keep_alive()
        return super().check_page_ids(page_ids)

    def _keep_alive(self) -> Any:
        return self.memory.keep_alive()

    def close(self) -> None:
        """Unpin and let go of the memory; the second call does nothing."""
        self.memory.close()


def _build(geometry: Geometry, memory: hostmem.HostMemory, label: str) -> HostPool:
    planes = []
    for part in geometry.parts():
        # A region is named after all components that share it.
        sharing = [p for p in geometry.parts() if p.start == part.start]
        name = "+".join(c for p in sharing for c in p.components)
        region = Region(f"{label}.{name}", memory.address + part.start, part.nbytes)
        planes.append(Plane(region, part.layout, part.components, part.dtype))
    return HostPool(
        tuple(planes),
        page_size=geometry.page_size,
        layers=geometry.layers,
        heads=geometry.heads,
        head_dim=geometry.head_dim,
        v_head_dim=geometry.dims.get("v", 0),
        dtype=geometry.dtype,
        label=label,
        memory=memory,
        geometry=geometry,
    )
