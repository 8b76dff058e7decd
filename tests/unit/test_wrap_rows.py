"""Foreign pools of opaque rows, and plain tensors with axis names."""

import numpy as np
import pytest
import torch

from kvconnect.errors import LayoutError, PageIndexError
from kvconnect.foreign import pool_from_tensors, wrap

P, S, L, H, D = 5, 4, 3, 8, 16
PAGES = [3, 0, 4]


class Engine:
    """A host pool as engines make them: attributes and buffers."""

    def __init__(self, **fields):
        self.__dict__.update(fields)

    def but(self, **fields):
        return Engine(**self.__dict__ | fields)


def tokens(pages, size=S):
    return (np.array(pages)[:, None] * size + np.arange(size)).reshape(-1)


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
