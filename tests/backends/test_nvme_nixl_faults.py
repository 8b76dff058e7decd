"""The NIXL engine when NIXL is slow, fails or is not there, and the choice of an engine."""

import errno
import gc
import logging
import os
import resource
import threading
from pathlib import Path

import numpy as np
import pytest

from kvconnect.backend import Op, Status
from kvconnect.errors import ConfigError, RegistrationError, UnavailableError
from kvconnect.testing.memory import Objects
from kvconnect.testing.suite.base import content, expect, filled, key, keys, move, put, stored
from kvconnect_nixl import library
from kvconnect_nvme import engines, open_backend, probe
from kvconnect_nvme.keys import pack
from kvconnect_nvme.slabs import Slabs
from tests.backends.fake_nixl import FakeAgent, install, nixlBackendError

OPTIONS = {"capacity": "16MiB", "io": "nixl-posix"}
SIZES = [480, 2304, 4096, 12288, 65536, 1 << 20]


def in_place(runs, names=None):
    """Return memory that needs no bounce buffer, filled with what belongs to `names`."""
    held = Objects(runs, gap=4096)
    for index, name in enumerate(names or []):
        held.write(index, content(name, held.sizes[index]))
    return held


def round_trip(store, runs, names):
    """Store and load in place, and compare."""
    source, target = in_place(runs, names), in_place(runs)
    with store.register([source.region, target.region]):
        expect(move(store, source.batch(Op.STORE, names)), *[Status.OK] * len(names))
        expect(move(store, target.batch(Op.LOAD, names)), *[Status.OK] * len(names))
    for index, name in enumerate(names):
        assert target.read(index) == content(name, target.sizes[index])
    target.check()


@pytest.fixture
def nixl(monkeypatch):
    """Install a NIXL that moves bytes at the first look."""
    agent = FakeAgent()
    install(monkeypatch, agent)
    return agent


@pytest.mark.parametrize(
    ("io", "plugin", "parameters", "most"),
    [
        ("nixl-posix", "POSIX", {"use_aio": "true"}, 1024),
        ("nixl-gds", "GDS", {}, 128),
        ("nixl-gds-mt", "GDS_MT", {"thread_count": "3"}, 1024),
    ],
)
def test_every_engine_moves_the_right_bytes(nixl, tmp_path, io, plugin, parameters, most):
    options = OPTIONS | {"io": io, "io_threads": "3"}
    with open_backend(str(tmp_path), options) as store:
        assert nixl.plugins == {plugin: parameters}
        assert put(store, keys(6), SIZES).prefix == 6
        stored(store, keys(6), SIZES)
        round_trip(store, [[16384] * 300, [512], [20480, 16896]], keys(3, "in place"))
        assert nixl.largest == min(most, 300)
        assert store.core.engine.stats()["io_fallbacks"] == 0
    assert nixl.memory == nixl.files == nixl.posted == {}


def test_gds_needs_direct_io(nixl, tmp_path):
    for io in ("nixl-gds", "nixl-gds-mt"):
        with pytest.raises(ConfigError, match="O_DIRECT"):
            open_backend(str(tmp_path), OPTIONS | {"io": io, "direct": "off"})
    with pytest.raises(ConfigError, match="block devices"):
        open_backend(str(tmp_path), OPTIONS | {"io": "nixl-gusli"})


def test_memory_is_leased_until_the_last_byte(nixl, tmp_path):
    # A load that times out: its pages are not given back, nor the store closed, before NIXL
    # is done with them; and what lands then lands in pages that are still leased.
    with open_backend(str(tmp_path), OPTIONS) as store:
        put(store, keys(2), [65536] * 2)
    store = open_backend(str(tmp_path), OPTIONS | {"timeout": "0.3"})
    nixl.auto = False
    held = Objects([[65536]] * 2)
    registration = store.register([held.region])
    transfer = store.submit(held.batch(Op.LOAD, keys(2)))
    outcome = transfer.wait()
    expect(outcome, Status.TIMEOUT, Status.TIMEOUT)
    assert outcome.dirty.all()
    assert not transfer.done()
    for leased in (registration, store):
        with pytest.raises(TimeoutError, match="leased"):
            leased.close()
    assert nixl.memory, "still registered"
    assert held.untouched(0)
    nixl.auto = True
    assert transfer.settled(10)
    assert not held.untouched(0)
    held.check()
    registration.close()
    store.close()
    assert nixl.memory == nixl.files == nixl.posted == {}


def test_what_nixl_cannot_move_system_calls_do(nixl, tmp_path, caplog):
    nixl.fails = lambda number: number % 2 == 0
    with open_backend(str(tmp_path), OPTIONS) as store, caplog.at_level(logging.WARNING):
        names, sizes = keys(40), [4096, 2304] * 20
        for n in range(0, 40, 2):
            assert put(store, names[n : n + 2], sizes[n : n + 2]).prefix == 2
        stored(store, names, sizes)
        assert store.stats()["io_fallbacks"] > 10
    assert len([r for r in caplog.records if "system calls" in r.message]) == 1


def test_a_bad_block_costs_only_its_object(nixl, tmp_path, monkeypatch):
    # NIXL says of the group that it failed; the object is found by the calls that follow.
    with open_backend(str(tmp_path), OPTIONS) as store:
        put(store, keys(5), [4096] * 5)
        with store.core.env.read() as session:
            address = store.core.index(session).find(pack(keys(5)[2])).address
        bad = store.core.slabs.locate(address)[1]
        nixl.fails, real = lambda number: True, os.preadv

        def failing(fd, buffers, offset, *flags):
            if offset <= bad < offset + sum(map(len, buffers)):
                raise OSError(errno.EIO, "bad sector")
            return real(fd, buffers, offset, *flags)

        monkeypatch.setattr(os, "preadv", failing)
        held = in_place([[4096]] * 5)
        with store.register([held.region]):
            outcome = move(store, held.batch(Op.LOAD, keys(5)))
        expect(outcome, Status.OK, Status.OK, Status.BACKEND_ERROR, Status.OK, Status.OK)
        assert outcome.dirty.tolist() == [False, False, True, False, False]


def test_descriptors_under_way_are_bounded(nixl, tmp_path):
    with open_backend(str(tmp_path), OPTIONS) as store:
        engine = store.core.engine
        engine._room = 64
        object.__setattr__(engine.plan, "chunk", 16)
        round_trip(store, [[16384] * 100] * 4, keys(4))
        assert nixl.largest == 16
        assert 16 < nixl.most <= 64
        assert engine._room == 64


@pytest.mark.parametrize("api", ["aio", "uring"])
def test_in_place_by_the_real_library(tmp_path, api):
    pytest.importorskip("nixl_cu12")
    options = OPTIONS | {"nixl_api": api, "capacity": "64MiB", "direct": "on"}
    with open_backend(str(tmp_path), options) as store:
        runs = [[16384] * 300, [512], [20480, 16896], [9 << 20], *[[65536]] * 20]
        round_trip(store, runs, keys(24))
        assert store.stats()["io_fallbacks"] == store.stats()["bounce_bytes"] == 0


@pytest.mark.parametrize("api", ["aio", "uring"])
def test_late_bytes_stay_in_leased_pages(tmp_path, api):
    # The real library, and a deadline that passes while it moves bytes.
    pytest.importorskip("nixl_cu12")
    options = OPTIONS | {"nixl_api": api, "capacity": "64MiB", "checksum": "false"}
    names, sizes = keys(32), [[1 << 20]] * 32
    source, target = in_place(sizes, names), in_place(sizes)
    with open_backend(str(tmp_path), options) as store, store.register([source.region]):
        assert move(store, source.batch(Op.STORE, names)).prefix == 32
    with open_backend(str(tmp_path), options) as store:
        registration = store.register([target.region])
        transfer = store.submit(target.batch(Op.LOAD, names))
        assert set(transfer.wait(0).counts()) <= {"TIMEOUT", "OK"}
        transfer.cancel()
        assert transfer.settled(30)
        assert store.core.engine.stats()["nixl_under_way"] == 0
        # Done: the pages are handed out again, and nothing may come any more.
        target.buffer.view[:] = 7
        registration.close()
        put(store, [key("other")], [1 << 20])
        stored(store, [key("other")], [1 << 20])
        assert (target.buffer.view == 7).all()


def test_bounced_groups_never_wait_for_each_other(nixl, tmp_path):
    # Two groups fill the bounce buffer; a thread that holds one must not wait for the other's.
    options = OPTIONS | {"bounce": "64KiB", "timeout": "20", "capacity": "64MiB"}
    with open_backend(str(tmp_path), options) as store:
        wrong = []

        def work(number):
            names, sizes = keys(60, f"thread {number}"), [6000] * 60
            for _ in range(5):
                if put(store, names, sizes, str(_)).prefix != 60:
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong
        stored(store, keys(60, "thread 0"), [6000] * 60, "4")


def test_an_allocation_is_registered_once_and_until_the_last_holder(nixl, tmp_path):
    with open_backend(str(tmp_path), OPTIONS) as store:
        held = filled([[4096]], keys(1))
        first, second = store.register([held.region]), store.register([held.region])
        assert list(nixl.memory) == [held.region.address]
        first.close()
        first.close()
        assert list(nixl.memory) == [held.region.address]
        second.close()
        assert not nixl.memory


def test_registration_is_all_or_nothing(nixl, tmp_path, monkeypatch):
    with open_backend(str(tmp_path), OPTIONS) as store:
        one, two = filled([[4096]], keys(1)), filled([[4096]], keys(1))
        real = nixl.register_memory

        def some(rows, kind, plugins):
            if nixl.memory:
                raise nixlBackendError("NIXL_ERR_BACKEND")
            return real(rows, kind, plugins)

        monkeypatch.setattr(nixl, "register_memory", some)
        with pytest.raises(RegistrationError, match="after 1 of 2 chunks"):
            store.register([one.region, two.region])
        assert not nixl.memory
        with pytest.raises(RegistrationError, match="register the whole pool first"):
            store.submit(one.batch(Op.STORE, keys(1)))


def count_fds():
    gc.collect()  # what earlier tests left in cycles would be counted before and gone after
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("api", ["aio", "uring"])
def test_descriptors_return_to_baseline(tmp_path, monkeypatch, api):
    # 2000 pages, few file descriptors, and every third batch failing in NIXL.
    pytest.importorskip("nixl_cu12")
    options = OPTIONS | {"nixl_api": api}
    with open_backend(str(tmp_path), options):
        pass
    before, (_, hard) = count_fds(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        with open_backend(str(tmp_path), options) as store:
            names = keys(2000)
            held = filled([[4096]] * 2000, names)
            slab = tmp_path / "slab-0000.dat"
            with store.register([held.region]):
                for start in range(0, 2000, 100):
                    part = range(start, start + 100)
                    batch = held.batch(Op.STORE, [names[i] for i in part], part)
                    assert move(store, batch).prefix == 100
                size = slab.stat().st_size
                for number in range(0, 2000, 100):
                    # Every third read finds the file cut short: the real NIXL fails, then the
                    # system calls do.
                    cut = (number // 100) % 3 == 2
                    os.truncate(slab, 0 if cut else size)
                    part = range(number, number + 100)
                    if cut:
                        monkeypatch.setattr(store.core.env, "write", refuse)
                    outcome = move(store, held.batch(Op.LOAD, [names[i] for i in part], part))
                    monkeypatch.undo()
                    assert not outcome.ok.all() if cut else True
            assert store.stats()["io_fallbacks"] > 0
            engine = store.core.engine.stats()
            assert engine["nixl_under_way"] == 0
            assert engine["nixl_held"] <= 2, "one slab, and the bounce buffer"
        assert count_fds() == before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def refuse(_):
    raise OSError(errno.ENOSPC, "the damaged entries stay")


RATES = [
    ({"threads": 1.0, "aio": 1.05, "uring": 1.05}, ("threads", "aio")),
    ({"threads": 1.0, "aio": 1.2, "uring": 1.3}, ("nixl-posix", "uring")),
    ({"threads": 1.0, "aio": 1.2, "uring": 1.1}, ("nixl-posix", "aio")),
    ({"threads": 1.0}, ("threads", "aio")),
]


@pytest.mark.parametrize(("rates", "choice"), RATES)
def test_the_fastest_is_chosen_once_and_said(tmp_path, monkeypatch, caplog, rates, choice):
    asked = []

    def measure(makers, slabs):
        asked.append(list(makers))
        names = dict(zip(makers, ["threads", "aio", "uring"], strict=True))
        return {maker: rates[name] * 1e9 for maker, name in names.items() if name in rates}

    monkeypatch.setattr(engines, "_chosen", {})
    monkeypatch.setattr(probe, "measure", measure)
    install(monkeypatch, FakeAgent())
    monkeypatch.setattr(library, "load", lambda: None)
    with caplog.at_level(logging.INFO, "kvconnect.nvme"):
        for _ in range(2):
            with open_backend(str(tmp_path), {"capacity": "1MiB"}) as store:
                io, api = choice
                wanted = io if io == "threads" else f"{io} {api}"
                assert store.stats()["io"] == wanted
                assert "threads 1.00 GB/s" in store.stats()["io_reason"]
    assert len(asked) == 1
    assert len([r for r in caplog.records if "by probe of" in r.message]) == 1


def test_without_nixl_it_is_threads(tmp_path, monkeypatch, caplog):
    def gone():
        raise UnavailableError("no NIXL")

    monkeypatch.setattr(engines, "_chosen", {})
    monkeypatch.setattr(library, "load", gone)
    monkeypatch.setattr("kvconnect_nixl.agent.load", gone)
    with caplog.at_level(logging.WARNING), open_backend(str(tmp_path), {"capacity": "1MiB"}) as one:
        assert one.stats()["io"] == "threads"
        assert "not installed" in one.stats()["io_reason"]
        assert not caplog.records
    with pytest.raises(UnavailableError, match="no NIXL"):
        open_backend(str(tmp_path), {"capacity": "1MiB", "io": "nixl-posix"})


def test_the_probe_measures_the_real_disk_and_leaves_nothing(tmp_path):
    seen = []

    class Watched(engines.ThreadsEngine):
        def run(self, op, groups, work):
            place = Path(f"/proc/self/fd/{groups[0].fd}")
            seen.append((op, place.stat().st_dev, sum(g.nbytes for g in groups)))
            return super().run(op, groups, work)

    with Slabs(tmp_path, 1 << 20, "auto", device=False) as slabs:
        rates = probe.measure({"a": lambda _: Watched(4), "b": lambda _: Watched(4)}, slabs)
    assert "a" in rates
    assert all(rate > 0 for rate in rates.values())
    disk = tmp_path.stat().st_dev
    assert set(seen) == {(op, disk, probe.BYTES) for op in (Op.STORE, Op.LOAD)}
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_cannot_be_made_is_left_out_of_the_probe(tmp_path):
    def refused(_):
        raise UnavailableError("io_uring is forbidden here")

    with Slabs(tmp_path, 1 << 20, "auto", device=False) as slabs:
        rates = probe.measure({"a": lambda _: engines.ThreadsEngine(4), "b": refused}, slabs)
    assert list(rates) == ["a"]


def test_no_room_for_a_probe(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "_chosen", {})
    monkeypatch.setattr(library, "load", lambda: None)

    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(probe, "measure", full)
    with open_backend(str(tmp_path), {"capacity": "1MiB"}) as store:
        assert store.stats()["io"] == "threads"
        assert "no space left" in store.stats()["io_reason"]
        put(store, keys(1), [100])
        stored(store, keys(1), [100])


def test_rows_of_a_group_are_its_bytes_in_file_order(tmp_path):
    from kvconnect.batch_memory import BatchMemory

    held = filled([[512, 1024], [4096], [0, 700]], keys(3))
    batch = held.batch(Op.STORE, keys(3))
    memory = BatchMemory(batch, (held.region,), 1)
    rows = memory.table(np.array([2, 0]), np.array([0, 4096], dtype=np.uint64))
    assert rows[:, 2].tolist() == [0, 4096, 4608]
    assert rows[:, 1].tolist() == [700, 512, 1024]
