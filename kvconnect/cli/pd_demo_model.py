"""The demo's decoder as one tensor-parallel rank runs it: attention over its own heads only.

A rank keeps keys and values of its own heads and layers, nothing else; what attention gives is
gathered from all ranks, the rest every rank computes alike. No sum is cut differently than in
one process, so the tokens must be the same bit for bit.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvconnect.cli.model import Decoder, KVCache
from kvconnect.cli.model_config import Config
from kvconnect.placement import Placement

Gather = Callable[[Tensor], list[Tensor]]
"""Give one's own tensor, get those of all ranks of the stage in their order."""


class ShardDecoder(Decoder):
    """A decoder that attends over the heads of one placement and gathers the others'."""

    def __init__(self, config: Config, seed: int, placement: Placement, gather: Gather) -> None:
        """Make all weights: they are small, and the same everywhere."""
        super().__init__(config, seed)
        self.placement, self._gather = placement, gather
        self.first_layer = placement.layers.start
        self.held = slice(placement.heads.start, placement.heads.stop)

    def cache(self, capacity: int) -> KVCache:
        """Return a cache for this rank's layers and heads."""
        layers, heads = self.placement.layers.extent, self.placement.heads.extent
        c = self.config
        local = dataclasses.replace(c, layers=layers, kv_heads=heads, heads=heads * c.group)
        return KVCache(local, capacity)

    def join(self, own: Tensor) -> Tensor:
        """Gather what other ranks attended over; of ranks with the same heads the first one's."""
        parts = self._gather(own.contiguous())[:: self.placement.replicas]
        return torch.cat(parts, dim=1)

    @torch.inference_mode()
    def embed(self, tokens: Sequence[int], bounds: Sequence[int]) -> list[Tensor]:
        """Return the input of the first layer, chunk by chunk."""
        return [self.embedding[torch.tensor(tokens[a:b])] for a, b in _chunks(bounds)]

    @torch.inference_mode()
    def prefill(
        self,
        chunks: list[Tensor],
        cache: KVCache,
        bounds: Sequence[int],
        finished: Callable[[int], None],
    ) -> None:
        """Compute this rank's layers, each for all chunks before the next one; `chunks` change.

        `finished` hears of each global layer whose keys and values are complete.
        """
        for layer in range(self.placement.layers.start, self.placement.layers.stop):
            for number, (start, stop) in enumerate(_chunks(bounds)):
                cache.length = start
                chunks[number] = self.layer(chunks[number], layer, cache)
                cache.length = stop
            finished(layer)


def _chunks(bounds: Sequence[int]) -> list[tuple[int, int]]:
    return [(a, b) for a, b in itertools.pairwise(bounds) if b > a]
