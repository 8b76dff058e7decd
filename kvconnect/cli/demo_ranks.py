"""The ranks of one tensor-parallel group in one process: a host pool and a connector each.

As in an engine, the sequence is computed on a device cache that holds all heads; each rank's
host pool holds the pages of its own heads, and only these go to the store and come back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

import kvconnect
from kvconnect.backend import Backend, Closing, Outcome
from kvconnect.cli.demo_job import Job
from kvconnect.cli.model import Decoder, KVCache
from kvconnect.identity import Identity
from kvconnect.layouts import order_of
from kvconnect.outcome import joint_prefix
from kvconnect.placement import Placement


class Ranks(Closing):
    """`size` ranks with room for `pages` pages of one sequence: page i lies in pool page i.

    `seconds` is what attaching took, self-tests included.
    """

    def __init__(self, job: Job, decoder: Decoder, size: int, pages: int, backend: Backend) -> None:
        started = time.perf_counter()
        self.job, self.pages = job, pages
        self._stack = ExitStack()
        with ExitStack() as stack:
            self.members = [
                stack.enter_context(_Rank(job, decoder, rank, size, pages, backend))
                for rank in range(size)
            ]
            self._stack = stack.pop_all()
        self.connectors = [member.connector for member in self.members]
        self.seconds = time.perf_counter() - started

    def close(self) -> None:
        """Detach all ranks and free their pools."""
        self._stack.close()

    def backup(self, cache: KVCache) -> None:
        """Copy the cache's whole pages into the host pools of the ranks that hold them."""
        for member in self.members:
            for pool, paged in member.pairs(cache, self.pages):
                pool[: self.pages].copy_(paged)

    def restore(self, cache: KVCache, pages: int) -> None:
        """Copy the first `pages` pages from the host pools into the cache."""
        for member in self.members:
            for pool, paged in member.pairs(cache, pages):
                paged.copy_(pool[:pages])
        cache.length = pages * self.job.page_size

    def put(self, hashes: Sequence[bytes]) -> list[Outcome]:
        """Store pages from every rank."""
        return [c.put(hashes, range(len(hashes))) for c in self.connectors]

    def hits(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading pages every rank finds."""
        return joint_prefix([c.exists(hashes).pages for c in self.connectors])

    def get(self, hashes: Sequence[bytes]) -> list[Outcome]:
        """Load pages into every rank's pool."""
        return [c.get(hashes, range(len(hashes))) for c in self.connectors]


class _Rank(Closing):
    """One rank: its placement, host pool and connector."""

    def __init__(
        self, job: Job, decoder: Decoder, rank: int, size: int, pages: int, backend: Backend
    ) -> None:
        c = decoder.config
        self.page_size = job.page_size
        place = Placement.tensor_parallel(layers=c.layers, heads=c.kv_heads, rank=rank, size=size)
        self.heads = slice(place.heads.start, place.heads.stop)
        identity = Identity(
            model=f"kvconnect-demo/{c.layers}x{c.d_model}",
            weights=decoder.fingerprint(),
            dtype=c.dtype,
            page_size=job.page_size,
            layers=c.layers,
            heads=c.kv_heads,
            head_dim=c.head_dim,
            v_head_dim=c.v_head_dim,
        )
        with ExitStack() as stack:
            self.pool: Any = stack.enter_context(
                kvconnect.HostPool.allocate(
                    layout=job.layout,
                    pages=pages + 1,  # one more for the self-test
                    page_size=job.page_size,
                    layers=c.layers,
                    heads=place.heads.extent,
                    head_dim=c.head_dim,
                    v_head_dim=c.v_head_dim,
                    dtype=c.dtype,
                    head_blocks=_blocks(job, place),
                )
            )
            self.connector = stack.enter_context(
                kvconnect.Connector(
                    self.pool, place, identity, backend, tp_sizes=(job.tp_write, job.tp_read)
                )
            )
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Detach, then free the pool."""
        self._stack.close()

    def pairs(self, cache: KVCache, pages: int) -> list[tuple[Tensor, Tensor]]:
        """Return (pool view, cache view) of K and V, both (page, layer, slot, head, dim).

        Heads that the pool keeps in blocks are two axes, (head_block, head), in both.
        """
        k, v = self.pool.component("k"), self.pool.component("v")
        return [(k, self._paged(cache.k, pages, k)), (v, self._paged(cache.v, pages, v))]

    def _paged(self, values: Tensor, pages: int, pool: Tensor) -> Tensor:
        held = values[:, : pages * self.page_size, self.heads]
        return held.view(len(held), pages, self.page_size, *pool.shape[3:]).transpose(0, 1)


def _blocks(job: Job, place: Placement) -> int | None:
    """Return the head blocks of layouts that have them: one for each head group."""
    if "head_block" not in order_of(job.layout):
        return None
    group = max(place.heads.total // math.lcm(job.tp_write, job.tp_read), 1)
    return place.heads.extent // group


def wrong_values(a: KVCache, b: KVCache, tokens: int) -> int:
    """Count the elements of K and V that differ bit for bit in the first `tokens` tokens."""
    return sum(
        int((_bits(x[:, :tokens]) != _bits(y[:, :tokens])).sum())
        for x, y in ((a.k, b.k), (a.v, b.v))
    )


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32 if values.element_size() == 4 else torch.int16)
