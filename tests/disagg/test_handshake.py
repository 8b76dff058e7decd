import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.disagg.handshake import check_identity, check_sides
from kvconnect.disagg.pair_plan import plan_pair
from kvconnect.disagg.pairs import shares
from kvconnect.disagg.wire import AxisData, SideData, from_data, to_data
from kvconnect.errors import ConfigError, KVConnectError
from kvconnect.identity import Identity
from tests.disagg.fleet import Fleet, u64

BASE = {"layout": "page_head", "tp": 2, "page_size": 4, "pages": 5, "stages": (1, 2), "heads": 4}


def sides(**changes):
    return Fleet(**(BASE | {"dims": (8, 4)} | changes)).sides()


def over_the_wire(side):
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(to_data(side)), type=SideData)
    return from_data(data)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_head", "page_first_direct"])
def test_a_side_plans_the_same_after_the_wire(layout):
    sources, targets = sides(layout=layout), sides(tp=4, stages=(3,))
    told = [over_the_wire(side) for side in sources]
    for target in targets:
        for share in shares([s.placement for s in told], target.placement):
            here = plan_pair(sources[share.source], target, share.part)
            there = plan_pair(told[share.source], over_the_wire(target), share.part)
            for a, b in zip(
                here.expand(u64([2, 0]), u64([3, 1])),
                there.expand(u64([2, 0]), u64([3, 1])),
                strict=True,
            ):
                assert np.array_equal(a, b)


def change(data, **fields):
    return msgspec.structs.replace(data, **fields)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda d: change(d, planes=(change(d.planes[0], region=7),)), "region 7 of"),
        (lambda d: change(d, planes=(change(d.planes[0], offset=1 << 40),)), "ends at byte"),
        (lambda d: change(d, planes=(change(d.planes[0], itemsize=3000),)), "overlaps|ends at"),
        (lambda d: change(d, page_size=5), "steps of 'slot'"),
        (lambda d: change(d, heads=3), "heads"),
        (lambda d: change(d, placement=change(d.placement, layers=(0, 3, 3))), "has 1 layers"),
        (lambda d: change(d, placement=change(d.placement, layers=(0, 3, 2))), "not inside"),
        (lambda d: change(d, placement=change(d.placement, replica=3)), "replica 3"),
        (lambda d: change(d, planes=(change(d.planes[0], axes=d.planes[0].axes * 2),)), "distinct"),
        (
            lambda d: change(
                d, planes=(change(d.planes[0], axes=(AxisData("page", 1 << 50, 1 << 20),)),)
            ),
            "",
        ),
    ],
)
def test_a_description_that_cannot_be_is_one_error(broken, words):
    data = to_data(sides()[0])
    with pytest.raises(ConfigError, match=f"peer's pool .* cannot be: .*({words})"):
        from_data(broken(data))


@given(st.binary(max_size=300))
@settings(max_examples=300)
def test_garbage_never_becomes_a_side(data):
    with pytest.raises((msgspec.MsgspecError, KVConnectError, UnicodeDecodeError)):
        from_data(msgspec.msgpack.decode(data, type=SideData))


IDENTITY = Identity(
    model="org/m", weights="w", dtype="int16", page_size=4, layers=3, heads=4, head_dim=8,
    v_head_dim=4,
)  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "org-m"), ("weights", "w2"), ("dtype", "float16"), ("layers", 4), ("heads", 8),
        ("head_dim", 16), ("v_head_dim", 8), ("adapter", "a"), ("salt", ""), ("scale_scheme", "s"),
        ("pool", "draft"), ("extra", (("x", "1"),)),
    ],
)  # fmt: skip
def test_whatever_fixes_the_bytes_must_be_equal(field, value):
    other = dataclasses.replace(IDENTITY, **{field: value})
    name = "extra.x" if field == "extra" else field
    with pytest.raises(ConfigError, match=f"{name} is .* here and .* at the peer"):
        check_identity(IDENTITY, other)


def test_what_only_says_how_bytes_are_stored_may_differ():
    other = dataclasses.replace(IDENTITY, page_size=64, object_layout="k:head.slot")
    check_identity(IDENTITY, other)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heads": 8}, "heads of the model 4 at the source, 8 at the target"),
        ({"stages": (2, 2)}, "layers of the model 3 at the source, 4 at the target"),
        ({"dims": (8, 8)}, "v_head_dim 4 at the source, 8 at the target"),
        ({"dims": (16, 4)}, "head_dim 8 at the source, 16 at the target"),
        ({"page_size": 3}, "page_size 4 and 3 share pieces of 1 slots only"),
    ],
)
def test_pools_that_do_not_fit_are_refused_with_both_values(changes, words):
    source, target = sides()[0], sides(**changes)[0]
    with pytest.raises(ConfigError, match=words):
        check_sides(source, target, min_slots=2)


def test_pools_that_fit_pass_whatever_their_shape():
    check_sides(sides()[0], sides(tp=1, page_size=16, stages=(3,), layout="layer_first")[0])
