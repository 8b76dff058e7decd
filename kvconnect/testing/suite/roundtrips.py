"""Bytes in, the same bytes out: any sizes, runs and bases; misses are statuses."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kvconnect.backend import Backend, Op, Status
from kvconnect.testing.memory import Objects
from kvconnect.testing.suite.base import (
    SuiteBase,
    check_loaded,
    content,
    expect,
    get,
    key,
    keys,
    move,
    put,
    stored,
)

SHAPES = {
    "per_page": [[2304]] * 8,  # case 1: 2304 % 512 is 256
    "split_heads": [[480] * 32] * 3,
    "scattered": [[1, 4096, 63, 2304, 512], [7], [4095, 1]],
    "one_byte": [[1]] * 5,
    "large": [[1 << 20], [(1 << 20) + 1], [256 << 10] * 3],
}


class RoundTrips(SuiteBase):
    """Stores and loads that must be exact."""

    @pytest.mark.parametrize("offset", [0, 64, 1])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_round_trip(self, store: Backend, shape: str, offset: int) -> None:
        # The base is 4096-aligned + offset (case 3), every run lies at an odd place.
        self._round_trip(store, SHAPES[shape], offset)

    def test_more_runs_than_one_system_call_takes(self, store: Backend) -> None:
        self._round_trip(store, [[96] * 2500, [16] * 1025], 0)

    def _round_trip(self, store: Backend, runs: list[list[int]], offset: int) -> None:
        names = keys(len(runs))
        source = Objects(runs, offset=offset)
        # The reader cuts its objects otherwise: only the byte sequence is common.
        target = Objects([list(reversed(sizes)) for sizes in runs], offset=offset)
        for index, name in enumerate(names):
            source.write(index, content(name, source.sizes[index]))
        with store.register([source.region, target.region]):
            assert move(store, source.batch(Op.STORE, names)).prefix == len(runs)
            source.check()
            assert store.exists(names, source.sizes).all()
            assert target.buffer.canaries().all(), "exists touches no data"
            outcome = move(store, target.batch(Op.LOAD, names))
        check_loaded(outcome, target)
        assert outcome.prefix == len(runs)
        for index, name in enumerate(names):
            wanted = content(name, source.sizes[index])
            assert target.read(index) == wanted
            assert source.read(index) == wanted

    def test_partial_hits_keep_their_order(self, store: Backend) -> None:
        names, sizes = keys(7), [512, 2304, 1, 480, 4096, 33, 700]
        present = [0, 1, 3, 6]
        put(store, [names[i] for i in present], [sizes[i] for i in present])
        outcome, held = get(store, names, sizes)
        hit = np.isin(np.arange(7), present)
        expect(outcome, *[Status.OK if one else Status.ABSENT for one in hit])
        assert outcome.prefix == 2
        assert (store.exists(names, sizes) == hit).all()
        for index in range(7):
            same = held.read(index) == content(names[index], sizes[index])
            assert same if hit[index] else held.untouched(index)

    def test_a_miss_is_a_status(self, store: Backend) -> None:
        outcome, held = get(store, keys(3), [100, 200, 300])
        expect(outcome, Status.ABSENT, Status.ABSENT, Status.ABSENT)
        assert outcome.nbytes == 0
        assert held.buffer.canaries().all()
        assert not store.exists(keys(3), [100, 200, 300]).any()

    @pytest.mark.parametrize("asked", [1, 2303, 2305, 4096, 1 << 20])
    def test_another_size_is_a_miss(self, store: Backend, asked: int) -> None:
        name = key("sized")
        put(store, [name], [2304])
        assert store.exists([name, name], [asked, 2304]).tolist() == [False, True]
        outcome, _ = get(store, [name], [asked])
        expect(outcome, Status.SIZE_MISMATCH)
        stored(store, [name], [2304])

    def test_an_empty_object_is_never_a_hit(self, store: Backend) -> None:
        name, empty = key("empty"), Objects([[0], [8]])
        with store.register([empty.region]):
            try:
                outcome = move(store, empty.batch(Op.STORE, [name], [0]))
            except ValueError:
                pass  # refusing it outright is as good
            else:
                assert outcome.nbytes == 0
        assert not store.exists([name], [2304]).any()
        outcome, held = get(store, [name], [2304])
        assert outcome.prefix == 0
        assert held.untouched(0)

    def test_no_keys(self, store: Backend) -> None:
        nothing = Objects([[1]])
        for op in Op:
            outcome = move(store, nothing.batch(op, []))
            assert (len(outcome.status), outcome.nbytes, outcome.prefix) == (0, 0, 0)
        found: NDArray[np.bool_] = store.exists([], [])
        assert (found.shape, found.dtype) == ((0,), np.dtype(np.bool_))

    def test_the_same_bytes_again(self, store: Backend) -> None:
        names, sizes = keys(3), [2304, 1, 4096]
        for _ in range(3):
            assert put(store, names, sizes).prefix == 3
        stored(store, names, sizes)

    @pytest.mark.parametrize("second", [2304, 2303, 9000, 1])
    def test_other_bytes_under_a_key(self, store: Backend, second: int) -> None:
        # Not OK without storing: where the store says OK, the new bytes come back.
        name = key("changed")
        put(store, [name], [2304], "old")
        for version in ("new", "newer"):
            expect(put(store, [name], [second], version), Status.OK)
            stored(store, [name], [second], version)
            assert store.exists([name], [second]).all()
        if second != 2304:
            assert not store.exists([name], [2304]).any()

    def test_exists_answers_every_question_asked(self, store: Backend) -> None:
        # Duplicates and several sizes of one key are fine here: nothing is moved.
        here, gone = key("here"), key("gone")
        put(store, [here], [64])
        asked = [here, gone, here, here, gone]
        assert store.exists(asked, [64, 64, 65, 64, 1]).tolist() == [
            True,
            False,
            False,
            True,
            False,
        ]

    def test_a_batch_with_a_key_twice(self, store: Backend) -> None:
        # Outside the contract, so an error is fine; a mix of both payloads never is.
        name, held = key("twice"), Objects([[2304], [2304]])
        datas = [content(name, 2304, version) for version in ("a", "b")]
        for index in range(2):
            held.write(index, datas[index])
        with store.register([held.region]):
            try:
                move(store, held.batch(Op.STORE, [name, name]))
            except ValueError:
                assert not store.exists([name], [2304]).any()
                return
        outcome, loaded = get(store, [name], [2304])
        assert outcome.prefix == 0 or loaded.read(0) in datas

    def test_many_keys(self, store: Backend) -> None:
        names, sizes = keys(self.many), [16] * self.many
        assert not store.exists(names, sizes).any()
        assert put(store, names, sizes).prefix == self.many
        assert store.exists(names, sizes).all()
        some = names[:: max(self.many // 100, 1)]
        stored(store, names, sizes)
        stored(store, list(reversed(some)), [16] * len(some))
