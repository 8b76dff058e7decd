"""Foreign pools by duck typing: fakes of plain tensors, addresses by plain tensor indexing."""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvconnect.errors import LayoutError, PageIndexError
from kvconnect.foreign import pool_from_tensors, wrap
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


def rows(layout, nbytes=12, pages=P):
    shape = (L, pages, nbytes) if layout == "layer_first" else (pages, L, 1, nbytes)
    return torch.zeros(shape, dtype=torch.uint8)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_index_rows_with_a_page_too_many(layout):
    buffer = rows(layout, pages=P + 1)
    engine = Engine(
        layout=layout,
        index_k_with_scale_buffer=buffer,
        page_size=S,
        page_num=P,
        size=P * S,
        layer_num=L,
        indexer_page_stride_size=12,
        size_per_token=9,
    )
    pool = wrap(engine)
    assert pool.pages == P
    address, nbytes = pool.page_buffer_meta(tokens([2, 4]))
    if layout == "layer_first":
        assert address.tolist() == [buffer[i, p].data_ptr() for p in (2, 4) for i in range(L)]
    else:
        assert address.tolist() == [buffer[p].data_ptr() for p in (2, 4)]
        assert nbytes.tolist() == [L * 12] * 2
    with pytest.raises(PageIndexError, match="outside the pool of 5 pages"):
        pool.page_buffer_meta(tokens([5]))
    with pytest.raises(LayoutError, match="6 pages, page_num says 9"):
        wrap(engine.but(page_num=9, size=9 * S))


def test_states_of_recurrent_layers():
    convs = [torch.zeros(P, L, 1, 6, 3, dtype=torch.bfloat16), torch.zeros(P, L, 1, 5).bfloat16()]
    engine = Engine(
        layout="page_first",
        temporal_buffer=torch.zeros(P, L, 1, 4, 8),
        conv_buffer=convs,
        slot_state_buffers=[torch.zeros(P, 7)],
        page_size=1,
        page_num=P,
        size=P,
        num_mamba_layers=L,
        size_per_token=L * (4 * 8 * 4 + 18 * 2 + 5 * 2) + 28,
    )
    pool = wrap(engine)
    assert pool.components == ("temporal", "conv_0", "conv_1", "state_0")
    assert pool.dtype == "float32+bfloat16"
    address, _ = pool.page_buffer_meta(torch.tensor([3, 1]))
    buffers = [engine.temporal_buffer, *convs, *engine.slot_state_buffers]
    assert address.tolist() == [b[page].data_ptr() for page in (3, 1) for b in buffers]
    assert pool.component("conv_0").dtype == torch.bfloat16
    strided = torch.zeros(P, L, 1, 6, 6).bfloat16()[..., :3]
    with pytest.raises(LayoutError, match="are not one row"):
        wrap(engine.but(conv_buffer=[strided, convs[1]]))


def test_a_buffer_for_each_layer():
    buffers = [torch.zeros(P, 20, dtype=torch.uint8) for _ in range(L)]
    engine = Engine(
        layout="layer_first",
        kv_buffer=buffers,
        item_bytes=20,
        num_host_pages=P,
        page_size=S,
        layer_num=L,
    )
    address, _ = wrap(engine).page_buffer_meta(tokens(PAGES))
    assert address.tolist() == [b[p].data_ptr() for p in PAGES for b in buffers]
    with pytest.raises(LayoutError, match="kv_buffer has 3 layers, layer_num says 4"):
        wrap(engine.but(layer_num=4))


def test_plain_tensors_with_names_keep_their_gaps():
    wide = np.zeros((2, P, S, H, 2 * D), dtype=np.uint16)[..., :D]
    pool = pool_from_tensors(
        {"k+v": wide}, ("component", "page", "slot", "head", "dim"), page_size=S
    )
    address, nbytes = pool.page_buffer_meta(tokens([2]))
    assert set(nbytes.tolist()) == {D * 2}
    wanted = {wide[c, 2, s, h].ctypes.data for c in (0, 1) for s in range(S) for h in range(H)}
    assert set(address.tolist()) == wanted
    assert pool.regions[0].nbytes == 2 * wide.nbytes
    with pytest.raises(LayoutError, match="not one for each of"):
        pool_from_tensors({"k": wide}, ("page", "slot"), page_size=S)


def test_fused_pages_are_one_object_and_one_region():
    fused = torch.zeros(P, 2, S, H, D)
    names = ("page", "slot", "head", "dim")
    pool = pool_from_tensors({"k": fused[:, 0], "v": fused[:, 1]}, names, page_size=S)
    assert len(pool.regions) == 1
    address, nbytes = pool.page_buffer_meta(tokens(PAGES))
    assert address.tolist() == [fused[p, c].data_ptr() for p in PAGES for c in (0, 1)]
    assert set(nbytes.tolist()) == {fused[0, 0].nbytes}


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
