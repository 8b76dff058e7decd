"""The demo's decoder against naive oracles, and the property the demo rests on."""

import math

import pytest
import torch

from kvconnect.cli.model import (
    Decoder,
    KVCache,
    _attention,
    _norm,
    decode,
    encode,
    greedy,
    prefill,
)
from kvconnect.cli.model_config import Config, chunk_bounds, prefix_length, usable_prefix
from kvconnect.cli.picture import GAP, draw, strips
from kvconnect.cover import cover
from kvconnect.errors import ConfigError
from kvconnect.hostpool import HostPool

SMALL = Config(layers=2, heads=8, kv_heads=4, head_dim=16, v_head_dim=16, d_model=64, d_mlp=96)
TOKENS = [(7 * i * i + 3 * i) % 256 for i in range(71)]


def config(**changes):
    return Config(**{name: getattr(SMALL, name) for name in SMALL.__slots__} | changes)


def run(decoder, tokens, bounds, cache=None):
    cache = cache or KVCache(decoder.config, len(tokens) + 32)
    steps = list(prefill(decoder, cache, tokens, bounds))
    return cache, steps[-1][1]


@pytest.mark.parametrize("v_dim", [16, 24])
@pytest.mark.parametrize("start", [0, 5])
def test_attention_is_naive_attention(v_dim, start):
    torch.manual_seed(1)
    count, heads, kv_heads, dim = 6, 8, 4, 16
    q = torch.randn(count, heads, dim)
    keys, values = torch.randn(kv_heads, start + count, dim), torch.randn(kv_heads, 11, v_dim)
    values = values[:, : start + count]
    got = _attention(q, keys, values, start)
    assert got.shape == (count, heads, v_dim)
    for t in range(count):
        for h in range(heads):
            kv = h // (heads // kv_heads)
            seen = start + t + 1
            scores = [float(q[t, h] @ keys[kv, s]) / math.sqrt(dim) for s in range(seen)]
            weights = torch.tensor(scores).softmax(0)
            torch.testing.assert_close(got[t, h], weights @ values[kv, :seen])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("v_dim", [16, 8, 40])
def test_chunked_prefill_is_full_prefill(dtype, v_dim):
    decoder = Decoder(config(dtype=dtype, v_head_dim=v_dim), seed=3)
    whole, logits = run(decoder, TOKENS, [0, len(TOKENS)])
    parts, chunked = run(decoder, TOKENS, chunk_bounds(len(TOKENS), 8, 2))
    tolerance = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}[dtype]
    for a, b in ((whole.k, parts.k), (whole.v, parts.v), (logits, chunked)):
        torch.testing.assert_close(a.float(), b.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("hits", range(9))
def test_loaded_prefix_gives_the_same_bits(hits):
    """Only the cache's values enter: whatever number of pages is loaded, all bits are equal."""
    page, chunk = 8, 2
    decoder = Decoder(config(v_head_dim=24), seed=5)
    bounds = chunk_bounds(len(TOKENS), page, chunk)
    cold, expected = run(decoder, TOKENS, bounds)
    have = usable_prefix(hits, len(TOKENS), page, chunk)
    warm = KVCache(decoder.config, len(TOKENS) + 32)
    warm.k[:, :have], warm.v[:, :have] = cold.k[:, :have], cold.v[:, :have]
    warm.length = have
    warm, logits = run(Decoder(decoder.config, seed=5), TOKENS, bounds, warm)
    assert torch.equal(warm.k, cold.k)
    assert torch.equal(warm.v, cold.v)
    assert torch.equal(logits, expected)
    assert list(greedy(decoder, warm, logits, 12)) == list(greedy(decoder, cold, expected, 12))


def test_a_changed_cache_changes_the_result():
    decoder = Decoder(SMALL)
    bounds = chunk_bounds(len(TOKENS), 8, 2)
    cold, expected = run(decoder, TOKENS, bounds)
    warm = KVCache(SMALL, len(TOKENS) + 32)
    warm.k[:, :64], warm.v[:, :64] = cold.k[:, :64], cold.v[:, :64]
    warm.v[0, 3, 1] += 8
    warm.length = 64
    _, logits = run(decoder, TOKENS, bounds, warm)
    assert not torch.equal(logits, expected)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_kv_heads_shard_by_projection_columns(size):
    """Rank r of a TP group holds exactly the KV that its own columns of the weights give."""
    decoder = Decoder(config(dtype="float32"), seed=2)
    cache, _ = run(decoder, TOKENS, [0, len(TOKENS)])
    heads, dim = SMALL.kv_heads // size, SMALL.v_head_dim
    x = _norm(decoder.embedding[torch.tensor(TOKENS)])
    for rank in range(size):
        columns = slice(rank * heads * dim, (rank + 1) * heads * dim)
        local = (x @ decoder.blocks[0]["v"][:, columns]).view(len(TOKENS), heads, dim)
        shard = cache.v[0, : len(TOKENS), rank * heads : (rank + 1) * heads]
        torch.testing.assert_close(local, shard)


def test_positions_matter_and_are_relative():
    """Rotary scores depend on distance only: the same two tokens further on score the same."""
    decoder = Decoder(config(layers=1, dtype="float32"))
    cache, _ = run(decoder, [9, 200, 9, 200], [0, 4])
    near = (cache.k[0, 0] * cache.k[0, 1]).sum(-1)
    torch.testing.assert_close(near, (cache.k[0, 2] * cache.k[0, 3]).sum(-1), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(cache.k[0, 0], cache.k[0, 2])


def test_weights_are_fixed_by_the_seed():
    assert Decoder(SMALL, seed=1).fingerprint() == Decoder(SMALL, seed=1).fingerprint()
    prints = {Decoder(SMALL, seed=s).fingerprint() for s in range(4)}
    prints.add(Decoder(config(v_head_dim=8)).fingerprint())
    assert len(prints) == 5


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 64, 65, 100])
@pytest.mark.parametrize("chunk", [1, 3])
def test_chunk_bounds_cover_once_and_leave_a_token(tokens, chunk):
    bounds = chunk_bounds(tokens, 16, chunk)
    assert bounds[0] == 0
    assert bounds[-1] == tokens
    assert bounds[-2] == prefix_length(tokens, 16) < tokens
    assert bounds == sorted(bounds)
    for hits in range(tokens // 16 + 1):
        assert usable_prefix(hits, tokens, 16, chunk) in bounds[:-1]


def test_text_round_trip():
    assert decode(encode("Zürich → KV")) == "Zürich → KV"
    assert decode([0xFF, 65]) == "\\xffA"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"layers": 0}, "layers"),
        ({"heads": 6}, "multiple"),
        ({"head_dim": 15}, "even"),
        ({"dtype": "int8"}, "int8"),
    ],
)
def test_bad_sizes_are_refused(changes, word):
    with pytest.raises(ConfigError, match=word):
        config(**changes)


def test_overfull_cache_and_empty_prompt_are_refused():
    decoder = Decoder(SMALL)
    with pytest.raises(ConfigError, match="do not fit"):
        decoder.forward([1, 2, 3], KVCache(SMALL, 2))
    with pytest.raises(ConfigError, match="no tokens"):
        decoder.forward([], KVCache(SMALL, 2))


@pytest.mark.parametrize("layout", ["page_head", "layer_first", "page_first", "page_unified"])
@pytest.mark.parametrize("v_dim", [4, 6])
def test_picture_shows_every_row_where_it_lies(layout, v_dim):
    """Gaps are where the next row is elsewhere, and each group has its share of the rows."""
    pages, slots, layers, heads = 3, 4, 2, 4
    blocks = 2 if layout == "page_unified" else None
    sizes = {"head_dim": 4, "v_head_dim": v_dim, "dtype": "float16", "head_blocks": blocks}
    with HostPool.allocate(
        layout=layout, pages=pages, page_size=slots, layers=layers, heads=heads, **sizes
    ) as pool:
        found = strips(pool, head_group=2)
        rows = slots * layers * heads
        assert len(found) == len(pool.planes)
        for strip, plane in zip(found, pool.planes, strict=True):
            cells = [cell for cell in strip.cells if cell != GAP]
            assert len(cells) + strip.left_out == rows * len(plane.components)
            assert cells.count(0) == cells.count(1)
            assert strip.row_nbytes == plane.layout.itemsize * plane.layout.axis("dim").extent
            runs = cover(plane.layout, {"page"}).runs
            assert strip.cells.count(GAP) == runs - 1
            assert draw(strip).plain.count("█") == len(cells)
