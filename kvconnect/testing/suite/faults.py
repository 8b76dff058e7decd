"""Damage, lack of room, and time: what must turn into a miss, and what must stay healthy."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconnect.backend import Backend, Op, Status
from kvconnect.testing.suite.base import (
    SuiteBase,
    content,
    expect,
    filled,
    get,
    key,
    keys,
    move,
    needs,
    put,
    stored,
)


class Faults(SuiteBase):
    """Bytes that rot, stores that are full, objects that expire."""

    @needs("corruptible")
    def test_a_flipped_byte_is_a_miss(self, store: Backend, tmp_path: Path) -> None:
        # Case 29; the others are unharmed and storing again repairs it.
        names, sizes = keys(3), [2304, 4096, 480]
        put(store, names, sizes)
        self.corrupt(store, tmp_path, names[1], content(names[1], sizes[1]))
        outcome, _ = get(store, names, sizes)
        expect(outcome, Status.OK, Status.CHECKSUM, Status.OK)
        expect(put(store, names, sizes), *[Status.OK] * 3)
        stored(store, names, sizes)

    @needs("bounded")
    def test_a_full_store_says_so_or_evicts(self, tmp_path: Path) -> None:
        # Whatever policy: OK means present now, and no load returns wrong bytes.
        with self.open_small(tmp_path) as store:
            count = 4 * self.small_bytes // 4096
            names, sizes = keys(count), [4096] * count
            for name in names:
                status = Status(int(put(store, [name], [4096]).status[0]))
                assert status in {Status.OK, Status.NO_SPACE}
                assert store.exists([name], [4096]).all() == (status is Status.OK)
            outcome, held = get(store, names, sizes)
            assert 0 < int(outcome.ok.sum()) < count
            for index in outcome.ok.nonzero()[0].tolist():
                assert held.read(index) == content(names[index], 4096)

    @needs("bounded")
    def test_one_object_above_the_capacity(self, tmp_path: Path) -> None:
        with self.open_small(tmp_path) as store:
            huge = 4 * self.small_bytes
            put(store, [key("small")], [512])
            expect(put(store, [key("huge")], [huge]), Status.NO_SPACE)
            assert not store.exists([key("huge")], [huge]).any()
            if not self.evicts_in_vain:
                stored(store, [key("small")], [512])
            expect(put(store, [key("after")], [512]), Status.OK)

    @needs("bounded")
    def test_pinned_objects_stay(self, tmp_path: Path) -> None:
        with self.open_small(tmp_path) as store:
            names = keys(2)
            held = filled([[4096]] * 2, names)
            with store.register([held.region]):
                expect(move(store, held.batch(Op.STORE, names, pin=True)), Status.OK, Status.OK)
            for number in range(2 * self.small_bytes // 4096):
                put(store, [key(number, "other")], [4096])
            stored(store, names, [4096] * 2)

    @needs("expires")
    def test_an_expired_object_is_gone(self, store: Backend) -> None:
        names, sizes = keys(2), [2304, 512]
        held = filled([[size] for size in sizes], names)
        with store.register([held.region]):
            move(store, held.batch(Op.STORE, names[:1], ttl=3.0))
            move(store, held.batch(Op.STORE, names[1:], [1]))
        assert store.exists(names, sizes).all()
        self.pass_time(store, 4.0)
        assert store.exists(names, sizes).tolist() == [False, True]
        outcome, _ = get(store, names, sizes)
        assert Status(int(outcome.status[0])) in {Status.ABSENT, Status.LEASE_EXPIRED}
        assert outcome.ok.tolist() == [False, True]
        put(store, names[:1], sizes[:1])
        stored(store, names, sizes)

    @needs("durable")
    @pytest.mark.parametrize("times", [1, 3])
    def test_objects_survive_closing(self, tmp_path: Path, times: int) -> None:
        names, sizes = keys(4), [2304, 1, 480, 1 << 16]
        with self.open_store(tmp_path) as store:
            put(store, names, sizes)
        for _ in range(times):
            with self.open_store(tmp_path) as store:
                assert store.exists(names, sizes).all()
                stored(store, names, sizes)

    @needs("durable")
    def test_changes_survive_closing(self, tmp_path: Path) -> None:
        name = key("changed")
        for version in ("a", "b", "c"):
            with self.open_store(tmp_path) as store:
                expect(put(store, [name], [2304], version), Status.OK)
            with self.open_store(tmp_path) as store:
                stored(store, [name], [2304], version)
