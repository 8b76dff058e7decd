"""Registered memory: counted, checked at every submit, released exactly once."""

from __future__ import annotations

import numpy as np
import pytest

from kvconnect.backend import Backend, Batch, Op, Status
from kvconnect.errors import RegistrationError
from kvconnect.region import Region
from kvconnect.testing.memory import GuardedBuffer, Objects
from kvconnect.testing.suite.base import SuiteBase, expect, filled, key, keys, move, put


def one_run(op: Op, address: int, nbytes: int) -> Batch:
    """Return a batch of one key and one run."""
    return Batch(
        op,
        [key("run")],
        np.array([address], dtype=np.uint64),
        np.array([nbytes], dtype=np.uint64),
        np.array([0, 1], dtype=np.int64),
    )


class Regions(SuiteBase):
    """Registration and the check of descriptors."""

    @pytest.mark.parametrize("op", Op)
    def test_memory_that_was_never_registered_is_refused(self, store: Backend, op: Op) -> None:
        held = Objects([[64], [64]])  # case 16
        with pytest.raises(RegistrationError):
            store.submit(held.batch(op, keys(2)))
        other = Objects([[64]])
        with store.register([other.region]), pytest.raises(RegistrationError):
            store.submit(held.batch(op, keys(2)))
        assert held.buffer.canaries().all()

    @pytest.mark.parametrize("op", Op)
    @pytest.mark.parametrize(
        ("start", "nbytes"), [(-1, 8), (4089, 8), (0, 4097), (4096, 1), (-8, 8), (8, 1 << 63)]
    )
    def test_runs_across_an_edge_are_refused(
        self, store: Backend, op: Op, start: int, nbytes: int
    ) -> None:
        buffer = GuardedBuffer(4096)
        with store.register([buffer.region]), pytest.raises(RegistrationError):
            store.submit(one_run(op, buffer.region.address + start, nbytes))
        assert not store.exists([key("run")], [nbytes]).any()
        buffer.check()

    def test_runs_at_the_edges_are_fine(self, store: Backend) -> None:
        buffer = GuardedBuffer(4096)
        base = buffer.region.address
        with store.register([buffer.region]):
            for start, nbytes in ((0, 4096), (4095, 1), (0, 1)):
                for op in Op:
                    expect(move(store, one_run(op, base + start, nbytes)), Status.OK)
                buffer.check()

    def test_a_run_across_two_regions_is_refused(self, store: Backend) -> None:
        # Adjacent in memory, yet two allocations to a network card.
        buffer = GuardedBuffer(8192)
        base = buffer.region.address
        halves = [Region(f"half{i}", base + 4096 * i, 4096) for i in range(2)]
        with store.register(halves):
            with pytest.raises(RegistrationError):
                store.submit(one_run(Op.STORE, base + 4000, 200))
            expect(move(store, one_run(Op.STORE, base + 4096, 200)), Status.OK)

    def test_registrations_are_counted(self, store: Backend) -> None:
        # Case 15: two connectors on one pool, each closed twice.
        names, held = keys(2), filled([[512]] * 2, keys(2))
        first = store.register([held.region])
        second = store.register([held.region])
        assert [(r.address, r.nbytes) for r in first.regions] == [
            (held.region.address, held.region.nbytes)
        ]
        first.close()
        first.close()
        expect(move(store, held.batch(Op.STORE, names)), Status.OK, Status.OK)
        second.close()
        second.close()
        with pytest.raises(RegistrationError):
            store.submit(held.batch(Op.LOAD, names))

    def test_memory_may_be_registered_again(self, store: Backend) -> None:
        held = filled([[512]], keys(1))
        for _ in range(3):
            with store.register([held.region]):
                expect(move(store, held.batch(Op.STORE, keys(1))), Status.OK)

    def test_overlap_registers_nothing(self, store: Backend) -> None:
        buffer, fresh = GuardedBuffer(8192), GuardedBuffer(4096)
        base = buffer.region.address
        with store.register([buffer.region]):
            part = Region("part", base + 100, 100)
            with pytest.raises(RegistrationError):
                store.register([fresh.region, part])
            with pytest.raises(RegistrationError):
                store.submit(one_run(Op.STORE, fresh.region.address, 8))
            expect(move(store, one_run(Op.STORE, base, 8)), Status.OK)

    def test_another_device_is_refused(self, store: Backend) -> None:
        held = Objects([[8]])
        region = Region("elsewhere", held.region.address, held.region.nbytes, "nodevice:0")
        with pytest.raises(RegistrationError):
            store.register([region])

    def test_one_bad_run_moves_nothing(self, store: Backend) -> None:
        names, sizes = keys(3), [512] * 3
        held = filled([[512]] * 3, names)
        batch = held.batch(Op.STORE, names)
        batch.address[2] += np.uint64(1 << 40)
        with store.register([held.region]), pytest.raises(RegistrationError):
            store.submit(batch)
        assert not store.exists(names, sizes).any()
        put(store, names, sizes)
        assert store.exists(names, sizes).all()
