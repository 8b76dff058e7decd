"""Descriptors: the rows of a batch, read from memory, are the objects that numpy expects."""

import ctypes
import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.backend import Capabilities, Op
from kvconnect.descriptors import Mode, describe
from kvconnect.errors import CapabilityError, ConfigError, LayoutError
from kvconnect.placement import Placement, Span
from tests.unit.held_pools import NAMED, held, local, pools, steady, whole

ANY = Capabilities()
ONE_RUN = Capabilities(scatter_gather=False)


def objects_of(batch):
    """Read what a batch describes, byte by byte, with no help of the planner."""
    out = []
    for at in range(len(batch)):
        rows = range(int(batch.first[at]), int(batch.first[at + 1]))
        out.append(
            b"".join(ctypes.string_at(int(batch.address[r]), int(batch.nbytes[r])) for r in rows)
        )
    return out


def keys(count):
    return [f"key{number}" for number in range(count)]


@steady
@given(
    one=pools(),
    object_layout=st.sampled_from(["native", "canonical"]),
    group=st.sampled_from([1, 2, 4, None]),
    chunk=st.sampled_from([1, 2, None]),
    data=st.data(),
)
def test_the_rows_of_a_batch_are_the_bytes_of_its_objects(one, object_layout, group, chunk, data):
    pool, placement = one.pool, whole(one.pool)
    if group is not None and pool.heads % group:
        group = None
    plan = describe(
        pool, placement, ANY, object_layout=object_layout, head_group=group, layer_chunk=chunk
    )
    ids = data.draw(st.permutations(range(pool.pages)))[: data.draw(st.integers(1, pool.pages))]
    one.write(range(pool.pages), one.random(pool.pages))
    batch = plan.batch(Op.LOAD, keys(len(ids) * plan.objects), np.array(ids, dtype=np.uint64))
    expected = [
        one.stored(
            page,
            local(cell.layers, placement.layers),
            local(cell.heads, placement.heads),
            object_layout,
        )
        for page in ids
        for cell in plan.cells
    ]
    assert objects_of(batch) == expected
    assert batch.object_nbytes().tolist() == [len(x) for x in expected]
    assert plan.page_nbytes == sum(len(x) for x in expected[: plan.objects])
    assert plan.page_nbytes == pool.page_nbytes


@steady
@given(one=pools(), object_layout=st.sampled_from(["native", "canonical"]))
def test_no_longer_equal_runs_would_do(one, object_layout):
    """The fewest equal runs: no number of neighbours can be joined everywhere."""
    plan = describe(one.pool, whole(one.pool), ANY, object_layout=object_layout)
    at = 0
    for copies in plan.copies:
        for copy in copies:
            address = plan.rows.address[at : at + copy.runs].astype(np.int64)
            for joined in (n for n in range(2, copy.runs + 1) if copy.runs % n == 0):
                steps = np.diff(address.reshape(-1, joined), axis=1)
                assert (steps != copy.run).any(), f"{joined} runs are one"
            at += copy.runs
    assert at == len(plan.rows.address)


@steady
@given(one=pools())
def test_an_empty_batch_describes_nothing(one):
    plan = describe(one.pool, whole(one.pool), ANY)
    batch = plan.batch(Op.STORE, [], np.zeros(0, dtype=np.uint64))
    assert (len(batch), len(batch.address), batch.first.tolist()) == (0, 0, [0])


def test_page_addresses_do_not_wrap_at_32_bits():
    """A pool of 3 TiB that is never touched: page 700 lies beyond every 32-bit offset."""
    from kvconnect.layout import Layout
    from kvconnect.pool import Plane, Pool
    from kvconnect.region import Region

    layout = Layout.packed(
        {"page": 768, "layer": 64, "slot": 256, "head": 64, "dim": 2048}, itemsize=2
    )
    region = Region("huge", 1 << 40, layout.end)
    pool = Pool((Plane(region, layout, ("k",)),), 256, 64, 64, 2048, 0, "bfloat16")
    plan = describe(pool, whole(pool), ANY)
    batch = plan.batch(Op.LOAD, keys(1), np.array([700], dtype=np.uint64))
    assert batch.address.tolist() == [(1 << 40) + 700 * 64 * 256 * 64 * 2048 * 2]
    assert batch.nbytes.tolist() == [4 << 30]


SELECTION = [
    # pool order, head group, capabilities, mode, (mode passed over, words of its reason)
    ("cphsld", 2, ANY, Mode.SPLIT_HEADS, (Mode.PER_PAGE, "shared across TP sizes: 2 of 4")),
    ("cplshd", None, ANY, Mode.PER_PAGE, (Mode.SPLIT_HEADS, "holds all 4 local heads")),
    ("cplshd", 2, ANY, Mode.SCATTER_GATHER, (Mode.SPLIT_HEADS, "stride 32 B")),
    ("clpshd", None, ANY, Mode.SCATTER_GATHER, (Mode.PER_PAGE, "layer stride 256 B")),
    (
        "cplshd",
        2,
        Capabilities(min_run_bytes=17),
        Mode.STAGED,
        (Mode.SCATTER_GATHER, "16 B, below min_run_bytes 17"),
    ),
    ("cplshd", 2, Capabilities(min_run_bytes=16), Mode.SCATTER_GATHER, None),
    ("cplshd", 2, ONE_RUN, Mode.STAGED, (Mode.SCATTER_GATHER, "12 runs per object.*takes one")),
    (
        "clpshd",
        None,
        Capabilities(max_runs_per_object=5),
        Mode.STAGED,
        (Mode.SCATTER_GATHER, "6 runs per object, the backend takes 5"),
    ),
    ("clpshd", None, Capabilities(max_runs_per_object=6), Mode.SCATTER_GATHER, None),
    ("cphsld", None, ONE_RUN, Mode.STAGED, (Mode.PER_PAGE, "2 runs per object.*takes one")),
]


@pytest.mark.parametrize(("order", "group", "capabilities", "mode", "passed"), SELECTION)
def test_the_first_mode_that_works_is_chosen(order, group, capabilities, mode, passed):
    import re

    pool = held(order).pool
    plan = describe(pool, whole(pool), capabilities, head_group=group)
    assert plan.mode is mode
    assert plan.mode not in dict(plan.rejected)
    if passed is not None:
        assert re.search(passed[1], dict(plan.rejected)[passed[0]])


def test_one_component_in_one_run_needs_no_scatter_gather():
    pool = held("plsd", heads=1, dims=(8, 0)).pool
    assert describe(pool, whole(pool), ONE_RUN).mode is Mode.PER_PAGE


@pytest.mark.parametrize("shift", [0, 64, 512])
@pytest.mark.parametrize("need", [1, 64, 512, 4096])
def test_alignment_is_that_of_the_worst_run(shift, need):
    """Address, page stride and run length all count (cases 1 and 3)."""
    one = held("plsd", heads=1, size=4, layers=2, dims=(256, 0), offset=shift)  # 4096 B pages
    plan = describe(one.pool, whole(one.pool), Capabilities(alignment=need))
    start = one.buffers[0].region.address + shift
    numbers = [start, 4096, 4096]
    aligned = all(number % need == 0 for number in numbers)
    assert plan.mode is (Mode.PER_PAGE if aligned else Mode.STAGED)
    if not aligned:
        assert f"the backend needs {need} B" in dict(plan.rejected)[Mode.PER_PAGE]
        assert f"aligned to {math.gcd(*numbers)} B" in dict(plan.rejected)[Mode.PER_PAGE]


def test_short_runs_at_aligned_places_are_not_aligned():
    """2304 B of every 4096 B: addresses fit, lengths do not."""
    one = held("pslhd", size=1, layers=3, heads=3, dims=(128, 0), pads=(0, 0, 0, 4096 - 2304))
    (start,) = (buffer.region.address for buffer in one.buffers)
    assert start % 4096 == 0
    plan = describe(one.pool, whole(one.pool), Capabilities(alignment=4096))
    assert plan.rows.page_stride.tolist() == [4096]
    assert plan.mode is Mode.STAGED
    assert describe(one.pool, whole(one.pool), Capabilities(alignment=256)).mode is Mode.PER_PAGE


def test_pages_of_2304_bytes_are_not_taken_for_aligned_to_512():
    pool = held("cpslhd", size=1, layers=3, heads=3, dims=(128, 128)).pool
    assert pool.page_nbytes == 2 * 2304
    assert describe(pool, whole(pool), Capabilities(alignment=512)).mode is Mode.STAGED
    assert describe(pool, whole(pool), Capabilities(alignment=256)).mode is Mode.PER_PAGE


@pytest.mark.parametrize("order", NAMED.values())
@pytest.mark.parametrize("want", ["per_page", "split_heads", "scatter_gather", "staged"])
def test_want_is_obeyed_or_refused_with_the_numbers(order, want):
    """`auto` decides by the same numbers that a forced mode is refused for."""
    pool = held(order).pool
    group = 2 if want == "split_heads" else None
    auto = describe(pool, whole(pool), ANY, head_group=group)
    reason = dict(auto.rejected).get(Mode(want))
    if reason is None:
        assert describe(pool, whole(pool), ANY, want, head_group=group).mode is Mode(want)
    else:
        with pytest.raises(LayoutError, match=f"want='{want}' is not possible: ") as refused:
            describe(pool, whole(pool), ANY, Mode(want), head_group=group)
        assert reason in str(refused.value)
        assert sum(word.strip("(),;").isdigit() for word in reason.split()) >= 2


def test_a_refused_split_names_the_axis_and_both_numbers():
    """slot stride 32 B against a run of 16 B: 2 of 4 heads of 4 elements."""
    pool = held("cplshd").pool
    with pytest.raises(LayoutError) as refused:
        describe(pool, whole(pool), ANY, "split_heads", head_group=2)
    assert "slot stride 32 B in the pool" in str(refused.value)
    assert "run ends at 16 B" in str(refused.value)


def test_want_per_page_ignores_the_head_grid():
    pool = held("cphsld").pool
    plan = describe(pool, whole(pool), ANY, "per_page", tp_sizes=(1, 4))
    assert (plan.mode, plan.objects, plan.head_group) == (Mode.PER_PAGE, 1, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"want": "fastest"}, "want='fastest' is not one of: auto, split_heads"),
        ({"object_layout": "natural"}, "object_layout='natural' is not one of"),
        ({"head_group": 3}, "head_group 3 must be"),
        ({"layer_chunk": 0}, "layer_chunk is 0"),
        ({"layer_chunk": 2.0}, r"layer_chunk is 2\.0"),
    ],
)
def test_wrong_options_are_refused_by_name(options, words):
    pool = held().pool
    with pytest.raises(ConfigError, match=words):
        describe(pool, whole(pool), ANY, **options)


def test_a_rank_of_two_holds_its_own_global_cells():
    one = held("cphsld", heads=4)
    placement = Placement(Span(3, 6, 6), Span(4, 8, 8))
    plan = describe(one.pool, placement, ANY, tp_sizes=(2, 4), layer_chunk=3)
    assert [(c.layers, c.heads) for c in plan.cells] == [
        (Span(3, 6, 6), Span(4, 6, 8)),
        (Span(3, 6, 6), Span(6, 8, 8)),
    ]


@pytest.mark.parametrize("order", NAMED.values())
@pytest.mark.parametrize("capabilities", [ANY, ONE_RUN, Capabilities(alignment=4096)])
def test_explain_says_geometry_choice_and_every_rejection(order, capabilities):
    one = held(order)
    plan = describe(one.pool, whole(one.pool), capabilities, head_group=2)
    text = plan.explain()
    for words in (
        "4 pages x 2 slots",
        "[0, 3) of 3",
        "bfloat16",
        f"{one.pool.page_nbytes} B a page",
        f"objects: {plan.objects} a page",
        f"{plan.object_nbytes()[0]} B each",
        f"descriptors: {plan.mode.value} - {plan.reason}",
        plan.signature,
        f"registered: {one.pool.regions[0].nbytes} B",
        *(f"not {mode.value}: {why}" for mode, why in plan.rejected),
    ):
        assert words in text


def test_memory_that_the_backend_cannot_reach_is_refused():
    one = held("cplshd")
    away = [dataclasses.replace(p.region, device="cuda:0") for p in one.pool.planes]
    planes = tuple(
        dataclasses.replace(p, region=r) for p, r in zip(one.pool.planes, away, strict=True)
    )
    pool = dataclasses.replace(one.pool, planes=planes)
    with pytest.raises(CapabilityError, match="device 'cuda:0', the backend takes cpu"):
        describe(pool, whole(pool), Capabilities())
    assert describe(pool, whole(pool), Capabilities(devices=("cpu", "cuda:0"))).objects == 1
