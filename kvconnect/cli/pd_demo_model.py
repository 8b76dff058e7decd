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
from torch.nn import functional

from kvconnect.cli.model import Decoder, KVCache, _attention, _norm, _rotate, _rotation
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

    def cache(self, capacity: int) -> KVCache:
        """Return a cache for this rank's layers and heads."""
        held, c = self.placement, self.config
        group = c.heads // c.kv_heads
        heads = held.heads.extent
        local = dataclasses.replace(
            c, layers=held.layers.extent, kv_heads=heads, heads=heads * group
        )
        return KVCache(local, capacity)

    def _attend(
        self,
        x: Tensor,
        block: dict[str, Tensor],
        cache: KVCache,
        layer: int,
        turn: tuple[Tensor, Tensor],
    ) -> Tensor:
        c, count, start, held = self.config, len(x), cache.length, self.placement.heads
        stop, group, row = start + count, c.heads // c.kv_heads, layer - self.placement.layers.start
        mine = slice(held.start, held.stop)
        q = _rotate((x @ block["q"]).view(count, c.heads, c.head_dim), turn)
        k = _rotate((x @ block["k"]).view(count, c.kv_heads, c.head_dim), turn)
        v = (x @ block["v"]).view(count, c.kv_heads, c.v_head_dim)
        cache.k[row, start:stop] = k[:, mine]
        cache.v[row, start:stop] = v[:, mine]
        keys = cache.k[row, :stop].float().transpose(0, 1)
        values = cache.v[row, :stop].float().transpose(0, 1)
        own = _attention(q[:, held.start * group : held.stop * group], keys, values, start)
        # Of ranks that hold the same heads the first one's are taken.
        parts = self._gather(own.contiguous())[:: self.placement.replicas]
        return torch.cat(parts, dim=1).reshape(count, -1) @ block["o"]

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
        spans = _chunks(bounds)
        turns = [_rotation(a, b, self.config) for a, b in spans]
        for layer in range(self.placement.layers.start, self.placement.layers.stop):
            block = self.blocks[layer]
            for number, (start, stop) in enumerate(spans):
                cache.length = start
                x = chunks[number]
                x = x + self._attend(_norm(x), block, cache, layer, turns[number])
                y = _norm(x)
                gated = functional.silu(y @ block["gate"]) * (y @ block["up"])
                chunks[number] = x + gated @ block["down"]
                cache.length = stop
            finished(layer)

    @torch.inference_mode()
    def logits(self, x: Tensor) -> Tensor:
        """Return the logits after the last token of a chunk."""
        return _norm(x[-1:])[0] @ self.head


def _chunks(bounds: Sequence[int]) -> list[tuple[int, int]]:
    return [(a, b) for a, b in itertools.pairwise(bounds) if b > a]
