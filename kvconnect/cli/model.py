"""A small real decoder: byte tokens, RMSNorm, rotary GQA attention, SwiGLU, fixed-seed weights.

It exists so that the demo moves a KV cache that means something. Computation is float32; keys
and values are rounded to the cache's dtype as they enter the cache and are read back from
there, also for the tokens of the same chunk. So the only thing one chunk hands to the next is
the cache: a run that loaded a prefix and a run that computed it see the same bytes, and as
long as the chunks after it have the same shapes, they compute the same bits.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kvconnect.cli.model_config import Config
from kvconnect.errors import ConfigError

VOCAB = 256
"""Tokens are the bytes of UTF-8 text."""

PRINTABLE = slice(32, 127)
"""What is decoded: random weights know no language, but their words can be shown."""


def encode(text: str) -> list[int]:
    """Turn text into byte tokens."""
    return list(text.encode("utf-8"))


def decode(tokens: Sequence[int]) -> str:
    """Turn byte tokens into text; what is no UTF-8 becomes escapes."""
    return bytes(tokens).decode("utf-8", errors="backslashreplace")


def torch_dtype(config: Config) -> torch.dtype:
    """Return the cache's dtype as torch knows it."""
    dtype = getattr(torch, config.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


class KVCache:
    """Keys and values of one sequence for all heads, as the compute device holds them.

    `k` is (layers, tokens, kv_heads, head_dim), `v` the same with v_head_dim, both in the
    cache's dtype; `length` tokens of it are valid.
    """

    __slots__ = ("k", "length", "v")

    def __init__(self, config: Config, capacity: int) -> None:
        """Make room for `capacity` tokens."""
        shape, dtype = (config.layers, capacity, config.kv_heads), torch_dtype(config)
        self.k = torch.zeros(*shape, config.head_dim, dtype=dtype)
        self.v = torch.zeros(*shape, config.v_head_dim, dtype=dtype)
        self.length = 0


class Decoder:
    """The model: the same `config` and `seed` give the same weights everywhere.

    Its caches hold `held` of the KV heads, and layers from `first_layer` on: all, unless a
    subclass holds a part and joins it with those of others.
    """

    def __init__(self, config: Config, seed: int = 0) -> None:
        self.config, self.first_layer, self.held = config, 0, slice(0, config.kv_heads)
        self._generator = torch.Generator().manual_seed(seed)
        c = config
        self.embedding = self._normal(VOCAB, c.d_model, scale=1.0)
        self.blocks = [
            {
                # Queries four times as long: attention that picks tokens rather than averages,
                # so that what is decoded depends on the whole prompt.
                "q": self._normal(c.d_model, c.heads * c.head_dim) * 4,
                "k": self._normal(c.d_model, c.kv_heads * c.head_dim),
                "v": self._normal(c.d_model, c.kv_heads * c.v_head_dim),
                "o": self._normal(c.heads * c.v_head_dim, c.d_model),
                "gate": self._normal(c.d_model, c.d_mlp),
                "up": self._normal(c.d_model, c.d_mlp),
                "down": self._normal(c.d_mlp, c.d_model),
            }
            for _ in range(c.layers)
        ]
        self.head = self._normal(c.d_model, VOCAB)

    def _normal(self, rows: int, columns: int, *, scale: float | None = None) -> Tensor:
        weight = torch.randn(rows, columns, generator=self._generator)
        return weight * (rows**-0.5 if scale is None else scale)

    def fingerprint(self) -> str:
        """Return a digest of all weights: what `Identity.weights` needs."""
        state = hashlib.blake2b(digest_size=16)
        named = [("embedding", self.embedding), ("head", self.head)]
        for number, block in enumerate(self.blocks):
            named += [(f"{number}.{name}", weight) for name, weight in block.items()]
        for name, weight in named:
            state.update(f"{name} {tuple(weight.shape)}".encode())
            state.update(weight.numpy().tobytes())
        return state.hexdigest()

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], cache: KVCache) -> Tensor:
        """Append `tokens` to the cache and return the logits after the last: (VOCAB,) float32."""
        if not tokens:
            raise ConfigError("no tokens to compute: leave at least one out of the prefix")
        stop = cache.length + len(tokens)
        if stop > cache.k.shape[1]:
            raise ConfigError(f"{stop} tokens do not fit a cache of {cache.k.shape[1]}")
        x = self.embedding[torch.tensor(tokens)]
        for number in range(len(self.blocks)):
            x = self.layer(x, number, cache)
        cache.length = stop
        return self.logits(x)

    def layer(self, x: Tensor, number: int, cache: KVCache) -> Tensor:
        """Return the output of one layer for tokens from `cache.length` on, kept in the cache."""
        block = self.blocks[number]
        x = x + self._attend(_norm(x), block, cache, number)
        y = _norm(x)
        return x + (functional.silu(y @ block["gate"]) * (y @ block["up"])) @ block["down"]

    @torch.inference_mode()
    def logits(self, x: Tensor) -> Tensor:
        """Return the logits after the last token of a chunk."""
        return _norm(x[-1:])[0] @ self.head

    def join(self, own: Tensor) -> Tensor:
        """Return the attention of all heads, given that of the heads held here."""
        return own

    def _attend(self, x: Tensor, block: dict[str, Tensor], cache: KVCache, layer: int) -> Tensor:
        c, count, start = self.config, len(x), cache.length
        stop, row, held, group = start + count, layer - self.first_layer, self.held, c.group
        turn = _rotation(start, stop, c)
        q = _rotate((x @ block["q"]).view(count, c.heads, c.head_dim), turn)
        k = _rotate((x @ block["k"]).view(count, c.kv_heads, c.head_dim), turn)
        v = (x @ block["v"]).view(count, c.kv_heads, c.v_head_dim)
        cache.k[row, start:stop] = k[:, held]
        cache.v[row, start:stop] = v[:, held]
        keys = cache.k[row, :stop].float().transpose(0, 1)
        values = cache.v[row, :stop].float().transpose(0, 1)
        own = _attention(q[:, held.start * group : held.stop * group], keys, values, start)
        return self.join(own).reshape(count, -1) @ block["o"]


def _attention(q: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """Causal attention of (tokens, heads, dim) queries over (kv_heads, stop, dim) keys.

    Query head h reads KV head h // (heads // kv_heads). Returns (tokens, heads, v_dim).
    """
    count, heads, dim = q.shape
    kv_heads, stop, v_dim = values.shape
    group = heads // kv_heads
    rows = (q * dim**-0.5).view(count, kv_heads, group, dim).permute(1, 2, 0, 3)
    future = torch.ones(count, count, dtype=torch.bool).triu_(1)
    out = torch.empty(kv_heads, group * count, v_dim)
    for head in range(kv_heads):  # one head at a time: the scores stay inside the CPU caches
        scores = rows[head].reshape(-1, dim) @ keys[head].T
        scores.view(group, count, stop)[:, :, start:].masked_fill_(future, float("-inf"))
        torch.mm(scores.softmax(dim=-1), values[head], out=out[head])
    return out.view(kv_heads, group, count, v_dim).permute(2, 0, 1, 3).reshape(count, heads, -1)


def _norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + 1e-6)


def _rotation(start: int, stop: int, config: Config) -> tuple[Tensor, Tensor]:
    half = config.head_dim // 2
    speed = config.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(start, stop, dtype=torch.float64)[:, None] * speed
    return angle.cos().float()[:, None, :], angle.sin().float()[:, None, :]


def _rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = turn
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def prefill(
    decoder: Decoder, cache: KVCache, tokens: Sequence[int], bounds: Sequence[int]
) -> Iterator[tuple[int, Tensor]]:
    """Compute what the cache does not hold yet, chunk by chunk; yield (tokens done, logits)."""
    for start, stop in itertools.pairwise(bounds):
        if start >= cache.length and stop > start:
            yield stop, decoder.forward(tokens[start:stop], cache)


def greedy(decoder: Decoder, cache: KVCache, logits: Tensor, count: int) -> Iterator[int]:
    """Decode `count` tokens, always the likeliest printable one, after the prompt's logits."""
    for number in range(count):
        token = PRINTABLE.start + int(logits[PRINTABLE].argmax())
        yield token
        if number + 1 < count:
            logits = decoder.forward([token], cache)
