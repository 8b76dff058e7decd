"""The connector's contract on the reference store: hits, misses, refusals, closing, options."""

import numpy as np
import pytest

from kvconnect.backend import Capabilities, SupportsDelete
from kvconnect.errors import (
    CapabilityError,
    ConfigError,
    LayoutError,
    PageIndexError,
    RegistrationError,
)
from kvconnect.layout import Axis, Layout
from kvconnect.memory import MemoryBackend, ObjectStore
from kvconnect.pool import Plane, Pool
from kvconnect.region import Region
from kvconnect.testing.memory import GuardedBuffer
from kvconnect.wrappers import Faulty, Wrapper
from tests.unit.attached import attach, hashes, same
from tests.unit.held_pools import Held, held, identity_of, whole


def test_what_is_put_comes_back_on_other_pages(one, connector):
    content = one.random(3)
    one.write([1, 2, 3], content)
    put = connector.put(hashes(1, 2, 3), [1, 2, 3])
    assert (put.ok.all(), put.nbytes, put.dirty) == (True, 3 * one.pool.page_nbytes, None)
    before = one.snapshot()
    got = connector.get(hashes(1, 2, 3), [7, 0, 5])
    assert (got.ok.all(), got.nbytes) == (True, 3 * one.pool.page_nbytes)
    assert not got.dirty.any()
    assert same(one.read([7, 0, 5]), content)
    assert one.untouched_outside([7, 0, 5], before)


def test_absent_pages_are_clean_misses(one, connector):
    before = one.snapshot()
    got = connector.get(hashes(1, 2), [1, 2])
    assert (got.counts(), got.nbytes, got.dirty.tolist()) == ({"ABSENT": 2}, 0, [False, False])
    assert one.untouched_outside([], before)
    assert connector.exists(hashes(1, 2)).prefix == 0


def test_exists_tells_pages_and_prefix(connector):
    connector.put(hashes(0, 1, 3), [0, 1, 3])
    hits = connector.exists(hashes(0, 1, 2, 3))
    assert hits.pages.tolist() == [True, True, False, True]
    assert hits.prefix == 2


@pytest.mark.parametrize("make", [list, np.array, tuple])
@pytest.mark.parametrize("encode", [str, str.encode])
def test_hashes_and_page_ids_of_any_kind_are_taken(connector, make, encode):
    names = [encode(text) for text in hashes(4, 6)]
    assert connector.put(names, make([4, 6])).ok.all()
    assert connector.exists(hashes(4, 6)).prefix == 2


def test_empty_calls_are_no_ops(one, connector, store):
    before = one.snapshot()
    assert len(connector.put([], []).status) == 0
    assert len(connector.get([], []).status) == 0
    assert len(connector.exists([])) == 0
    assert len(connector.remove([])) == 0
    assert store.list_keys() == []
    assert one.untouched_outside([], before)


@pytest.mark.parametrize(
    ("names", "ids", "error", "words"),
    [
        (hashes(0, 1), [0], ConfigError, "2 hashes for 1 page ids"),
        (hashes(0), [0, 1], ConfigError, "1 hashes for 2 page ids"),
        (hashes(0), [8], PageIndexError, "page 8 is outside the pool of 8"),
        (hashes(0), [-1], PageIndexError, "page -1 is outside"),
        (hashes(0, 1), [3, 3], PageIndexError, "page 3 appears twice"),
        (hashes(5, 6, 5), [0, 1, 2], ConfigError, "b'page5' is given twice"),
        (hashes(0), [0.5], PageIndexError, "integers"),
        (hashes(0), [[0]], PageIndexError, "one dimension"),
        ([""], [0], ConfigError, "page hash is empty"),
        ([7], [0], ConfigError, "page hash 7 is int"),
    ],
)
@pytest.mark.parametrize("call", ["put", "get"])
def test_wrong_calls_are_one_error_before_anything_moves(
    one, connector, store, call, names, ids, error, words
):
    before = one.snapshot()
    with pytest.raises(error, match=words):
        getattr(connector, call)(names, ids)
    assert store.list_keys() == []
    assert one.untouched_outside([], before)


@pytest.mark.parametrize(
    "indices",
    [
        [0, 9, 17, 33],
        [2, 3, 4, 5],
        [-4, -3, -2, -1],
        [28, 29, 30, 31, 32, 33, 34, 35],
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 0, 1, 2, 3],
        np.array([0, 1, 2, 3], dtype=np.int32),
        np.array([0.0, 1.0, 2.0, 3.0]),
    ],
)
def test_token_indices_that_are_no_pages_never_reach_the_connector(indices):
    """Case 12, in a pool of eight pages of four slots: no page ids, so no descriptor."""
    pool = held("cplshd", pages=8, size=4).pool
    with pytest.raises(PageIndexError):
        pool.page_ids(indices)
    assert pool.page_ids([]).tolist() == []
    assert pool.page_ids(np.arange(8, 16)).tolist() == [2, 3]


def test_pages_are_removed_and_then_absent(connector, store):
    connector.put(hashes(0, 1), [0, 1])
    assert connector.remove(hashes(0, 9)).pages.tolist() == [True, False]
    assert connector.exists(hashes(0, 1)).pages.tolist() == [False, True]
    assert len(store.list_keys()) == 1


def test_clear_drops_this_identity_and_nothing_else(one, store):
    """Case 21: `llama` and `llama-2` in one store, and somebody's key beside them."""
    identities = [
        identity_of(one.pool, whole(one.pool), model=m) for m in ("llama", "llama-2", "llama")
    ]
    first, second, third = [attach(one, store, identity=i) for i in identities]
    with first, second, third:
        assert first.put(hashes(0, 1), [0, 1]).ok.all()
        assert second.put(hashes(0, 1, 2), [0, 1, 2]).ok.all()
        store.objects.put("README", b"stray")
        assert third.clear() == 2
        assert not first.exists(hashes(0, 1)).pages.any()
        assert second.exists(hashes(0, 1, 2)).prefix == 3
        assert "README" in store.list_keys()
        assert third.clear() == 0


def test_a_backend_without_the_ability_is_a_typed_error(one, store):
    class Core(Wrapper):
        def __init__(self, inner):
            self.inner = inner

    with attach(one, Core(store)) as connector:
        assert not isinstance(connector.backend, SupportsDelete)
        for call in (lambda: connector.remove(hashes(0)), connector.clear):
            with pytest.raises(CapabilityError, match="core"):
                call()


def test_ttl_and_pin_reach_the_store(one):
    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    clock = Clock()
    with MemoryBackend(ObjectStore(clock=clock)) as store, attach(one, store) as connector:
        connector.put(hashes(0), [0], ttl=10.0)
        connector.put(hashes(1), [1], pin=True)
        assert store.stats()["pinned"] == 1
        assert connector.exists(hashes(0, 1)).prefix == 2
        clock.now = 11.0
        assert connector.exists(hashes(0, 1)).pages.tolist() == [False, True]


FIELDS = {
    "dtype": "float16",
    "page_size": 4,
    "head_dim": 8,
    "v_head_dim": 8,
    "scale_scheme": "mxfp8",
    "layers": 6,
    "heads": 8,
}


@pytest.mark.parametrize(("name", "value"), FIELDS.items())
def test_an_identity_that_is_not_the_pools_is_refused_with_both_values(one, store, name, value):
    identity = identity_of(one.pool, whole(one.pool), **{name: value})
    actual = {"layers": 3, "heads": 4}.get(name, getattr(one.pool, name))
    with pytest.raises(ConfigError) as refused:
        attach(one, store, identity=identity)
    text = str(refused.value)
    assert f"{name}={value!r}" in text
    assert repr(actual) in text
    assert store._registrations.regions == ()


@pytest.mark.parametrize("object_layout", ["native", "canonical"])
def test_other_identities_are_misses_not_wrong_bytes(one, store, object_layout):
    """dtype of equal width, weights, salt, adapter: never the other's pages."""
    placement = whole(one.pool)
    with attach(one, store, object_layout=object_layout) as connector:
        connector.put(hashes(0), [0])
        for change in ({"weights": "w2"}, {"salt": ""}, {"adapter": "a"}, {"model": "org-model"}):
            identity = identity_of(one.pool, placement, **change)
            with attach(one, store, identity=identity, object_layout=object_layout) as other:
                assert not other.exists(hashes(0)).pages.any()
                assert other.get(hashes(0), [1]).counts() == {"ABSENT": 1}


# Options (case 24).


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"self_test": "False"}, ("self_test", False)),
        ({"elect_writer": "no"}, ("elect_writer", False)),
        ({"timeout": "2.5"}, ("timeout", 2.5)),
        ({"batch_bytes": "1MiB"}, ("batch_bytes", 1 << 20)),
        ({"staging": "64k"}, ("staging", 1 << 16)),
        ({"retries": "0"}, ("retries", 0)),
        ({"head_group": "2"}, ("head_group", 2)),
        ({"layer_chunk": "none"}, ("layer_chunk", None)),
        ({"tp_sizes": [1, 2]}, ("tp_sizes", (1, 2))),
    ],
)
def test_options_may_be_text(one, store, options, expected):
    with attach(one, store, **options) as connector:
        assert getattr(connector.options, expected[0]) == expected[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"selftest": True}, "unknown option 'selftest'; did you mean self_test"),
        ({"time_out": 3}, "unknown option 'time_out'; did you mean timeout"),
        ({"self_test": "Flase"}, "self_test='Flase'"),
        ({"self_test": 2}, "self_test=2"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": float("inf")}, "timeout=inf"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"timeout": "soon"}, "timeout='soon'"),
        ({"batch_bytes": 0}, "batch_bytes=0"),
        ({"staging": "-1"}, "staging='-1'"),
        ({"retries": -1}, "retries=-1"),
        ({"retries": 1.5}, r"retries=1\.5"),
        ({"negative_ttl": -1}, "negative_ttl"),
        ({"tp_sizes": 4}, "tp_sizes=4 must be a list"),
        ({"tp_sizes": "1,2"}, "tp_sizes='1,2' must be a list"),
        ({"tp_sizes": [1, "2"]}, "tp_sizes contains '2'"),
        ({"want": "best"}, "want='best'"),
        ({"object_layout": "any"}, "object_layout='any'"),
        ({"connector": {"timeout": 3}}, "unknown option 'connector'"),
    ],
)
def test_wrong_options_are_refused_by_name_and_nothing_is_registered(one, store, options, words):
    with pytest.raises(ConfigError, match=words):
        attach(one, store, **options)
    assert store._registrations.regions == ()


# Case 11 and 25: geometry that cannot be.


def test_three_heads_on_two_ranks_are_refused_at_construction(store):
    one = held("cplshd", heads=3)
    with pytest.raises(ConfigError, match="tp_sizes contains 2"):
        attach(one, store, tp_sizes=(1, 2))


@pytest.mark.parametrize("split", [2, 0, -2, 3.0, 3])
def test_three_heads_split_by_the_engine(split):
    pool = held("cphsld", heads=3, size=2).pool
    if split == 3 and type(split) is int:
        addresses, _ = pool.split_heads_page_buffer_meta([0, 1], split)
        assert len(addresses) == 3 * 2
    else:
        with pytest.raises(LayoutError, match="split_factor"):
            pool.split_heads_page_buffer_meta([0, 1], split)


EMPTY = {
    "planes": lambda: Pool((), 2, 3, 4, 4, 4, "bfloat16"),
    "bytes": lambda: Region("pool", 4096, 0),
    "address": lambda: Region("pool", 0, 4096),
    "extent": lambda: Layout.packed({"page": 0, "layer": 1, "dim": 4}, 2),
    "page": lambda: Plane(
        Region("pool", 4096, 4096), Layout.packed({"layer": 1, "dim": 4}, 2), ("k",)
    ),
    "itemsize": lambda: Layout((Axis("page", 2, 8), Axis("dim", 4, 2)), 0),
    "head_dim": lambda: Pool(held().pool.planes, 2, 3, 4, 0, 0, "bfloat16"),
    "page_size": lambda: Pool(held().pool.planes, 0, 3, 4, 4, 4, "bfloat16"),
}


@pytest.mark.parametrize("field", EMPTY)
def test_a_pool_of_nothing_names_the_field(field):
    with pytest.raises((LayoutError, RegistrationError), match=field):
        EMPTY[field]()


# Case 14, 15, 16: registration.


class Chunky(Faulty):
    capabilities = Capabilities(max_region_bytes=768)


def test_a_failing_chunk_releases_the_ones_before_and_names_itself(store):
    """Case 14: the third of four chunks of two pages each."""
    chunky = Chunky(store)
    chunky.refuse_region(2)
    one = held("pclshd", pages=8)  # pages outermost: chunks of whole pages
    name = one.buffers[0].region.name
    with pytest.raises(RegistrationError, match=f"{name}#2 .* after 2 of 4 chunks"):
        attach(one, chunky)
    assert chunky.refused == f"{name}#2"
    assert chunky.released == [f"{name}#1", f"{name}#0"]
    assert store._registrations.regions == ()
    assert store.list_keys() == []


def test_pages_of_a_chunked_pool_come_back(store):
    one = held("pclshd", pages=8)
    chunky = Chunky(store)
    with attach(one, chunky) as connector:
        assert [r.nbytes for r in store._registrations.regions] == [768] * 4
        content = one.random(8)
        one.write(range(8), content)
        assert connector.put(hashes(*range(8)), range(8)).ok.all()
        one.write(range(8), one.random(8, seed=1))
        assert connector.get(hashes(*range(8)), range(8)).ok.all()
        assert same(one.read(range(8)), content)
    assert store._registrations.regions == ()


@pytest.mark.parametrize("pages", [4, 5, 8])
@pytest.mark.parametrize("gap", [0, 64, 72])
def test_k_and_v_of_other_widths_in_one_allocation_are_cut_at_their_own_pages(store, pages, gap):
    """K pages of 384 B, V pages of 256 B: no common multiple is a page boundary of both."""

    class Narrow(Wrapper):
        capabilities = Capabilities(max_region_bytes=1000)

    shape = {"page": pages, "layer": 1, "slot": 2, "head": 2}
    k = Layout.packed({**shape, "dim": 48}, 2, offset=gap)
    v = Layout.packed({**shape, "dim": 32}, 2, offset=k.end + gap)
    buffer = GuardedBuffer(v.end)
    planes = (Plane(buffer.region, k, ("k",)), Plane(buffer.region, v, ("v",)))
    one = Held(Pool(planes, 2, 1, 2, 48, 32, "bfloat16"), [buffer, buffer])
    with attach(one, Narrow(store)) as connector:
        content = one.random(pages)
        one.write(range(pages), content)
        assert connector.put(hashes(*range(pages)), range(pages)).ok.all()
        one.write(range(pages), one.random(pages, seed=1))
        assert connector.get(hashes(*range(pages)), range(pages)).ok.all()
        assert same(one.read(range(pages)), content)
        regions = store._registrations.regions
        assert max(region.nbytes for region in regions) <= 1000
        assert sum(region.nbytes for region in regions) == buffer.region.nbytes
