"""Connectors on a real Mooncake store: fleets in processes of their own, late bytes, regions."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvconnect.backend import Status
from kvconnect.descriptors import Mode
from kvconnect.errors import TransferTimeoutError
from kvconnect.region import Region
from tests.unit.attached import attach, filled, hashes, same
from tests.unit.held_pools import held

from .mooncake_master import Master, opened, wait_for
from .mooncake_rank import HASHES, READ, WRITE, Fleet, Rank

MIB = 1 << 20
MAP_NORESERVE = 0x4000
RIGHT = [len(READ), {"OK": len(READ)}, True, True]
MISSED = [0, {"ABSENT": len(READ)}, False, True]


@pytest.fixture(scope="module")
def master(tmp_path_factory):
    with Master(tmp_path_factory.mktemp("master")) as one:
        one.owner(64)
        yield one


@pytest.fixture(scope="module")
def shared(master):
    with opened(master, min_run_bytes="512") as store:
        yield store


@pytest.mark.parametrize(("mode", "order"), [(Mode.SPLIT_HEADS, "phsld"), (Mode.STAGED, "pslhd")])
def test_one_fleet_writes_and_another_reads(master, mode, order):
    store = {"prefix": mode.value, "min_run_bytes": "128"}
    declared = {"tp_sizes": [1, 2, 4], "order": order}
    with (
        Fleet(master, 2, 4, store, **declared) as writers,
        Fleet(master, 4, 4, store, **declared) as readers,
    ):
        assert writers.ask("mode") == [mode.value] * 2
        assert writers.ask("put") == [{"OK": len(WRITE)}] * 2
        assert readers.ask("get") == [RIGHT] * 4
    # Killed, all of them. The readers start again, and others of another size.
    with (
        Fleet(master, 4, 4, store, **declared) as readers,
        Fleet(master, 1, 4, store, **declared) as others,
    ):
        assert readers.ask("get") == [RIGHT] * 4
        assert others.ask("get") == [RIGHT]


def test_ranks_that_put_the_same_record_at_once_all_succeed(master):
    with opened(master) as one, opened(master) as two, ThreadPoolExecutor(2) as threads:
        for number in range(40):
            name, value = f"identity/{number}", b"%d" % number
            puts = [threads.submit(store.put_record, name, value) for store in (one, two)]
            for done in puts:
                done.result(30)
        assert {one.records()[f"identity/{n}"] for n in range(40)} == {b"%d" % n for n in range(40)}


@pytest.mark.parametrize(
    ("heads", "sizes"), [(4, (1, 2, 4)), (6, (2, 3)), (8, (2, 4, 8)), (2, (1, 2, 4))]
)
def test_a_declared_fleet_never_needs_part_of_an_object(shared, heads, sizes):
    """Cells of H/L heads, L = lcm of min(t, H): a rank of any size t holds L/t whole ones."""
    grid = math.lcm(*(min(size, heads) for size in sizes))
    options = {"tp_sizes": sizes, "elect_writer": False}
    stored = {}
    for size in sizes:
        for number in range(size):
            rank = Rank(shared, number, size, heads, **options)
            cells = rank.connector.plan.cells
            assert len(cells) == grid // min(size, heads)
            assert all(cell.heads.extent == heads // grid for cell in cells)
            keys = rank.connector.keys.keys([h.encode() for h in HASHES])
            sizes_of = rank.connector.plan.object_nbytes() * len(HASHES)
            for key, nbytes in zip(keys, np.asarray(sizes_of).tolist(), strict=True):
                # The same cells for every size, so that each key has one length.
                assert stored.setdefault(key, nbytes) == nbytes
            rank.connector.close()
    assert len(stored) == grid * len(HASHES)
    shared.clear(next(iter(stored))[:16])
    for writer in sizes:
        for number in range(writer):
            rank = Rank(shared, number, writer, heads, **options)
            assert set(rank.put()) == {"OK"}
            rank.connector.close()
        for reader in sizes:
            for number in range(reader):
                rank = Rank(shared, number, reader, heads, **options)
                assert rank.get() == RIGHT
                rank.connector.close()
        shared.clear(next(iter(stored))[:16])


def test_an_undeclared_fleet_misses_what_another_size_stored(shared):
    writers = [Rank(shared, number, 2, 4) for number in range(2)]
    for rank in writers:
        assert rank.put() == {"OK": len(WRITE)}
        assert rank.get() == RIGHT
    for size in (1, 4):
        rank = Rank(shared, size - 1, size, 4)
        assert rank.get() == MISSED
        assert "2 objects of the page belong to other ranks or another grid" in rank.why()
        rank.connector.close()
    for rank in writers:
        rank.connector.clear()
        rank.connector.close()


def test_late_bytes_never_reach_a_page_that_was_handed_out_again(tmp_path):
    one = held("pclshd", pages=32, layers=8, size=64, dims=(128, 128))  # 1 MiB a page
    with Master(tmp_path / "master") as master:
        owner = master.owner()
        with opened(master, breaker="2") as store, attach(one, store) as connector:
            content = filled(one, connector, 16)
            pages, others = list(range(16)), list(range(16, 32))
            owner.stop()
            before = one.read(pages)
            got = connector.get(hashes(*pages), pages, timeout=0.5)
            assert got.counts() == {"TIMEOUT": 16}
            assert connector.quarantined() == pages
            for call in (connector.put, connector.get):
                with pytest.raises(TransferTimeoutError, match="still held"):
                    call(hashes(99), [5])
            owner.go_on()
            wait_for(lambda: not connector.quarantined(), 60, "the end of the transfer")
            late = one.read(pages)
            assert not same(late, before), "nothing came late: no test"
            # Handed out again: all that the owner had to send is behind it once it has sent more.
            one.write(pages, mine := one.random(16, seed=7))
            wait_for(lambda: loads(connector, pages, others), 30, "recovery")
            assert same(one.read(others), content)
            assert same(one.read(pages), mine), "a byte landed in a page of another request"
            assert connector.stats().get("get.timeout", 0) == 16


def loads(connector, pages, targets):
    """Tell whether all of `pages` load into `targets`."""
    return connector.get(hashes(*pages), targets).ok.all()


class Card:
    """The library's store on a card that takes no region above `most`."""

    def __init__(self, real, most):
        self._real, self._most, self.calls = real, most, []

    def __getattr__(self, name):
        return getattr(self._real, name)

    def register_buffer(self, address, nbytes):
        self.calls.append(nbytes)
        return -600 if nbytes > self._most else self._real.register_buffer(address, nbytes)


def test_a_card_that_refuses_large_regions_needs_no_option(master, monkeypatch):
    with opened(master, min_run_bytes="512", prefix="card") as store:
        card = Card(store.core.client._store, MIB)
        monkeypatch.setattr(store.core.client, "_store", card)
        assert store.capabilities.max_region_bytes is None
        one = held("pclshd", pages=100, layers=4, size=16, dims=(64, 64))
        total = sum(buffer.region.nbytes for buffer in one.buffers)
        assert total > 3 * MIB
        with attach(one, store, self_test=True) as connector:
            assert connector.plan.mode is Mode.PER_PAGE
            assert store.capabilities.max_region_bytes == MIB
            assert store.stats()["registered_bytes"] == total
            content = filled(one, connector, 100)
            assert connector.get(hashes(*range(100)), range(100)).ok.all()
            assert same(one.read(range(100)), content)
        assert store.stats()["registered_bytes"] == 0
        card.calls.clear()
        with attach(one, store):
            assert max(card.calls) <= MIB, "it is found out once"
        monkeypatch.undo()


def test_the_library_takes_large_regions(shared):
    # Over TCP nothing is touched: only the address range counts.
    import ctypes
    import mmap

    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, 16 << 30, flags=flags)
    address = ctypes.addressof(view := ctypes.c_char.from_buffer(memory))
    with shared.register([Region("large", address, 16 << 30)]):
        assert shared.capabilities.max_region_bytes is None
    del view
    memory.close()


def test_a_page_with_a_lost_object_is_a_miss(shared):
    rank = Rank(shared, 0, 1, 4, tp_sizes=(1, 4))
    rank.put()
    keys = rank.connector.keys.keys([HASHES[1].encode()])
    assert shared.remove(keys[2:3]).all()
    hits, counts, *_ = rank.get()
    assert hits == 1
    assert counts == {"OK": 2, Status.PARTIAL.name: 1}
    rank.connector.close()
