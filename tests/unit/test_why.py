"""`Connector.why`: each kind of miss says in words, and with both values, what differs."""

import pytest

from kvconnect.backend import SupportsListing, SupportsRecords
from kvconnect.errors import UnavailableError
from kvconnect.identity import Identity
from kvconnect.placement import Placement
from kvconnect.why import differences
from kvconnect.wrappers import Faulty, Wrapper
from tests.unit.attached import attach, hashes
from tests.unit.held_pools import held, identity_of, whole


@pytest.fixture
def one():
    return held("cphsld")


def stored_by(store, one, page="page0", **options):
    """Let another connector store a page, and leave."""
    with attach(one, store, **options) as connector:
        assert connector.put([page], [0]).ok.all()


@pytest.mark.parametrize("group", [None, 2])
def test_a_hit_is_called_one(one, store, group):
    objects = 1 if group is None else 2
    with attach(one, store, head_group=group) as connector:
        connector.put(hashes(0), [0])
        expected = f"hit: {objects} of {objects} objects present, {one.pool.page_nbytes} B"
        assert connector.why("page0") == expected
        assert connector.why(b"page0") == expected


def test_a_page_that_nobody_stored(one, store):
    with attach(one, store) as connector:
        assert connector.why("page0") == "miss: absent under every identity known"


FIELDS = {
    "weights": ("w2", "w1"),
    "salt": ("tenant", None),
    "adapter": ("lora", None),
    "model": ("org/other", "org/model"),
}


@pytest.mark.parametrize(("name", "values"), FIELDS.items())
def test_another_identity_is_named_with_both_values(one, store, name, values):
    theirs, mine = values
    identity = identity_of(one.pool, whole(one.pool), **{name: theirs})
    stored_by(store, one, identity=identity)
    with attach(one, store) as connector:
        assert connector.why("page0") == (
            f"miss: stored with {name} {theirs!r}, you ask for {mine!r}"
        )
        assert connector.why("page1") == "miss: absent under every identity known"


def test_another_dtype_of_equal_width(one, store):
    stored_by(store, held("cphsld", dtype="float16"))
    with attach(one, store) as connector:
        assert connector.why("page0") == "miss: stored as float16, you ask for bfloat16"


def test_another_byte_order(store, one):
    stored_by(store, held("clpshd"))
    with attach(one, store) as connector:
        assert connector.why("page0") == (
            "miss: stored with object_layout 'k:layer.slot.head.dim|v:layer.slot.head.dim', you "
            "ask for 'k:head.slot.layer.dim|v:head.slot.layer.dim'"
        )


def test_the_nearest_identities_are_named_and_no_crowd(one, store):
    near = identity_of(one.pool, whole(one.pool), salt="a")
    far = identity_of(one.pool, whole(one.pool), salt="b", weights="w9", adapter="x")
    farther = identity_of(one.pool, whole(one.pool), salt="b", weights="w9", adapter="x", model="m")
    for identity in (farther, far, near):
        stored_by(store, one, identity=identity)
    with attach(one, store) as connector:
        text = connector.why("page0")
        assert text.startswith("miss: stored with salt 'a', you ask for None; ")
        assert "weights 'w9'" in text
        assert "model" not in text


def test_another_grid(one, store):
    stored_by(store, one, head_group=2)
    with attach(one, store) as connector:
        assert connector.why("page0") == (
            "miss: 0 of 1 objects present, missing layers [0, 3) of 3, heads [0, 4) of 4; 2 "
            "objects of the page belong to other ranks or another grid (head_group, tp_sizes, "
            "layer_chunk)"
        )


def test_a_missing_shard_is_named_by_its_global_range(store):
    """Three of four TP ranks stored."""
    for rank in range(3):
        part = held("cphsld", heads=1)
        placement = Placement.tensor_parallel(layers=3, heads=4, rank=rank, size=4)
        stored_by(store, part, placement=placement)
    with attach(held("cphsld"), store, head_group=1) as connector:
        text = connector.why("page0")
        assert text == "miss: 3 of 4 objects present, missing layers [0, 3) of 3, heads [3, 4) of 4"


def test_an_object_of_another_size(one, store):
    with attach(one, store) as connector:
        (key,) = connector.keys.keys([b"page0"])
        store.objects.put(key, b"short")
        assert (
            connector.why("page0") == "miss: 1 of 1 objects are stored at another size or expired"
        )


def test_a_store_without_listing_says_only_how_many(one, store):
    class Core(Wrapper):
        def __init__(self, inner):
            self.inner = inner

    core = Core(store)
    assert not isinstance(core, SupportsListing)
    with attach(one, core) as connector:
        assert connector.why("page0") == "miss: 0 of 1 objects present"


def test_without_records_no_identity_is_known(one, store):
    class Lists(Wrapper):
        def __init__(self, inner):
            self.inner = inner

        def list_keys(self, prefix=""):
            return self.inner.list_keys(prefix)

    stored_by(store, one, identity=identity_of(one.pool, whole(one.pool), salt="x"))
    lists = Lists(store)
    assert not isinstance(lists, SupportsRecords)
    with attach(one, lists) as connector:
        assert connector.why("page0") == "miss: absent under every identity known"


@pytest.mark.parametrize("value", [b"", b"{", b'{"model": 1}', b"\xff"])
def test_records_that_are_none_are_passed_over(one, store, value):
    store.put_record("identity/0123456789abcdef", value)
    store.put_record("other", value)
    unset = identity_of(one.pool, whole(one.pool))
    store.put_record("identity/fedcba9876543210", unset.to_json())  # no object_layout
    stored_by(store, one, identity=identity_of(one.pool, whole(one.pool), salt="x"))
    with attach(one, store) as connector:
        assert "salt 'x'" in connector.why("page0")


def test_every_connector_leaves_its_identity_in_the_store(one, store):
    with attach(one, store) as connector:
        name = f"identity/{connector.identity.namespace}"
        assert Identity.from_json(store.records()[name]) == connector.identity


def test_a_store_that_cannot_be_asked_is_said(one, store):
    faulty = Faulty(store)
    with attach(one, faulty) as connector:
        faulty.script_exists(UnavailableError("store is down"))
        text = connector.why("page0")
        assert text.startswith("miss: ")
        assert "store is down" in text


def test_a_page_taken_for_absent_is_not_called_a_hit(one, store):
    """What `exists` answers from the negative cache, `why` explains."""
    with attach(one, store) as connector:
        connector.put(hashes(0), [0])
        connector.exists(hashes(0))
        keys = connector.keys.keys([b"page0"])
        data = store.objects.objects[keys[0]].data
        store.remove(keys)
        connector.get(hashes(0), [0])
        store.objects.put(keys[0], data)
        assert not connector.exists(hashes(0)).pages.any()
        text = connector.why("page0")
        assert text.startswith("miss: ")
        assert "vanished" in text


def test_differences_name_every_field_that_differs():
    one = held("cphsld")
    asked = identity_of(one.pool, whole(one.pool), object_layout="x", extra=(("rev", "1"),))
    stored = identity_of(
        one.pool, whole(one.pool), object_layout="y", extra=(("rev", "2"), ("tag", "t"))
    )
    assert differences(stored, asked) == [
        "stored with object_layout 'y', you ask for 'x'",
        "stored with extra.rev '2', you ask for '1'",
        "stored with extra.tag 't', you ask for None",
    ]
    assert differences(asked, asked) == []
