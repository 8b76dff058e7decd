"""Staging: pages go through the bounce buffer byte-exact, bounded, and land only when whole."""

import ctypes
import math
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.backend import Capabilities, Op
from kvconnect.descriptors import Mode, describe
from kvconnect.errors import ConfigError, TransferTimeoutError
from kvconnect.memory import MemoryBackend
from kvconnect.staging import StagingBuffer
from kvconnect.wrappers import Wrapper
from tests.unit.attached import attach
from tests.unit.held_pools import NAMED, held, local, pools, steady, whole


class OneRun(Wrapper):
    """A backend that takes one run per object."""

    capabilities = Capabilities(scatter_gather=False)


def staged_plan(one, **options):
    return describe(one.pool, whole(one.pool), Capabilities(), "staged", **options)


def slot_object(buffer, batch, at):
    return ctypes.string_at(int(batch.address[at]), int(batch.nbytes[at]))


@steady
@given(
    one=pools(),
    object_layout=st.sampled_from(["native", "canonical"]),
    group=st.sampled_from([1, 2, None]),
    chunk=st.sampled_from([1, 2, None]),
    data=st.data(),
)
def test_a_slot_holds_the_objects_of_its_page_and_gives_them_back(
    one, object_layout, group, chunk, data
):
    pool, placement = one.pool, whole(one.pool)
    if group is not None and pool.heads % group:
        group = None
    plan = staged_plan(one, object_layout=object_layout, head_group=group, layer_chunk=chunk)
    ids = data.draw(st.permutations(range(pool.pages)))[: data.draw(st.integers(1, pool.pages))]
    content = one.random(len(ids))
    one.write(ids, content)
    with StagingBuffer(plan, 1 << 20) as buffer:
        slots = buffer.acquire(len(ids), 0)
        slots = np.array(data.draw(st.permutations(slots.tolist())), dtype=np.int64)
        pages = np.array(ids, dtype=np.uint64)
        before = one.snapshot()
        buffer.gather(pages, slots)
        assert one.untouched_outside([], before), "gather only reads the pool"
        keys = [f"{n}" for n in range(len(ids) * plan.objects)]
        batch = buffer.batch(Op.STORE, keys, slots)
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
        assert np.diff(batch.first).tolist() == [1] * len(keys), "one run for each object"
        assert [slot_object(buffer, batch, at) for at in range(len(keys))] == expected
        assert not (batch.address % 4096).any()
        assert (batch.address >= buffer.region.address).all()
        assert (batch.address + batch.nbytes <= buffer.region.end).all()
        one.write(ids, one.random(len(ids), seed=1))
        before = one.snapshot()
        buffer.scatter(pages, slots)
        assert one.untouched_outside(ids, before)
        got = one.read(ids)
        assert all((got[name] == content[name]).all() for name in content)


def test_a_repack_of_no_page_touches_nothing():
    one = held("clpshd")
    with StagingBuffer(staged_plan(one), 1 << 20) as buffer:
        before = one.snapshot()
        none = np.zeros(0, dtype=np.int64)
        buffer.scatter(none.astype(np.uint64), none)
        buffer.gather(none.astype(np.uint64), none)
        assert one.untouched_outside([], before)


def test_slots_of_2304_byte_pages_are_aligned_and_come_back_in_order():
    """Case 2: eight pages, every object at a multiple of 4096."""
    one = held("pslhd", pages=8, size=1, layers=3, heads=3, dims=(128, 0))
    assert one.pool.page_nbytes == 2304
    with StagingBuffer(staged_plan(one), 8 * 4096) as buffer:
        assert (buffer.slots, buffer.slot_nbytes) == (8, 4096)
        slots = buffer.acquire(8, 0)
        batch = buffer.batch(Op.STORE, [f"{n}" for n in range(8)], slots)
        assert not (batch.address % 4096).any()
        assert batch.nbytes.tolist() == [2304] * 8
        content = one.random(8)
        one.write(range(8), content)
        buffer.gather(np.arange(8, dtype=np.uint64), slots)
        for page in range(8):
            whole_page = one.native(page, slice(None), slice(None))
            assert slot_object(buffer, batch, page) == whole_page


@steady
@given(nbytes=st.integers(1, 20 * 4096), pages=st.integers(1, 8))
def test_the_buffer_is_bounded_by_what_is_given_and_by_the_pool(nbytes, pages):
    one = held("cplshd", pages=pages)  # one object of 384 B: a slot of 4096 B
    if nbytes < 4096:
        with pytest.raises(ConfigError, match=f"staging={nbytes} B.*4096 B"):
            StagingBuffer(staged_plan(one), nbytes)
        return
    with StagingBuffer(staged_plan(one), nbytes) as buffer:
        assert buffer.slots == min(nbytes // 4096, pages)
        assert buffer.region.nbytes == buffer.slots * 4096 <= nbytes
        assert 1 <= buffer.batch_pages <= buffer.slots


@steady
@given(st.lists(st.integers(1, 5), min_size=1, max_size=12))
def test_a_slot_is_never_handed_out_twice(wishes):
    one = held("cplshd", pages=8)
    with StagingBuffer(staged_plan(one), 8 * 4096) as buffer:
        out, used = [], set()
        for wish in wishes:
            if len(used) + wish > 8:
                with pytest.raises(TransferTimeoutError, match=f"{wish} slots.*{8 - len(used)} of"):
                    buffer.acquire(wish, 0)
                back = out.pop(0)
                used -= set(back.tolist())
                buffer.release(back)
            else:
                out.append(buffer.acquire(wish, 0))
                taken = set(out[-1].tolist())
                assert len(taken) == wish
                assert not taken & used
                assert taken <= set(range(8))
                used |= taken


def test_a_waiter_gets_slots_as_soon_as_they_are_returned():
    one = held("cplshd")
    with StagingBuffer(staged_plan(one), 4 * 4096) as buffer:
        first = buffer.acquire(4, 0)
        got = []
        waiter = threading.Thread(target=lambda: got.append(buffer.acquire(4, 30)))
        waiter.start()
        buffer.release(first)
        waiter.join(30)
        assert sorted(got[0].tolist()) == [0, 1, 2, 3]


def free_slots(connector):
    staging = connector._staging
    slots = staging.acquire(staging.slots, 0)
    staging.release(slots)
    return len(slots)


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("order", NAMED.values())
@pytest.mark.parametrize("object_layout", ["native", "canonical"])
def test_pages_in_any_order_survive_a_store_that_takes_one_run(order, slots, object_layout):
    """Also with a buffer of one slot, which must not wait for itself."""
    one = held(order, pages=16)
    store = OneRun(MemoryBackend())
    options = {"staging": slots * 8192, "object_layout": object_layout, "timeout": 10}
    with store, attach(one, store, head_group=2, **options) as connector:
        assert connector.plan.mode is Mode.STAGED
        ids = [11, 3, 4, 5, 0, 15, 9]
        hashes = [f"h{page}" for page in ids]
        content = one.random(len(ids))
        one.write(ids, content)
        before = one.snapshot()
        put = connector.put(hashes, ids)
        assert put.ok.all(), put
        assert one.untouched_outside([], before), "a store only reads"
        targets = [2, 14, 13, 12, 1, 7, 8]
        before = one.snapshot()
        got = connector.get(hashes, targets)
        assert got.ok.all(), got
        assert got.nbytes == len(ids) * one.pool.page_nbytes
        assert one.untouched_outside(targets, before)
        found = one.read(targets)
        assert all((found[name] == content[name]).all() for name in content)
        assert free_slots(connector) == connector._staging.slots == min(slots, 16)


def test_want_staged_is_taken_where_it_is_not_needed():
    one = held("cplshd")
    with MemoryBackend() as store, attach(one, store, want="staged") as connector:
        assert connector.plan.mode is Mode.STAGED
        assert [r.name for r in store._registrations.regions] == ["staging"]
        assert connector.stats()["staging.bytes"] == 4 * 4096


def test_a_page_that_does_not_come_whole_leaves_the_pool_untouched():
    one = held("cplshd")
    with MemoryBackend() as store, attach(one, store, want="staged", head_group=1) as connector:
        ids = [0, 1, 2]
        content = one.random(3)
        one.write(ids, content)
        assert connector.put(["a", "b", "c"], ids).ok.all()
        store.remove(connector.keys.keys([b"b"])[2:3])
        one.write(ids, one.random(3, seed=1))
        before = one.snapshot()
        got = connector.get(["a", "b", "c"], ids)
        assert got.ok.tolist() == [True, False, True]
        assert one.untouched_outside([0, 2], before)
        assert got.dirty.tolist() == [False, False, False], "page 1 has not one changed byte"
        assert free_slots(connector) == 4


def test_the_registered_buffer_keeps_to_the_region_limit():
    """Chunks of whole slots: no object lies across two registrations."""

    class Small(Wrapper):
        capabilities = Capabilities(scatter_gather=False, max_region_bytes=3 * 8192 - 1)

    one = held("cplshd", pages=8)
    with Small(MemoryBackend()) as store, attach(one, store, head_group=2) as connector:
        assert connector._staging.slot_nbytes == 8192
        regions = store.inner._registrations.regions
        assert [r.nbytes for r in regions] == [16384] * 4
        hashes = [f"{n}" for n in range(8)]
        assert connector.put(hashes, range(8)).ok.all()


def test_two_calls_at_once_do_not_wait_for_each_others_slots():
    """Each wants more than half of the buffer, in two steps: hold-and-wait would hang."""
    one = held("cplshd", pages=16)
    with OneRun(MemoryBackend()) as store, attach(one, store, staging=4 * 4096) as connector:
        content = one.random(16)
        one.write(range(16), content)
        outcomes = []

        def work(ids):
            for round_ in range(20):
                hashes = [f"{round_}-{page}" for page in ids]
                outcomes.append(connector.put(hashes, ids))
                outcomes.append(connector.get(hashes, ids))

        parts = [list(range(n, 16, 4)) for n in range(4)]
        threads = [threading.Thread(target=work, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(outcomes) == 4 * 20 * 2
        assert all(outcome.ok.all() for outcome in outcomes)
        found = one.read(range(16))
        assert all((found[name] == content[name]).all() for name in content)
        assert free_slots(connector) == 4


def test_a_slot_is_page_sized_whatever_the_page():
    """The oracle's sum: each object rounded up to 4096, objects one after another."""
    one = held("cplshd", size=16, layers=4, dims=(40, 24)[:1] * 2)
    plan = staged_plan(one, head_group=1)
    with StagingBuffer(plan, 1 << 24) as buffer:
        sizes = plan.object_nbytes()
        assert buffer.slot_nbytes == sum(math.ceil(n / 4096) * 4096 for n in sizes)
