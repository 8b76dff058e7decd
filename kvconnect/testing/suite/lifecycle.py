"""Submit, poll, cancel, close: in every order, with definite ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvconnect.backend import Backend, Op, Status
from kvconnect.errors import ClosedError
from kvconnect.testing.memory import Objects
from kvconnect.testing.suite.base import (
    WAIT,
    SuiteBase,
    content,
    filled,
    get,
    keys,
    move,
    put,
    stored,
)

ENDS = {Status.OK, Status.CANCELLED}


class Lifecycle(SuiteBase):
    """What holds before, during and after a transfer and a store."""

    def test_it_is_a_backend(self, store: Backend) -> None:
        assert isinstance(store, Backend)
        assert store.name
        assert " object at 0x" not in repr(store), "repr says what it is, not where"

    def test_polling_ends(self, store: Backend) -> None:
        names, held = keys(4), filled([[4096]] * 4, keys(4))
        with store.register([held.region]):
            transfer = store.submit(held.batch(Op.STORE, names))
            end = time.monotonic() + WAIT
            while not transfer.done() and time.monotonic() < end:
                time.sleep(0.001)
            assert transfer.done()
            first, again = transfer.wait(0), transfer.wait()
        assert first.prefix == again.prefix == 4, "the outcome stays"

    def test_an_early_look_is_honest(self, store: Backend) -> None:
        # wait(0) may see anything from nothing to all, but never a status it takes back.
        names, held = keys(64), filled([[4096]] * 64, keys(64))
        with store.register([held.region]):
            transfer = store.submit(held.batch(Op.STORE, names))
            early = transfer.wait(0)
            final = transfer.wait(WAIT)
        assert {Status(int(s)) for s in early.status} <= {Status.OK, Status.TIMEOUT}
        assert (final.ok | ~early.ok).all()
        assert final.prefix == 64

    def test_an_early_look_at_a_load_says_dirty(self, store: Backend) -> None:
        names, sizes = keys(64), [4096] * 64
        put(store, names, sizes)
        target = Objects([[4096]] * 64)
        with store.register([target.region]):
            transfer = store.submit(target.batch(Op.LOAD, names))
            early = transfer.wait(0)
            assert transfer.wait(WAIT).prefix == 64
        assert early.dirty is not None
        assert (early.dirty == (early.status == Status.TIMEOUT)).all()

    @pytest.mark.parametrize("op", Op)
    def test_cancel_then_reuse_the_memory(self, store: Backend, op: Op) -> None:
        names, sizes = keys(256), [4096] * 256
        held = filled([[4096]] * 256, names)
        if op is Op.LOAD:
            put(store, names, sizes)
        with store.register([held.region]):
            transfer = store.submit(held.batch(op, names))
            transfer.cancel()
            transfer.cancel()
            outcome = transfer.wait(WAIT)
            assert transfer.done()
            held.buffer.view[:] = 0
            time.sleep(0.02)
            assert not held.buffer.view.any(), "the memory was written after done()"
        assert {Status(int(s)) for s in outcome.status} <= ENDS
        kept = store.exists(names, sizes)
        if op is Op.STORE:
            assert kept[outcome.ok].all(), "OK means stored, cancelled or not"
        got, loaded = get(store, names, sizes)
        for index in got.ok.nonzero()[0].tolist():
            assert loaded.read(index) == content(names[index], 4096)

    @pytest.mark.parametrize("op", Op)
    def test_close_during_a_transfer(self, tmp_path: Path, op: Op) -> None:
        names, sizes = keys(256), [4096] * 256
        store = self.open_store(tmp_path)
        put(store, names, sizes)
        held = filled([[4096]] * 256, names, "" if op is Op.LOAD else "new")
        registration = store.register([held.region])
        transfer = store.submit(held.batch(op, names))
        store.close()
        assert transfer.done(), "close returned while memory was leased"
        outcome = transfer.wait(0)
        assert {Status(int(s)) for s in outcome.status} <= ENDS
        held.buffer.view[:] = 0
        time.sleep(0.02)
        assert not held.buffer.view.any(), "the memory was written after close()"
        registration.close()

    def test_close_twice(self, tmp_path: Path) -> None:
        store = self.open_store(tmp_path)
        registration = store.register([Objects([[8]]).region])
        store.close()
        store.close()
        registration.close()
        registration.close()

    def test_nothing_works_after_close(self, tmp_path: Path) -> None:
        held = Objects([[8]])
        with self.open_store(tmp_path) as store:
            registration = store.register([held.region])
        for op in Op:
            with pytest.raises(ClosedError):
                store.submit(held.batch(op, keys(1)))
        with pytest.raises(ClosedError):
            store.exists(keys(1), [8])
        with pytest.raises(ClosedError):
            store.register([held.region])
        registration.close()

    def test_closing_the_registration_waits_or_refuses(self, store: Backend) -> None:
        # Case 30: memory never leaves under a transfer.
        names, held = keys(256), filled([[4096]] * 256, keys(256))
        registration = store.register([held.region])
        transfer = store.submit(held.batch(Op.STORE, names))
        try:
            registration.close()
        except OSError:
            transfer.wait(WAIT)
            registration.close()
        assert transfer.done()
        assert transfer.wait(0).prefix == 256

    def test_batches_of_one_thread_overlap(self, store: Backend) -> None:
        names = keys(24)
        held = filled([[2304]] * 24, names)
        with store.register([held.region]):
            parts = [range(at, at + 6) for at in range(0, 24, 6)]
            moving = [
                store.submit(held.batch(Op.STORE, [names[i] for i in part], part)) for part in parts
            ]
            assert [transfer.wait(WAIT).prefix for transfer in reversed(moving)] == [6] * 4
        stored(store, names, [2304] * 24)

    def test_wait_is_bounded(self, store: Backend) -> None:
        held = filled([[1 << 20]] * 4, keys(4))
        with store.register([held.region]):
            begin = time.monotonic()
            transfer = store.submit(held.batch(Op.STORE, keys(4)))
            transfer.wait(0.001)
            assert time.monotonic() - begin < 5
            assert move(store, held.batch(Op.STORE, [])).prefix == 0
            assert transfer.wait(WAIT).prefix == 4
