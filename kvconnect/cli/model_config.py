"""Sizes of the demo's decoder and the bounds of its prefill chunks: plain numbers, no torch.

The bounds are what makes a run that loads a prefix repeat the other run bit for bit: chunks
end at the same tokens in both, so every chunk is computed in the same shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvconnect.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of the decoder; `heads` are query heads, `kv_heads` divide them."""

    layers: int = 4
    kv_heads: int = 8
    head_dim: int = 32
    v_head_dim: int = 32
    heads: int = 16
    d_model: int = 256
    d_mlp: int = 640
    rope_base: float = 10_000.0
    dtype: str = "bfloat16"
    """Of the KV cache: bfloat16, float16 or float32."""

    def __post_init__(self) -> None:
        """Check sizes; `ConfigError` names the field."""
        for name in ("layers", "kv_heads", "head_dim", "v_head_dim", "heads", "d_model", "d_mlp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} query heads are no multiple of {self.kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even: rotary pairs dimensions")
        if self.dtype not in {"bfloat16", "float16", "float32"}:
            raise ConfigError(f"dtype={self.dtype!r} is not bfloat16, float16 or float32")

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.heads // self.kv_heads


def prefix_length(tokens: int, page_size: int) -> int:
    """Return how many tokens of a prompt can come from whole pages, leaving one to compute.

    >>> prefix_length(48, 16), prefix_length(49, 16)
    (32, 48)
    """
    return max(tokens - 1, 0) // page_size * page_size


def chunk_bounds(tokens: int, page_size: int, chunk_pages: int) -> list[int]:
    """Return where prefill chunks begin and end: the same whether a prefix is loaded or not.

    Chunks end at every `chunk_pages` pages, at the last whole page and at the end.

    >>> chunk_bounds(100, 16, 2)
    [0, 32, 64, 96, 100]
    """
    prefix = prefix_length(tokens, page_size)
    return [*range(0, prefix, page_size * chunk_pages), prefix, tokens]


def usable_prefix(hit_pages: int, tokens: int, page_size: int, chunk_pages: int) -> int:
    """Return the most tokens of `hit_pages` loaded pages that end at a chunk bound."""
    have = hit_pages * page_size
    bounds = chunk_bounds(tokens, page_size, chunk_pages)[:-1]
    return max((bound for bound in bounds if bound <= have), default=0)
