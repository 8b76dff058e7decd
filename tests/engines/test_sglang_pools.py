"""kvconnect's descriptors against those of the real SGLang 0.5.23 pools, pointer for pointer."""

import numpy as np
import pytest

from kvconnect.errors import LayoutError, PageIndexError
from kvconnect.foreign import wrap
from tests.engines import sglang_pools

pytestmark = pytest.mark.sglang

PAGES = [5, 0, 3, 2]


@pytest.fixture
def build():
    return sglang_pools


def tokens(page_size, pages=PAGES):
    import torch

    ids = torch.tensor(pages, dtype=torch.int64)
    return (ids[:, None] * page_size + torch.arange(page_size)).reshape(-1)


def assert_same(ours, theirs):
    address, nbytes = ours
    assert address.dtype == nbytes.dtype == np.uint64
    assert address.tolist() == theirs[0]
    assert nbytes.tolist() == theirs[1]


DIMS = [
    {},
    {"pages": 1, "layers": 1},
    {"page_size": 1},
    {"page_size": 6, "heads": 6, "dim": 8},
    {"heads": 1, "layers": 5},
    {"dim": 3, "heads": 4, "page_size": 2},
]


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_mha_pages(sglang, build, layout, dims):
    pool = build.mha(sglang, layout, **dims)
    index = tokens(pool.page_size, PAGES if pool.page_num > 1 else [0])
    assert_same(wrap(pool).page_buffer_meta(index), pool.get_page_buffer_meta(index))


@pytest.mark.parametrize("dims", DIMS)
def test_mha_split_heads(sglang, build, dims):
    pool = build.mha(sglang, "page_head", **dims)
    index = tokens(pool.page_size, PAGES if pool.page_num > 1 else [0])
    ours = wrap(pool)
    for factor in range(1, pool.head_num + 1):
        if pool.head_num % factor:
            with pytest.raises(LayoutError, match=f"split_factor {factor}"):
                ours.split_heads_page_buffer_meta(index, factor)
            continue
        theirs = pool.get_split_heads_page_buffer_meta(index, factor)
        assert_same(ours.split_heads_page_buffer_meta(index, factor), theirs)
        meta = ours.select_buffer_meta(index, factor)
        assert meta.mode == ("split_heads" if factor > 1 else "per_page")
        assert_same((meta.address, meta.nbytes), theirs)


@pytest.mark.parametrize("v_dim", [8, 24])
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_asymmetric_pages_and_what_sglang_refuses(sglang, build, layout, v_dim):
    pool = build.mha(sglang, layout, v_dim=v_dim)
    index, ours = tokens(pool.page_size), wrap(pool)
    assert_same(ours.page_buffer_meta(index), pool.get_page_buffer_meta(index))
    with pytest.raises(NotImplementedError):
        pool.get_split_heads_page_buffer_meta(index, 2)
    meta = ours.select_buffer_meta(index, 2)
    assert meta.mode == "scatter_gather"
    sizes = np.add.reduceat(meta.nbytes, meta.first[:-1]).reshape(len(PAGES), 2, 2)
    whole = np.array(pool.get_page_buffer_meta(index)[1]).reshape(len(PAGES), 2)
    assert (sizes * 2 == whole[:, None, :]).all()
    per_page = ours.select_buffer_meta(index, 2, fallback="per_page")
    assert per_page.mode == "per_page"
    assert_same((per_page.address, per_page.nbytes), pool.get_page_buffer_meta(index))


def test_page_unified_has_metadata_here(sglang, build):
    pool = build.mha(sglang, "page_unified", head_group_num=2)
    index, ours = tokens(pool.page_size), wrap(pool)
    with pytest.raises(ValueError, match="Unsupported layout"):
        pool.get_page_buffer_meta(index)
    address, nbytes = ours.page_buffer_meta(index)
    assert address.tolist() == [pool.kv_buffer[page].data_ptr() for page in PAGES]
    assert set(nbytes.tolist()) == {pool.page_unified_layout.bytes_per_page}
    meta = ours.select_buffer_meta(index, 2)
    spans = [pool.page_unified_layout.chunk_span((0, pool.layer_num), g) for g in (0, 1)]
    assert meta.mode == "split_heads"
    assert meta.address.tolist() == [int(a) + s[0] for a in address for s in spans]
    assert meta.nbytes.tolist() == [s[1] for _ in address for s in spans]


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_mla_pages(sglang, build, layout):
    pool = build.mla(sglang, layout)
    index = tokens(pool.page_size)
    assert_same(wrap(pool).page_buffer_meta(index), pool.get_page_buffer_meta(index))


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_mla_under_context_parallelism(sglang, build, layout):
    pool = build.mla(sglang, layout, page_size=8, dcp_size=2, dcp_rank=1)
    assert (pool.page_size, pool.logical_page_size) == (4, 8)
    pages = [page for page in PAGES if page < pool.page_num]
    index = tokens(pool.logical_page_size, pages)
    assert_same(wrap(pool).page_buffer_meta(index), pool.get_page_buffer_meta(index))
    with pytest.raises(PageIndexError, match="no multiple of page size 8"):
        wrap(pool).page_buffer_meta(tokens(4, [1, 2]))


def test_mla_page_unified(sglang, build):
    pool = build.mla(sglang, "page_unified")
    address, nbytes = wrap(pool).page_buffer_meta(tokens(pool.page_size))
    assert address.tolist() == [pool.kv_buffer[page].data_ptr() for page in PAGES]
    assert set(nbytes.tolist()) == {pool.kv_buffer[0].nbytes}


@pytest.mark.parametrize("index_layers", [0, 2, 3])
def test_mla_split_in_two(sglang, build, index_layers):
    import torch

    split = {
        "k": None,
        "v": None,
        "index_k": torch.zeros(index_layers, 1, 4, 1, 8) if index_layers else None,
        "index_scales": torch.zeros(index_layers, 1, 4, 1, 1) if index_layers else None,
        "index_layer_indices": tuple(range(index_layers)),
        "k_width": 32,
        "v_width": 16,
        "index_width": 8,
    }
    pool = build.mla(sglang, "page_first_kv_split", split=split)
    index = tokens(pool.page_size)
    assert_same(wrap(pool).page_buffer_meta(index), pool.get_page_buffer_meta(index))
    pool.dsa_kv_cache_store_fp8 = True
    assert_same(wrap(pool).page_buffer_meta(index), pool.get_page_buffer_meta(index))


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
@pytest.mark.parametrize("temporal", [(4, 16), (4, 0)])
def test_mamba(sglang, build, layout, temporal):
    pool = build.mamba(sglang, layout, temporal=temporal)
    index = tokens(1)
    assert_same(wrap(pool).page_buffer_meta(index), pool.get_page_buffer_meta(index))


def test_mamba_with_side_states(sglang, build):
    import torch

    pool = build.mamba(sglang, "page_first", extra=(torch.zeros(6, 7), torch.zeros(6, 2)))
    index, ours = tokens(1), wrap(pool)
    with pytest.raises(NotImplementedError):
        pool.get_page_buffer_meta(index)
    address, nbytes = ours.page_buffer_meta(index)
    buffers = pool.get_hybrid_pool_buffer()
    assert address.tolist() == [b[page].data_ptr() for page in PAGES for b in buffers]
    assert nbytes.tolist() == [b[page].nbytes for page in PAGES for b in buffers]


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_dsa_indexer(sglang, build, layout):
    pool = build.indexer(sglang, build.mla(sglang, layout))
    index, ours = tokens(pool.page_size), wrap(pool)
    assert ours.pages == pool.page_num < pool.indexer_page_num
    if layout == "layer_first":
        rows = pool.index_k_with_scale_buffer
        wanted = [rows[layer, page].data_ptr() for page in PAGES for layer in range(3)]
        assert ours.page_buffer_meta(index)[0].tolist() == wanted
    else:
        assert_same(ours.page_buffer_meta(index), pool.get_page_buffer_meta(index))


def test_mxfp8_with_its_scales(sglang, build, monkeypatch):
    pool = build.mxfp8(sglang, monkeypatch)
    index, ours = tokens(pool.page_size), wrap(pool)
    with pytest.raises(NotImplementedError):
        pool.get_page_buffer_meta(index)
    address, nbytes = ours.page_buffer_meta(index)
    size = pool.page_size
    parts = [
        [
            pool.k_buffer[page * size : (page + 1) * size],
            pool.v_buffer[page * size : (page + 1) * size],
            pool.k_scale_host[page],
            pool.v_scale_host[page],
        ]
        for page in PAGES
    ]
    assert address.tolist() == [part.data_ptr() for page in parts for part in page]
    assert nbytes.tolist() == [part.nbytes for page in parts for part in page]
    assert ours.scale_scheme == "mxfp8-interleaved"
    split = ours.select_buffer_meta(index, 4)
    assert int(split.nbytes.sum()) == int(nbytes.sum())
    assert split.names[:4] == ("k[0:1]", "v[0:1]", "k_scale[0:1]", "v_scale[0:1]")


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
@pytest.mark.parametrize("main", [False, True])
def test_nvfp4_rows(sglang, build, layout, main):
    pool = build.nvfp4(sglang, layout, main=main)
    index = tokens(pool.page_size)
    assert_same(wrap(pool).page_buffer_meta(index), pool.get_page_buffer_meta(index))


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_paged_rows(sglang, build, layout):
    pool = build.paged(sglang, layout)
    index = tokens(pool.page_size)
    assert_same(wrap(pool).page_buffer_meta(index), pool.get_page_buffer_meta(index))


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_keys_only(sglang, build, layout):
    pool = build.k_only(sglang, layout)
    index = tokens(pool.page_size)
    assert_same(wrap(pool).page_buffer_meta(index), pool.get_page_buffer_meta(index))


def test_page_envelopes_are_translated(sglang, build):
    pool = build.envelope(sglang)
    held = pool.alloc(4 * pool.page_size)
    first, rest = held[: pool.page_size], held[pool.page_size :]
    pool.free(first)
    ours = wrap(pool)
    assert_same(ours.page_buffer_meta(rest), pool.get_page_buffer_meta(rest))
    with pytest.raises(PageIndexError, match="not allocated"):
        ours.page_buffer_meta(first)


def test_logical_anchor_has_no_memory(sglang):
    with pytest.raises(LayoutError, match="kv_buffer is None"):
        wrap(sglang.paged.LogicalHostPool(16, 4))


def test_views_see_what_sglang_wrote(sglang, build):
    import torch

    for layout in ("layer_first", "page_first", "page_first_direct", "page_head"):
        pool = build.mha(sglang, layout)
        data = torch.arange(pool.kv_buffer.numel()).remainder(251).to(pool.dtype)
        pool.kv_buffer.copy_(data.reshape(pool.kv_buffer.shape))
        page = pool.get_data_page(4, flat=True).float().sum()
        ours = wrap(pool)
        seen = ours.component("k")[1].float().sum() + ours.component("v")[1].float().sum()
        assert torch.equal(page, seen)


def test_indices_sglang_takes_on_trust_are_refused(sglang, build):
    import torch

    pool = build.mha(sglang, "page_first")
    for index in ([2, 3, 4, 5], [0, 9, 17, 33], list(range(400, 404))):
        pool.get_page_buffer_meta(torch.tensor(index))
        with pytest.raises(PageIndexError):
            wrap(pool).page_buffer_meta(torch.tensor(index))
