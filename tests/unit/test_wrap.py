"""Foreign pools by duck typing: fakes of plain tensors, addresses by plain tensor indexing."""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvconnect.errors import LayoutError, PageIndexError
from kvconnect.foreign import wrap
from kvconnect.hostpool import HostPool

P, S, L, H, D = 5, 4, 3, 8, 16
PAGES = [3, 0, 4]

SHAPES = {  # dimensions of an engine's buffer, and where page 3's first element of layer 1 is
    "layer_first": (2, L, P * S, H, D),
    "page_first": (2, P * S, L, H, D),
    "page_first_direct": (2, P, L, S, H, D),
    "page_head": (2, P, H, S, L, D),
    "page_unified": (P, 4, L, 2, S, H // 4, D),
}


class Engine:
    """A host pool as engines make them: attributes and buffers."""

    def __init__(self, **fields):
        self.__dict__.update(fields)

    def but(self, **fields):
        return Engine(**self.__dict__ | fields)


def mha(layout, dtype=torch.bfloat16):
    return Engine(
        layout=layout,
        kv_buffer=torch.zeros(SHAPES[layout], dtype=dtype),
        page_size=S,
        page_num=P,
        size=P * S,
        layer_num=L,
        head_num=H,
        head_dim=D,
        v_head_dim=D,
        dtype=dtype,
        size_per_token=2 * L * H * D * dtype.itemsize,
    )


def element(layout, kv, component, page, layer, slot, head):
    """One head row of one token, indexed as the engine would."""
    token = page * S + slot
    return {
        "layer_first": lambda: kv[component, layer, token, head],
        "page_first": lambda: kv[component, token, layer, head],
        "page_first_direct": lambda: kv[component, page, layer, slot, head],
        "page_head": lambda: kv[component, page, head, slot, layer],
        "page_unified": lambda: kv[page, head // 2, layer, component, slot, head % 2],
    }[layout]()


def rows_of(layout, kv, component, page, heads=range(H)):
    return {
        element(layout, kv, component, page, layer, slot, head).data_ptr()
        for layer in range(L)
        for slot in range(S)
        for head in heads
    }


def tokens(pages, size=S):
    return (np.array(pages)[:, None] * size + np.arange(size)).reshape(-1)


def rows_in(address, nbytes, row=D * 2):
    return {a for s, n in zip(address, nbytes, strict=True) for a in range(int(s), int(s + n), row)}


@pytest.mark.parametrize("layout", sorted(SHAPES))
def test_mha_in_every_layout(layout):
    engine = mha(layout)
    pool = wrap(engine)
    assert (pool.pages, pool.page_size, pool.layers, pool.heads) == (P, S, L, H)
    address, nbytes = pool.page_buffer_meta(torch.from_numpy(tokens(PAGES)))
    per_page = len(address) // len(PAGES)
    assert per_page == {"layer_first": 2 * L, "page_unified": 1}.get(layout, 2)
    for at, page in enumerate(PAGES):
        part = slice(at * per_page, (at + 1) * per_page)
        wanted = rows_of(layout, engine.kv_buffer, 0, page)
        wanted |= rows_of(layout, engine.kv_buffer, 1, page)
        assert rows_in(address[part], nbytes[part]) == wanted


@pytest.mark.parametrize("layout", sorted(SHAPES))
@pytest.mark.parametrize("factor", [2, 4, 8])
def test_mha_head_groups(layout, factor):
    engine = mha(layout)
    meta = wrap(engine).select_buffer_meta(tokens(PAGES), factor)
    for number in range(len(meta.first) - 1):
        page, name = PAGES[number // len(meta.names)], meta.names[number % len(meta.names)]
        components, _, span = name.partition("[")
        start, stop = (int(n) for n in span.rstrip("]").split(":"))
        wanted = set()
        for component in components.split("+"):
            at = "kv".index(component)
            wanted |= rows_of(layout, engine.kv_buffer, at, page, range(start, stop))
        rows = slice(meta.first[number], meta.first[number + 1])
        assert rows_in(meta.address[rows], meta.nbytes[rows]) == wanted


def test_views_of_foreign_pools_write_through():
    for layout in SHAPES:
        engine = mha(layout)
        view = wrap(engine).component("v")
        view[2].fill_(3)
        touched = {element(layout, engine.kv_buffer, 1, 2, 0, 0, h)[0].item() for h in range(H)}
        assert touched == {3.0}
        assert int((engine.kv_buffer != 0).sum()) == L * S * H * D


def asymmetric(layout, v_dim=24):
    shape = SHAPES[layout][1:-1]
    return mha(layout).but(
        kv_buffer=tuple(torch.zeros(*shape, d, dtype=torch.bfloat16) for d in (D, v_dim)),
        v_head_dim=v_dim,
        size_per_token=L * H * (D + v_dim) * 2,
    )


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_k_and_v_apart(layout):
    engine = asymmetric(layout)
    pool = wrap(engine)
    assert (pool.head_dim, pool.v_head_dim) == (D, 24)
    address, nbytes = pool.page_buffer_meta(tokens([2]))
    for at, dim in enumerate((D, 24)):
        buffer = engine.kv_buffer[at][None]
        wanted = {
            element(layout, buffer, 0, 2, layer, slot, head).data_ptr()
            for layer in range(L)
            for slot in range(S)
            for head in range(H)
        }
        assert rows_in(address[at::2], nbytes[at::2], dim * 2) == wanted


def mla(layout, width=48):
    shapes = {
        "layer_first": (L, P * S, 1, width),
        "page_first": (P * S, L, 1, width),
        "page_first_direct": (P, L, S, 1, width),
        "page_unified": (P, L, S, width),
    }
    return Engine(
        layout=layout,
        kv_buffer=torch.zeros(shapes[layout], dtype=torch.bfloat16),
        page_size=S,
        page_num=P,
        size=P * S,
        layer_num=L,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        kv_cache_dim=width,
        dtype=torch.bfloat16,
        size_per_token=width * L * 2,
    )


@pytest.mark.parametrize(
    "layout", ["layer_first", "page_first", "page_first_direct", "page_unified"]
)
def test_mla(layout):
    engine = mla(layout)
    pool = wrap(engine)
    assert (pool.components, pool.heads, pool.head_dim, pool.v_head_dim) == (("kv",), 1, 48, 0)
    assert {"page", "layer", "slot", "head", "dim"} == set(pool.planes[0].layout.names)
    address, nbytes = pool.page_buffer_meta(tokens(PAGES))
    runs = L if layout == "layer_first" else 1
    assert len(address) == len(PAGES) * runs
    view = pool.component("kv")
    assert tuple(view.shape) == (P, L, S, 1, 48)
    wanted = {view[p, layer, s].data_ptr() for p in PAGES for layer in range(L) for s in range(S)}
    assert rows_in(address, nbytes, 96) == wanted
    flat = engine.kv_buffer.view(-1)
    flat.copy_(torch.arange(flat.numel()).remainder(97).to(flat.dtype))
    engine_page = {
        "layer_first": lambda: engine.kv_buffer[:, 3 * S : 4 * S, 0],
        "page_first": lambda: engine.kv_buffer[3 * S : 4 * S, :, 0].transpose(0, 1),
        "page_first_direct": lambda: engine.kv_buffer[3, :, :, 0],
        "page_unified": lambda: engine.kv_buffer[3],
    }[layout]()
    assert torch.equal(view[3, :, :, 0], engine_page)


def test_context_parallel_pages_are_wider_in_the_index_space():
    pool = wrap(mla("page_first").but(dcp_size=2, dcp_rank=1))
    assert pool.page_ids(tokens([3, 1], 2 * S)).tolist() == [3, 1]
    with pytest.raises(PageIndexError, match="no multiple of page size 8"):
        pool.page_ids(tokens([3, 4]))


def test_striped_pools_take_only_their_own_pages():
    inner = mha("page_first")
    facade = Engine(host_pool=inner, placement=object(), shard_rank=1, shard_size=2)
    pool = wrap(facade)
    assert pool.page_ids(tokens([1, 7])).tolist() == [0, 3]
    assert pool.owner is facade
    with pytest.raises(PageIndexError, match="page 4 lies on shard rank 0, this is rank 1 of 2"):
        pool.page_ids(tokens([1, 4]))
    with pytest.raises(PageIndexError, match="page 5 is outside the pool of 5 pages"):
        pool.page_ids(tokens([11]))


def test_scales_are_components_cut_by_heads():
    payload = mha("page_first", torch.float8_e4m3fn)
    scales = [torch.zeros(P, L, H * 6, dtype=torch.uint8) for _ in range(2)]
    engine = payload.but(
        k_scale_host=scales[0],
        v_scale_host=scales[1],
        size_per_token=2 * L * H * D + 2 * L * H * 6 // S,
    )
    pool = wrap(engine)
    assert pool.components == ("k", "v", "k_scale", "v_scale")
    assert (pool.dtype, pool.scale_scheme) == ("float8_e4m3fn", "mxfp8-interleaved")
    address, nbytes = pool.page_buffer_meta(tokens([2]))
    assert address.tolist()[2:] == [scale[2].data_ptr() for scale in scales]
    assert nbytes.tolist()[2:] == [L * H * 6] * 2
    with pytest.raises(LayoutError, match="46 B per page and layer, which head_num 8 does not"):
        wrap(engine.but(k_scale_host=torch.zeros(P, L, 46, dtype=torch.uint8)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 8}, r"has 16 steps of 'dim', head_dim says 8"),
        ({"v_head_dim": 8}, r"has 16 steps of 'dim', v_head_dim says 8"),
        ({"head_num": 4}, r"has 8 steps of 'head', head_num says 4"),
        ({"layer_num": 2}, r"has 3 steps of 'layer', layer_num says 2"),
        ({"page_num": 4}, r"has 5 steps of 'page', page_num says 4"),
        ({"page_size": 5}, r"has 4 steps of 'page', page_num says 5|page_num says"),
        ({"page_size": 3}, r"20 token slots are not whole pages of page_size 3"),
        ({"size": 16}, r"hold 20 \(5 pages\), size says 16"),
        ({"dtype": torch.float16}, r"kv_buffer is bfloat16, dtype says float16"),
        ({"size_per_token": 7}, r"size_per_token 7 B times 20 tokens is 140 B"),
        ({"page_size": None}, r"page_size is None"),
        ({"layer_num": 0}, r"layer_num is 0"),
        ({"layout": "page_last"}, r"layout 'page_last' is not one of"),
        ({"kv_buffer": None}, r"kv_buffer is None"),
        ({"kv_buffer": torch.zeros(2, 0, L, H, D)}, r"kv_buffer has no elements"),
        ({"kv_buffer": torch.zeros(2, 20, L, H)}, r"4 dimensions"),
        ({"kv_buffer": (torch.zeros(2),)}, r"kv_buffer has 1 buffers, not K and V"),
    ],
)
def test_cases_13_and_25_what_is_declared_must_be_what_is_there(change, words):
    with pytest.raises(LayoutError, match=words):
        wrap(mha("page_first").but(**change))


def test_case_13_rows_twice_as_wide_as_declared():
    wide = torch.zeros(2, P * S, L, H, 2 * D, dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match="has 32 steps of 'dim', head_dim says 16"):
        wrap(mha("page_first").but(kv_buffer=wide))
    with pytest.raises(LayoutError, match="elements span 61408 B but are 30720 B"):
        wrap(mha("page_first").but(kv_buffer=wide[..., :D]))


def test_what_is_no_pool_is_told_what_to_do():
    with pytest.raises(LayoutError, match="describe its memory with pool_from_tensors"):
        wrap(object())
    with pytest.raises(LayoutError, match="group of 2 pools; wrap the host_pool of each entry"):
        wrap(Engine(entries=[1, 2], get_pool=None))


def test_own_pools_are_returned_and_owners_kept():
    with HostPool.allocate(
        layout="page_head", pages=2, page_size=4, layers=1, heads=2, head_dim=8
    ) as pool:
        assert wrap(pool) is pool
    engine = mha("page_first")
    gone = weakref.ref(engine)
    wrapped = wrap(engine)
    del engine
    gc.collect()
    assert wrapped.owner is gone()
    view = wrapped.component("k")
    del wrapped
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


def test_views_are_for_host_memory():
    engine = mha("page_first")
    pool = wrap(engine)
    planes = tuple(replace(p, region=replace(p.region, device="cuda:0")) for p in pool.planes)
    away = replace(pool, planes=planes)
    for view in (away.component, away.array):
        with pytest.raises(LayoutError, match="lies on cuda:0"):
            view("k")


def test_logical_pools_and_namespaces():
    with pytest.raises(LayoutError, match="kv_buffer is None; a logical or destroyed pool"):
        wrap(SimpleNamespace(kv_buffer=None, page_size=4, size=8, layout="layer_first"))
