"""The adapter through SGLang's real factory, pools and controller: round trips and misses."""

import uuid
from types import SimpleNamespace

import pytest
import torch

from kvconnect.engines.sglang.flat_order import ordered_plane
from kvconnect.foreign import wrap
from kvconnect.region import Region
from tests.engines import sglang_pools as pools
from tests.engines.sglang_rank import Rank, content, fill, keys, tokens, wipe

pytestmark = pytest.mark.sglang


@pytest.fixture(params=["memory", "nvme"])
def url(request, tmp_path):
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    return f"nvme://{tmp_path}?capacity=256MiB"


SHAPES = {
    "page_first": lambda sg: pools.mha(sg, "page_first"),
    "page_first_direct": lambda sg: pools.mha(sg, "page_first_direct"),
    "page_head": lambda sg: pools.mha(sg, "page_head"),
    "layer_first": lambda sg: pools.mha(sg, "layer_first"),
    "page_unified": lambda sg: pools.mha(sg, "page_unified", head_group_num=2),
    "one page of 480 B": lambda sg: pools.mha(
        sg, "page_first", pages=12, page_size=1, layers=3, heads=1, dim=80
    ),
    "float8": lambda sg: pools.mha(sg, "page_first", dtype=torch.float8_e4m3fn),
    "K and V apart": lambda sg: pools.mha(sg, "page_first", v_dim=8),
    "K and V apart, direct": lambda sg: pools.mha(sg, "page_first_direct", v_dim=8),
    "MLA page_first": lambda sg: pools.mla(sg, "page_first"),
    "MLA page_first_direct": lambda sg: pools.mla(sg, "page_first_direct"),
    "MLA layer_first": lambda sg: pools.mla(sg, "layer_first"),
}

NO_FLAT_PAGES = {"page_unified", "K and V apart", "K and V apart, direct"}


@pytest.mark.parametrize("shape", SHAPES)
def test_pages_come_back_as_they_were(sglang, url, shape):
    """Three pages go out in one order and come back into other places in another."""
    pool = SHAPES[shape](sglang)
    fill(pool, 1)
    before, names = content(pool, range(pool.page_num)), keys(shape, 3)
    with Rank(pool, url, mla=shape.startswith("MLA")) as rank:
        assert content(pool, range(pool.page_num)) == before, "attaching changed a page"
        assert rank.put(names, [2, 0, 1]) == 3
        assert rank.exists(names) == 3
        wipe(pool)
        assert rank.get(names, [4, 5, 3]) == 3
        assert content(pool, [4, 5, 3]) == [before[2], before[0], before[1]]
        assert not any(b"".join(content(pool, [0, 1, 2]))), "a page not asked for was written"


@pytest.mark.parametrize("shape", sorted(SHAPES.keys() - NO_FLAT_PAGES))
def test_flat_pages_are_the_same_objects(sglang, url, shape):
    """What SGLang copies to flat tensors can be read in place, and the other way round."""
    writer, reader = SHAPES[shape](sglang), SHAPES[shape](sglang)
    fill(writer, 2)
    want, names, mla = content(writer, [0, 1]), keys("flat", 2), shape.startswith("MLA")
    for way in (0, 1):
        with (
            Rank(writer, url, interface=way, mla=mla, salt=str(way)) as there,
            Rank(reader, url, interface=1 - way, mla=mla, salt=str(way)) as here,
        ):
            assert there.put(names, [0, 1]) == 2
            assert here.exists(names) == 2
            wipe(reader)
            assert here.get(names, [4, 2]) == 2
            assert content(reader, [4, 2]) == want
            wipe(writer)
            assert there.get(names, [0, 1]) == 2
            assert content(writer, [0, 1]) == want
            fill(writer, 2)


def test_flat_pages_of_an_unknown_order_stay_apart(sglang, url, monkeypatch):
    """Where a flat page's order cannot be proved, nothing in place may read it for its own."""
    pool = pools.mha(sglang, "layer_first")
    fill(pool, 12)
    want, names = content(pool, [0, 1]), keys("opaque", 2)
    with monkeypatch.context() as patched:
        patched.setattr("kvconnect.engines.sglang.flat.ordered_plane", lambda *_: None)
        flat = Rank(pool, url, interface=0, lcm=2)
    with flat, Rank(pool, url, lcm=2) as in_place, Rank(pool, url, interface=0) as ordered:
        assert flat.put(names, [0, 1]) == 2
        assert (in_place.exists(names), ordered.exists(names)) == (0, 0)
        assert flat.get(names, [4, 3]) == 2
        assert content(pool, [4, 3]) == want


def test_a_view_that_is_no_page_proves_no_order(sglang):
    """A copy, a shorter page and swapped axes: each leaves the page opaque."""
    pool = pools.mha(sglang, "page_first")
    ours, region = wrap(pool), Region("flat", 4096, 8 << 13)
    nbytes = pool.get_data_page(0).nbytes
    assert ordered_plane(pool, ours, nbytes, region, 8192).layout.axis("page").extent == 8
    assert ordered_plane(pool, ours, nbytes - 2, region, 8192) is None
    view = pool.get_data_page(0, flat=False)
    for other in (view.clone(), view.transpose(1, 2), view[:, :1]):
        shown = SimpleNamespace(get_data_page=lambda index, flat, other=other: other)
        assert ordered_plane(shown, ours, nbytes, region, 8192) is None


@pytest.mark.parametrize("shape", sorted(NO_FLAT_PAGES))
def test_pools_without_flat_pages_say_so_at_attach(sglang, url, shape):
    with pytest.raises(NotImplementedError, match='"interface_v1": 1'):
        Rank(SHAPES[shape](sglang), url, interface=0)


def test_more_pages_than_a_batch_and_than_the_buffers(sglang, url):
    pool = pools.mha(sglang, "page_first", pages=640, page_size=1, layers=2, heads=2)
    fill(pool, 3)
    want, names = content(pool, range(300)), keys("many", 300)
    for interface in (1, 0):
        # Room for a tenth of the pages at a time.
        small = {"batch_bytes": 30 * 512, "staging": 30 * 4096, "flat_bytes": 30 * 4096}
        with Rank(pool, url, interface=interface, salt=str(interface), **small) as rank:
            assert rank.put(names, range(300)) == 300
            assert rank.exists([*names, *keys("others", 2000)]) == 300
            assert rank.get(names, range(320, 620)) == 300
            assert content(pool, range(320, 620)) == want


@pytest.mark.parametrize("interface", [1, 0])
def test_a_hole_ends_the_prefix_and_keeps_what_leads(sglang, url, interface):
    pool = pools.mha(sglang, "page_first", pages=16)
    fill(pool, 4)
    want, names = content(pool, range(6)), keys("hole", 6)
    with Rank(pool, url, interface=interface) as rank:
        assert rank.exists(names) == 0
        assert rank.exists([]) == 0
        assert rank.put(names[:3], [0, 1, 2]) == 3
        assert rank.put(names[4:], [4, 5]) == 2
        assert (rank.exists(names), rank.exists(names[4:])) == (3, 2)
        assert rank.get(names, range(8, 14)) == 3
        assert content(pool, range(8, 11)) == want[:3]


def test_pages_after_a_hole_are_loaded_too(sglang, url):
    """Per page: one that is missing takes no other with it."""
    pool = pools.mha(sglang, "page_head", pages=16)
    fill(pool, 5)
    want, names = content(pool, range(4)), keys("each", 4)
    with Rank(pool, url) as rank:
        assert rank.put([names[0], names[3]], [0, 3]) == 2
        got = rank.backend.batch_get_v1(names, tokens(pool, range(8, 12)))
        assert got == [True, False, False, True]
        assert content(pool, [8, 11]) == [want[0], want[3]]


def test_storing_twice_keeps_the_page(sglang, url):
    pool = pools.mha(sglang, "page_first")
    fill(pool, 6)
    want, names = content(pool, [0, 1]), keys("twice", 2)
    with Rank(pool, url) as rank:
        assert [rank.put(names, [0, 1]), rank.put(names, [0, 1])] == [2, 2]
        assert rank.get(names, [3, 4]) == 2
        assert content(pool, [3, 4]) == want


def test_pages_survive_a_restart(sglang, tmp_path):
    url, pool = f"nvme://{tmp_path}?capacity=64MiB", pools.mha(sglang, "page_first_direct")
    fill(pool, 7)
    want, names = content(pool, [0, 1]), keys("restart", 2)
    with Rank(pool, url) as rank:
        assert rank.put(names, [0, 1]) == 2
    wipe(pool)
    with Rank(pool, url) as rank:
        assert rank.get(names, [1, 0]) == 2
        assert content(pool, [1, 0]) == want


@pytest.mark.parametrize("interface", [1, 0])
def test_a_key_that_comes_twice(sglang, url, interface):
    """A load fills every page that is named; a store keeps the first page of a key."""
    pool = pools.mha(sglang, "page_first", pages=16)
    fill(pool, 8)
    want, (a, b) = content(pool, range(2)), keys("double", 2)
    with Rank(pool, url, interface=interface) as rank:
        assert rank.put([a, b, a], [0, 1, 0]) == 3
        assert rank.exists([a, a, b, b]) == 4
        assert rank.get([a, b, a, a], [8, 9, 10, 11]) == 4
        assert content(pool, range(8, 12)) == [want[0], want[1], want[0], want[0]]


def test_a_page_named_under_two_keys_moves_nothing(sglang, url):
    pool = pools.mha(sglang, "page_first")
    fill(pool, 9)
    a, b = keys("clash", 2)
    with Rank(pool, url) as rank:
        assert rank.put([a, b], [0, 1]) == 2
        before = content(pool, range(6))
        assert rank.backend.batch_get_v1([a, b, a], tokens(pool, [3, 4, 4])) == [False] * 3
        assert content(pool, range(6)) == before


BAD = {
    "not aligned": torch.arange(1, 9),
    "not in one piece": torch.tensor([0, 1, 2, 4, 4, 5, 6, 7]),
    "beyond the pool": torch.arange(96, 104),
    "negative": torch.arange(-8, 0),
    "part of a page": torch.arange(7),
    "one page for two keys": torch.arange(4),
    "int32": torch.arange(8, dtype=torch.int32),
    "the same page twice": torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_indices_move_nothing_and_raise_nothing(sglang, url, bad, caplog):
    pool = pools.mha(sglang, "page_first")
    fill(pool, 10)
    names = keys("bad", 2)
    with Rank(pool, url) as rank:
        before = content(pool, range(6))
        assert rank.backend.batch_set_v1(names, BAD[bad]) == [False, False]
        assert rank.exists(names) == 0
        assert rank.put(names, [0, 1]) == 2
        caplog.clear()
        for _ in range(3):
            assert rank.backend.batch_get_v1(names, BAD[bad]) == [False, False]
        assert content(pool, range(6)) == before
    assert [r.message for r in caplog.records if "get refused" in r.message][1:] == []
    assert any("get refused" in r.message for r in caplog.records)


def test_no_keys_are_no_calls(sglang, url):
    pool = pools.mha(sglang, "page_first")
    with Rank(pool, url) as rank:
        nothing = torch.zeros(0, dtype=torch.int64)
        assert rank.backend.batch_set_v1([], nothing) == []
        assert rank.backend.batch_get_v1([], nothing) == []


def test_wrong_flat_tensors_are_no_pages(sglang, url):
    pool = pools.mha(sglang, "page_first")
    fill(pool, 11)
    (name,) = keys("wrong", 1)
    page = pool.get_data_page(0)
    with Rank(pool, url, interface=0) as rank:
        backend = rank.backend
        assert not backend.set(name, page[:-1])
        assert not backend.set(name, None)
        assert not backend.batch_set([name], [])
        assert not backend.exists(name)
        assert backend.set(name, page)
        assert backend.exists(name)
        short = torch.zeros(page.numel() - 1, dtype=page.dtype)
        apart = torch.zeros(2 * page.numel(), dtype=page.dtype)[::2]
        assert backend.batch_get([name, name, name], [short, apart, None]) == [None] * 3
        assert not short.any()
        assert not apart.any()
        assert torch.equal(backend.get(name).view(torch.uint8), page.view(torch.uint8))
        assert backend.get(keys("other", 1)[0]) is None
        with pytest.raises(NotImplementedError, match="interface_v1"):
            backend.batch_get_v1([name], tokens(pool, [0]))
    with Rank(pool, url) as rank, pytest.raises(NotImplementedError, match="interface_v1"):
        rank.backend.get(name)


def test_calls_after_close(sglang, url):
    rank = Rank(pools.mha(sglang, "page_first"), url)
    rank.close()
    rank.close()
    with pytest.raises(ValueError, match="closed"):
        rank.exists(keys("late", 1))
    with pytest.raises(ValueError, match="closed"):
        rank.backend.register_mem_pool_host(rank.pool)


def test_a_second_anchor_is_refused(sglang, url):
    with Rank(pools.mha(sglang, "page_first"), url) as rank:
        other = pools.mha(sglang, "page_first")
        with pytest.raises(ValueError, match="attached already"):
            rank.backend.register_mem_pool_host(other)
        assert rank.exists(keys("still", 1)) == 0


@pytest.mark.parametrize("settings", [{}, {"lcm": 2}])
def test_mxfp8_pages_come_back_with_their_scales(sglang, url, monkeypatch, settings):
    """SGLang itself refuses to store these: payload and scales lie in buffers of their own."""
    pool = pools.mxfp8(sglang, monkeypatch, pages=4)
    parts = [pool.k_scale_host, pool.v_scale_host]
    data = pool.kv_buffer.view(torch.uint8)

    def paged():
        payload = [t.reshape(4, -1) for t in data]
        return [
            torch.cat([*(t[page] for t in payload), *(s[page].reshape(-1) for s in parts)])
            for page in range(4)
        ]

    for tensor in (data, *parts):
        tensor.random_(0, 256)
    want, names = [page.clone() for page in paged()], keys("scales", 2)
    with Rank(pool, url, **settings) as rank:
        assert rank.put(names, [0, 1]) == 2
        for tensor in (data, *parts):
            tensor.zero_()
        assert rank.get(names, [3, 2]) == 2
    got = paged()
    assert torch.equal(got[3], want[0])
    assert torch.equal(got[2], want[1])
    assert not got[0].any()
    assert not got[1].any()
