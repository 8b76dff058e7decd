"""Cases of the correctness list on the NVMe store, and what its options promise."""

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kvconnect.backend import Op, Status
from kvconnect.errors import ClosedError, ConfigError, UnavailableError
from kvconnect.testing.memory import Objects
from kvconnect.testing.suite.base import content, expect, filled, get, key, keys, move, put, stored
from kvconnect_nvme import entry, open_backend
from kvconnect_nvme import env as env_module
from kvconnect_nvme.bounce import BouncePool
from kvconnect_nvme.keys import pack
from kvconnect_nvme.threads import ThreadsEngine

# Faults are made in system calls here; tests/backends/test_nvme_engines.py has the others.
OPTIONS = {"capacity": "8MiB", "io": "threads"}


@pytest.fixture
def location(tmp_path):
    return str(tmp_path / "store")


@pytest.fixture
def store(location):
    with open_backend(location, OPTIONS) as store:
        yield store


def test_odd_pages_through_direct_io(location):
    # Case 1: 2304 B objects, 2304 % 512 == 256, bytes beside them untouched.
    with open_backend(location, OPTIONS | {"direct": "on"}) as store:
        assert store.stats()["direct"] == "on"
        names = keys(6)
        assert put(store, names, [2304] * 6).prefix == 6
        stored(store, names, [2304] * 6)
        assert store.stats()["bounce_bytes"] > 0


def test_neighbours_pass_through_a_bounce_buffer_that_holds_only_a_few(location):
    with open_backend(location, OPTIONS | {"direct": "on", "bounce": "8KiB"}) as store:
        names = keys(16)
        assert put(store, names, [2304] * 16).prefix == 16
        stored(store, names, [2304] * 16)
        assert store.stats()["bounce_bytes"] <= 8192


def test_bounce_slots_are_aligned_and_distinct():
    # Case 2.
    pool = BouncePool(1 << 20, 1.0)
    with pool.slot(2304) as one, pool.slot(2304) as two, pool.slot(8 * 2304) as three:
        spans = sorted((s.address, len(s.view)) for s in (one, two, three))
        assert all(address % 4096 == 0 for address, _ in spans)
        assert spans[0][0] + spans[0][1] <= spans[1][0]
        assert spans[1][0] + spans[1][1] <= spans[2][0]
    with pytest.raises(OSError, match="bounce="), pool.slot((1 << 20) + 1):
        pass
    small = BouncePool(4096, 0.01)
    with small.slot(4096), pytest.raises(TimeoutError, match="bounce="), small.slot(1):
        pass


@pytest.mark.parametrize(("offset", "bounced"), [(0, False), (64, True), (512, False)])
def test_alignment_of_the_memory(store, offset, bounced):
    # Case 3: 4096 B at an aligned base + 64 is not taken for aligned; still right.
    if store.core.slabs.alignment != 512:
        pytest.skip("hardware: this disk takes no 512 B alignment")
    held = Objects([[4096]], offset=offset, gap=4096)
    held.write(0, content(key(0), 4096))
    assert held.places[0][0] % 4096 == 0
    with store.register([held.region]):
        expect(move(store, held.batch(Op.STORE, [key(0)])), Status.OK)
        assert (store.stats()["bounce_bytes"] > 0) == bounced
        held.write(0, bytes(4096))
        expect(move(store, held.batch(Op.LOAD, [key(0)])), Status.OK)
    assert held.read(0) == content(key(0), 4096)
    held.check()


def test_a_file_size_limit_is_survived(location):
    # Case 5, in a process of its own: limits are per process.
    code = f"""
import resource
from kvconnect.backend import Status
from kvconnect.testing.suite.base import get, key, put
from kvconnect_nvme import open_backend
with open_backend({location!r}, {{"capacity": "8MiB"}}) as store:
    # A visit first, so that the index has its pages.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
    out = put(store, [key(0)], [1 << 20])
    assert out.status[0] in (Status.NO_SPACE, Status.BACKEND_ERROR), out
    assert out.causes[0]
    assert not store.exists([key(0)], [1 << 20]).any()
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert put(store, [key(0)], [1 << 20]).prefix == 1
    assert get(store, [key(0)], [1 << 20])[0].prefix == 1
"""
    run(code)


def run(code):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def count_fds():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_descriptors_return_to_baseline(location, monkeypatch):
    # Case 17: many pages, every third write failing, 128 file descriptors.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    calls = iter(range(10**9))
    real = os.pwritev

    def flaky(fd, buffers, offset, *flags):
        if next(calls) % 3 == 2:
            raise OSError(5, "injected")
        return real(fd, buffers, offset, *flags)

    before = count_fds()
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        with open_backend(location, OPTIONS | {"capacity": "16MiB"}) as store:
            open_fds = count_fds()
            held = filled([[4096]] * 2000, keys(2000))
            monkeypatch.setattr(os, "pwritev", flaky)
            with store.register([held.region]):
                outcomes = []
                for start in range(0, 2000, 50):
                    part = range(start, start + 50)
                    batch = held.batch(Op.STORE, [key(i) for i in part], part)
                    outcomes.append((part, move(store, batch)))
            monkeypatch.undo()
            failed = sum(len(o.status) - int(o.ok.sum()) for _, o in outcomes)
            assert 0 < failed < 2000
            for part, outcome in outcomes:
                names = [key(i) for i in part]
                assert (store.exists(names, [4096] * 50) == outcome.ok).all()
                assert all("injected" in cause for cause in outcome.causes.values())
            assert count_fds() <= open_fds + 1  # the slab
        assert count_fds() == before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with open_backend(location, {}) as store:
        stats = store.stats()
        assert stats["held_bytes"] == 0
        assert stats["used_bytes"] == stats["objects"] * 4096


def test_few_files_however_many_objects(store, tmp_path):
    # Case 22.
    put(store, keys(1900), [100] * 1900)
    for folder, _, files in os.walk(tmp_path):
        assert len(files) < 16, folder


def test_swapped_payloads_are_misses(location, tmp_path):
    # Case 29: equal sizes, each other's bytes.
    names = keys(2)
    with open_backend(location, OPTIONS) as store:
        put(store, names, [4096] * 2)
    slab = tmp_path / "store" / "slab-0000.dat"
    data = bytearray(slab.read_bytes())
    one, two = (data.index(content(name, 4096)) for name in names)
    data[one : one + 4096], data[two : two + 4096] = data[two : two + 4096], data[one : one + 4096]
    slab.write_bytes(data)
    with open_backend(location, OPTIONS) as store:
        expect(get(store, names, [4096] * 2)[0], Status.CHECKSUM, Status.CHECKSUM)
        assert store.stats()["healed"] == 2


def test_a_slab_size_is_fixed(location):
    with open_backend(location, {"capacity": "8MiB", "slab": "1MiB"}) as store:
        assert store.stats()["slab_bytes"] == 1 << 20
        expect(put(store, [key("large")], [2 << 20]), Status.NO_SPACE)
    with pytest.raises(ConfigError, match="1048576"):
        open_backend(location, {"capacity": "8MiB", "slab": "2MiB"})


def test_modes_and_repr(store, tmp_path):
    put(store, keys(1), [10])
    for folder, folders, files in os.walk(tmp_path / "store"):
        for name in folders:
            assert Path(folder, name).stat().st_mode & 0o777 == 0o700
        for name in files:
            assert Path(folder, name).stat().st_mode & 0o777 == 0o600, name
    assert repr(store).startswith(f"NvmeBackend({tmp_path}/store, 1 objects, 4096 of 8388608 B")
    assert "\n" not in repr(store)


def test_two_stores_of_one_process_share_the_index(location, store):
    with open_backend(location, {}) as other:
        put(other, keys(1), [10])
        stored(store, keys(1), [10])
    stored(store, keys(1), [10])
    with pytest.raises(ConfigError, match="durability"):
        open_backend(location, {"durability": "none"})


def test_a_forked_child_is_told(location):
    run(f"""
import os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from kvconnect.errors import ClosedError
from kvconnect.testing.suite.base import key, put, stored
from kvconnect_nvme import open_backend
with open_backend({location!r}, {{"capacity": "8MiB"}}) as store:
    put(store, [key(0)], [100])
    pid = os.fork()
    if not pid:
        told = 0
        asks = lambda: store.exists([key(0)], [100])
        for use in (asks, lambda: open_backend({location!r}, {{}})):
            try:
                use()
            except ClosedError as error:
                told += "spawn" in str(error)
        store.close()
        os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    put(store, [key(1)], [100])
    stored(store, [key(0), key(1)], [100] * 2)
""")


def test_the_index_grows(location, monkeypatch):
    monkeypatch.setattr(env_module, "MAP_BYTES", 128 << 10)
    with open_backend(location, {"capacity": "16MiB"}) as store:
        names = keys(3000)
        assert put(store, names, [16] * 3000).prefix == 3000
        assert store.exists(names, [16] * 3000).all()
        assert store.stats()["index_bytes"] > 128 << 10


def test_the_deadline_of_a_transfer(location, monkeypatch):
    gate = threading.Event()
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *a: gate.wait(10) and real(*a))
    store = open_backend(location, OPTIONS | {"timeout": "0.2"})
    held = filled([[4096]], keys(1))
    registration = store.register([held.region])
    transfer = store.submit(held.batch(Op.STORE, keys(1)))
    outcome = transfer.wait()
    expect(outcome, Status.TIMEOUT)
    assert not transfer.done(), "the memory is still being read"
    with pytest.raises(TimeoutError, match="leased"):
        store.close()
    gate.set()
    assert transfer.settled(10)
    store.close()
    registration.close()
    with pytest.raises(ClosedError):
        store.exists(keys(1), [4096])
    with open_backend(location, {}) as again:
        assert not again.exists(keys(1), [4096]).any()
        assert again.stats()["held_bytes"] == 0


def test_a_short_call_is_continued(store, monkeypatch):
    real_write, real_read = os.pwritev, os.preadv

    def some(call, fd, buffers, offset, *flags):
        first = buffers[0]
        return call(fd, [first[: max(len(first) // 2 // 4096, 1) * 4096]], offset, *flags)

    monkeypatch.setattr(os, "pwritev", lambda *a: some(real_write, *a))
    monkeypatch.setattr(os, "preadv", lambda *a: some(real_read, *a))
    assert put(store, keys(3), [65536, 100, 40960]).prefix == 3
    stored(store, keys(3), [65536, 100, 40960])


def test_a_read_error_costs_only_its_object(store, monkeypatch):
    names, real = keys(5), os.preadv
    put(store, names, [4096] * 5)
    with store.core.env.read() as session:
        bad = store.core.index(session).find(pack(names[2])).address

    def failing(fd, buffers, offset, *flags):
        if offset <= bad < offset + sum(map(len, buffers)):
            raise OSError(5, "bad sector")
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", failing)
    outcome, _ = get(store, names, [4096] * 5)
    expect(outcome, Status.OK, Status.OK, Status.BACKEND_ERROR, Status.OK, Status.OK)
    # A store of the same bytes is to write them again, not to find them stored already.
    monkeypatch.setattr(os, "preadv", real)
    assert store.exists(names, [4096] * 5).tolist() == [True, True, False, True, True]
    assert put(store, names, [4096] * 5).prefix == 5
    stored(store, names, [4096] * 5)


def test_evicted_while_being_read(location, monkeypatch):
    # Without checksums only the second look at the entry can tell.
    options = OPTIONS | {"checksum": "false", "io_threads": "2"}
    with open_backend(location, options) as store, open_backend(location, options) as other:
        names, real = keys(2), os.preadv
        put(store, names, [4096] * 2)

        def racing(fd, buffers, offset, *flags):
            count = real(fd, buffers, offset, *flags)
            monkeypatch.setattr(os, "preadv", real)
            other.remove(names[:1])
            return count

        monkeypatch.setattr(os, "preadv", racing)
        outcome, _ = get(store, names, [4096] * 2)
        expect(outcome, Status.ABSENT, Status.OK)
        assert outcome.dirty.tolist() == [True, False]
        assert "evicted" in outcome.causes[0]


def test_without_direct_io(location):
    with open_backend(location, OPTIONS | {"direct": "off"}) as store:
        put(store, keys(4), [2304, 4096, 1, 5000])
        stored(store, keys(4), [2304, 4096, 1, 5000])
        assert store.stats()["alignment"] == 1


def test_direct_io_degrades_with_one_warning(location, monkeypatch, caplog):
    real = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(22, "no O_DIRECT here")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with open_backend(location, OPTIONS) as store:
        put(store, keys(3), [2304] * 3)
        stored(store, keys(3), [2304] * 3)
        assert store.stats()["direct"] == "off"
    assert sum("O_DIRECT" in record.message for record in caplog.records) == 1
    with pytest.raises(UnavailableError, match="direct=auto"):
        open_backend(location, OPTIONS | {"direct": "on"})


def test_unsynced_stores_start_empty_after_another_boot(location, tmp_path):
    options = OPTIONS | {"durability": "none"}
    store = open_backend(location, options)
    put(store, keys(1), [10])
    assert (tmp_path / "store" / "unsafe").exists()
    store.close()
    assert not (tmp_path / "store" / "unsafe").exists(), "closed cleanly: synced"
    with open_backend(location, options) as store:
        stored(store, keys(1), [10])
    (tmp_path / "store" / "unsafe").write_text("another boot")
    with open_backend(location, OPTIONS) as store:
        assert store.list_keys() == []
        put(store, keys(1), [10])
        stored(store, keys(1), [10])


def test_an_engine_call_of_one_runs_inline():
    with ThreadsEngine(1) as engine:
        assert engine.each(lambda x: 2 * x, [1]) == [2]
        assert engine.each(lambda x: 2 * x, range(5)) == [0, 2, 4, 6, 8]
        with pytest.raises(ZeroDivisionError):
            engine.each(lambda x: 1 // x, [1, 0, 2])


def test_same_bytes_keep_a_pin_and_the_later_expiry(store, monkeypatch):
    held = filled([[100]], keys(1))
    with store.register([held.region]):
        move(store, held.batch(Op.STORE, keys(1), pin=True, ttl=3600))
        move(store, held.batch(Op.STORE, keys(1)))
    stats = store.stats()
    assert (stats["pinned"], stats["moved.put.same"], stats["moved.put.written"]) == (1, 1, 1)
    later = entry.now_ms() + 2 * 3_600_000
    monkeypatch.setattr(entry, "now_ms", lambda: later)
    assert store.exists(keys(1), [100]).all()
    assert np.asarray(store.remove(keys(1))).all()
    assert store.stats()["pinned"] == 0
