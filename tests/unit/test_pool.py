"""Descriptors of pools against an oracle that enumerates elements by their tensor addresses."""

import mmap

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from kvconnect.errors import CapacityError, ConfigError, LayoutError, PageIndexError
from kvconnect.hostpool import HostPool
from kvconnect.layouts import ORDERS
from kvconnect.page_index import check_page_ids, token_pages
from kvconnect.region import Region

SHAPE = {"pages": 5, "page_size": 4, "layers": 3, "heads": 8, "head_dim": 16}
PAGES = [3, 0, 4]


def make(layout, **changes):
    options = SHAPE | changes
    if layout == "page_unified" and options.get("v_head_dim") != 0:
        options.setdefault("head_blocks", 4)
    return HostPool.allocate(layout=layout, **options)


def tokens(pages, size=SHAPE["page_size"]):
    ids = np.array(pages, dtype=np.int64)
    return (ids[:, None] * size + np.arange(size)).reshape(-1)


def element_bytes(pool, component, page, heads=slice(None)):
    """Addresses of every byte of a component's page, from torch's own strides: no cover()."""
    view = pool.component(component)
    index = np.indices(view.shape).reshape(view.ndim, *view.shape)
    strides = np.array(view.stride()).reshape(-1, *[1] * view.ndim)
    at = (index * strides).sum(axis=0) * view.element_size() + view.data_ptr()
    at = at[page]
    if at.ndim == 5:  # (layer, slot, head_block, head, dim)
        at = at.reshape(*at.shape[:2], -1, at.shape[-1])
    if at.ndim == 4:
        at = at[:, :, heads]
    flat = at.reshape(-1, 1) + np.arange(view.element_size())
    return set(flat.reshape(-1).tolist())


def run_bytes(address, nbytes):
    runs = [range(int(a), int(a) + int(n)) for a, n in zip(address, nbytes, strict=True)]
    found = [b for run in runs for b in run]
    assert len(set(found)) == len(found), "runs overlap"
    return set(found)


LAYOUTS = sorted(ORDERS)
V_DIMS = [None, 8, 24, 0]


def cases():
    return [(layout, v) for layout in LAYOUTS for v in V_DIMS]


@pytest.mark.parametrize(("layout", "v_head_dim"), cases())
@pytest.mark.parametrize("pages", [5, 1])
def test_page_meta_is_every_byte_of_the_pages_once(layout, v_head_dim, pages):
    heads = 1 if v_head_dim == 0 else 8
    with make(layout, v_head_dim=v_head_dim, heads=heads, pages=pages) as pool:
        chosen = PAGES if pages > 1 else [0]
        address, nbytes = pool.page_buffer_meta(tokens(chosen))
        each = len(address) // len(chosen)
        for at, page in enumerate(chosen):
            part = slice(at * each, (at + 1) * each)
            wanted = set().union(*(element_bytes(pool, c, page) for c in pool.components))
            assert run_bytes(address[part], nbytes[part]) == wanted
        pool.table.locate(address, nbytes)


@pytest.mark.parametrize(("layout", "v_head_dim"), [c for c in cases() if c[1] != 0])
@pytest.mark.parametrize("factor", [1, 2, 4, 8])
@pytest.mark.parametrize("join", [False, True])
def test_selected_objects_are_their_heads_exactly(layout, v_head_dim, factor, join):
    with make(layout, v_head_dim=v_head_dim) as pool:
        meta = pool.select_buffer_meta(torch.from_numpy(tokens(PAGES)), factor, join=join)
        assert len(meta.first) == len(PAGES) * len(meta.names) + 1
        group = 8 // factor
        for number in range(len(meta.first) - 1):
            page, name = PAGES[number // len(meta.names)], meta.names[number % len(meta.names)]
            components, _, heads = name.partition("[")
            start = int(heads.partition(":")[0]) if heads else 0
            wanted = set().union(
                *(
                    element_bytes(pool, c, page, slice(start, start + group))
                    for c in components.split("+")
                )
            )
            rows = slice(meta.first[number], meta.first[number + 1])
            assert run_bytes(meta.address[rows], meta.nbytes[rows]) == wanted


def test_runs_per_object_are_those_of_the_design():
    with HostPool.allocate(
        layout="page_unified", pages=2, page_size=64, layers=32, heads=8, head_dim=8, head_blocks=4
    ) as pool:
        index = tokens([1], 64)
        assert len(pool.page_buffer_meta(index)[0]) == 1
        assert pool.select_buffer_meta(index, 4).nbytes.tolist() == [pool.page_nbytes // 4] * 4
        assert pool.select_buffer_meta(index, 2).nbytes.tolist() == [pool.page_nbytes // 2] * 2


def test_k_and_v_of_different_dims_are_one_run_each_in_page_head_order():
    with make("page_head", v_head_dim=24) as pool:
        meta = pool.select_buffer_meta(tokens(PAGES), 4)
        assert meta.mode == "split_heads"
        assert meta.names[:2] == ("k[0:2]", "v[0:2]")
        per_head = 4 * 3 * 2
        assert meta.nbytes.tolist() == [2 * 16 * per_head, 2 * 24 * per_head] * 12
        address, nbytes = pool.split_heads_page_buffer_meta(tokens(PAGES), 4)
        assert (address == meta.address).all()
        assert (nbytes == meta.nbytes).all()


def test_groups_that_cut_blocks_unevenly_are_still_right():
    with make("page_unified", heads=6, head_blocks=3) as pool:
        with pytest.raises(LayoutError, match="cut through blocks of 2"):
            pool.split_heads_page_buffer_meta(tokens([1]), 2)
        meta = pool.select_buffer_meta(tokens([1]), 2)
        assert meta.mode == "scatter_gather"
        for at in (0, 1):
            rows = slice(meta.first[at], meta.first[at + 1])
            heads = slice(3 * at, 3 * at + 3)
            wanted = element_bytes(pool, "k", 1, heads) | element_bytes(pool, "v", 1, heads)
            assert run_bytes(meta.address[rows], meta.nbytes[rows]) == wanted


def test_selection_says_why_and_obeys_its_limits():
    with make("page_first", v_head_dim=8) as pool:
        index = tokens(PAGES)
        assert pool.select_buffer_meta(index).mode == "per_page"
        meta = pool.select_buffer_meta(index, 4)
        assert meta.mode == "scatter_gather"
        assert "layer stride 256 B, run ends at 64 B" in meta.reason
        short = pool.select_buffer_meta(index, 4, min_run_bytes=512)
        assert short.mode == "scatter_gather"
        assert "no staging region" in short.reason
        asked = pool.select_buffer_meta(index, 4, fallback="per_page")
        assert asked.mode == "per_page"
        assert "as asked" in asked.reason
        assert asked.address.tolist() == pool.page_buffer_meta(index)[0].tolist()
        with pytest.raises(ConfigError, match="fallback='page'"):
            pool.select_buffer_meta(index, 4, fallback="page")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("v_head_dim", [None, 24])
def test_staged_objects_carry_the_runs_and_come_back(layout, v_head_dim):
    with make(layout, v_head_dim=v_head_dim, components={"scale": 10}) as pool:
        rng = np.random.default_rng(1)
        for name in pool.components:
            view = pool.array(name)
            view[...] = rng.integers(0, 1 << 8 * view.itemsize, view.shape, dtype=view.dtype)
        before = {name: pool.array(name).copy() for name in pool.components}
        area = mmap.mmap(-1, 1 << 20)
        whole = np.frombuffer(area, dtype=np.uint8)
        whole[:] = 0xA5
        staging = Region("staging", whole.ctypes.data + 4096 - 64, (1 << 20) - 8192)
        options = {"max_runs": 0, "min_run_bytes": 1 << 20, "staging": staging}
        meta = pool.select_buffer_meta(tokens(PAGES), 8, **options)
        direct = pool.select_buffer_meta(tokens(PAGES), 8)
        if meta.mode != "staged":  # one run per object needs no staging
            assert meta.mode == "split_heads"
            return
        meta.gather()
        base = whole.ctypes.data
        for number in range(len(meta.first) - 1):
            rows = slice(direct.first[number], direct.first[number + 1])
            wanted = b"".join(
                bytes((np.ctypeslib.ctypes.c_uint8 * int(n)).from_address(int(a)))
                for a, n in zip(direct.address[rows], direct.nbytes[rows], strict=True)
            )
            start = int(meta.address[number]) - base
            assert start + base == int(meta.address[number])
            assert whole[start : start + int(meta.nbytes[number])].tobytes() == wanted
            assert int(meta.address[number]) % 4096 == 0
        used = run_bytes(meta.address, meta.nbytes)
        outside = np.ones(len(whole), dtype=bool)
        outside[np.array(sorted(used)) - base] = False
        assert (whole[outside] == 0xA5).all()
        for name in pool.components:
            pool.array(name)[PAGES] = 0
        meta.scatter()
        for name in pool.components:
            assert (pool.array(name) == before[name]).all()


def test_staging_that_is_too_small_is_refused():
    with make("page_first") as pool:
        staging = Region("staging", 1 << 20, 4096)
        with pytest.raises(CapacityError, match=r"3 pages take 49152 B .* the region has 4096 B"):
            pool.select_buffer_meta(tokens(PAGES), 2, min_run_bytes=4096, staging=staging)


@pytest.mark.parametrize("factor", [3, 0, -2, 3.0, 2.0, True, "2", 16])
def test_case_11_factors_that_do_not_divide(factor):
    with make("page_head") as pool:
        for call in (pool.split_heads_page_buffer_meta, pool.select_buffer_meta):
            with pytest.raises(LayoutError, match="split_factor"):
                call(tokens(PAGES), factor)
    with make("page_head", heads=3) as pool, pytest.raises(LayoutError, match="3 local heads"):
        pool.split_heads_page_buffer_meta(tokens(PAGES), 2)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ([0, 9, 17, 33], "not 4 consecutive tokens"),
        ([0, 2, 1, 3], "not 4 consecutive tokens"),
        ([0, 1, 1, 3], "not 4 consecutive tokens"),
        ([2, 3, 4, 5], "no multiple of page size 4"),
        ([-4, -3, -2, -1], "page -1 is outside the pool of 5 pages"),
        ([20, 21, 22, 23], "page 5 is outside the pool of 5 pages"),
        ([0, 1, 2, 3, 4, 5], "6 token indices are not whole pages of 4"),
        ([4, 5, 6, 7, 4, 5, 6, 7], "page 1 appears twice"),
        (np.arange(4, dtype=np.int32), "int32"),
        (torch.arange(4, dtype=torch.int32), "int32"),
        (np.arange(4.0), "integers"),
        (np.arange(8).reshape(2, 4), "one dimension"),
    ],
)
def test_case_12_bad_indices_are_one_error(index, words):
    with make("page_first") as pool:
        for call in (
            pool.page_buffer_meta,
            pool.select_buffer_meta,
            lambda i: pool.split_heads_page_buffer_meta(i, 1),
        ):
            with pytest.raises(PageIndexError, match=words):
                call(index)


def test_no_indices_are_no_descriptors():
    with make("page_head") as pool:
        for empty in ([], np.zeros(0, np.int64), torch.zeros(0, dtype=torch.int64)):
            assert [len(part) for part in pool.page_buffer_meta(empty)] == [0, 0]
            assert pool.select_buffer_meta(empty, 2).first.tolist() == [0]
            assert len(pool.split_heads_page_buffer_meta(empty, 4)[0]) == 0


@given(
    st.integers(1, 6),
    st.lists(st.integers(-2, 30), max_size=24),
    st.lists(st.integers(0, 5), max_size=4),
)
@settings(max_examples=400, deadline=None)
def test_token_pages_accepts_exactly_whole_pages(step, loose, pages):
    for index in (loose, [page * step + slot for page in pages for slot in range(step)]):
        rows = [index[at : at + step] for at in range(0, len(index), step)]
        good = all(
            len(row) == step and row[0] % step == 0 and row == list(range(row[0], row[0] + step))
            for row in rows
        )
        if good:
            assert token_pages(index, step).tolist() == [row[0] // step for row in rows]
        else:
            with pytest.raises(PageIndexError):
                token_pages(index, step)


@given(st.integers(1, 12), st.lists(st.integers(-40, 40), max_size=8))
@settings(max_examples=400, deadline=None)
def test_page_ids_are_accepted_exactly_if_distinct_and_inside(pages, ids):
    array = np.array(ids, dtype=np.int64)
    for capacity in (pages, pages * 1000):
        good = len(set(ids)) == len(ids) and all(0 <= n < capacity for n in ids)
        if good:
            assert check_page_ids(array, capacity).tolist() == ids
        else:
            with pytest.raises(PageIndexError, match=r"outside the pool|appears twice"):
                check_page_ids(array, capacity)


def test_large_pools_check_duplicates_by_sorting():
    with make("page_first", pages=4096, layers=1, heads=1, head_dim=1, page_size=1) as pool:
        assert len(pool.page_ids([7, 4095])) == 2
        with pytest.raises(PageIndexError, match="page 7 appears twice"):
            pool.page_ids([7, 3, 7])


def test_addresses_beyond_32_bits_are_exact():
    with HostPool.allocate(
        layout="page_head", pages=700, page_size=64, layers=32, heads=8, head_dim=128, pin=False
    ) as pool:  # 5.5 GiB of address space, never touched
        address, _ = pool.split_heads_page_buffer_meta(tokens([699], 64), 8)
        base, page = pool.planes[0].address, 64 * 32 * 8 * 128 * 2
        assert address[0::2].tolist() == [base + 699 * page + h * page // 8 for h in range(8)]
