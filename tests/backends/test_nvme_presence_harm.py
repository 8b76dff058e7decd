"""The presence table after damage, power cuts and full disks: never believed, always made anew."""

import logging
import os
import random
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvconnect import boot
from kvconnect.backend import Status
from kvconnect.testing.suite.base import content, expect, get, key, keys, put, stored
from kvconnect_nvme import builder, open_backend, presence_file
from tests.backends.presence_checks import OPTIONS, agree, files, settle, state, table, words_of


@pytest.fixture
def location(tmp_path):
    return str(tmp_path / "store")


@pytest.fixture
def small_tables(monkeypatch):
    monkeypatch.setattr(presence_file, "SMALLEST", 1)


def reboot(location, monkeypatch):
    monkeypatch.setattr(boot, "boot_id", lambda: "f" * 36)
    monkeypatch.setattr(presence_file, "boot_id", lambda: "f" * 36)


def truncate(location, _):
    os.truncate(files(location)[0], 5000)


def overwrite(location, _):
    size = files(location)[0].stat().st_size
    files(location)[0].write_bytes(random.Random(1).randbytes(size))


def unlink(location, _):
    files(location)[0].unlink()


def older_version(location, _):
    with open_backend(location, OPTIONS) as store:
        env = store.core.env
        with env._env.begin(write=True) as txn:
            txn.put(b"a record", b"by who knows no table", db=env.tables.records)
        # Nothing was written by ourselves since, so `close` has nothing to give back.


def damaged_record(location, _):
    with open_backend(location, OPTIONS) as store:
        env = store.core.env
        with env._env.begin(write=True) as txn:
            value = bytearray(txn.get(b"presence", db=env.tables.meta))
            value[12] ^= 1
            txn.put(b"presence", bytes(value), db=env.tables.meta)


def no_record(location, _):
    """As a store was made before there were tables."""
    with open_backend(location, OPTIONS) as store:
        env = store.core.env
        with env._env.begin(write=True) as txn:
            txn.delete(b"presence", db=env.tables.meta)
    unlink(location, None)


HARM = [reboot, truncate, overwrite, unlink, older_version, damaged_record, no_record]


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_table_not_to_be_believed_is_made_anew(location, monkeypatch, harm, at_once):
    names = keys(300)
    with open_backend(location, OPTIONS) as store:
        put(store, names, [100] * 300)
        store.remove(names[:20])
    harm(location, monkeypatch)
    monkeypatch.setattr(builder, "STEP", 20)
    if not at_once:
        monkeypatch.setattr(builder, "AT_ONCE", 0)
    there = dict.fromkeys(names[20:], 100)
    with open_backend(location, OPTIONS) as store:
        agree(store, names, there)
        # Changes while the scan is under way.
        store.remove(names[100:140])
        put(store, names[:10], [4096] * 10)
        there = {n: s for n, s in there.items() if n not in names[100:140]}
        there.update(dict.fromkeys(names[:10], 4096))
        agree(store, names, there)
        end = time.monotonic() + 20
        while state(store) != "complete" and time.monotonic() < end:
            agree(store, names, there)
        assert state(store) == "complete"
        agree(store, names, there)
        settle(store)
        assert table(store).count() == len(there)
        assert len(files(location)) == 1
        assert store.verify().unlisted == 0
        assert table(store).count() == len(there)
    assert not [t for t in threading.enumerate() if "presence" in t.name]


def test_an_index_that_was_put_back(location, tmp_path):
    names = keys(90)
    with open_backend(location, OPTIONS) as store:
        put(store, names[:30], [100] * 30)
    shutil.copy(Path(location, "index", "data.mdb"), tmp_path / "old.mdb")
    with open_backend(location, OPTIONS) as store:
        store.remove(names[:10])
        put(store, names[30:60], [100] * 30)
    shutil.copy(tmp_path / "old.mdb", Path(location, "index", "data.mdb"))
    with open_backend(location, OPTIONS) as store:
        agree(store, names, dict.fromkeys(names[:30], 100))
        assert state(store) == "complete"


def test_closing_stops_the_scan_and_another_goes_on(location, monkeypatch):
    names = keys(2000)
    with open_backend(location, OPTIONS | {"capacity": "16MiB"}) as store:
        put(store, names, [100] * 2000)
    unlink(location, None)
    monkeypatch.setattr(builder, "AT_ONCE", 0)
    monkeypatch.setattr(builder, "STEP", 10)
    monkeypatch.setattr(builder, "_PAUSE_SECONDS", 0.02)
    with open_backend(location, OPTIONS) as store:
        time.sleep(0.1)
        assert state(store) == "building"
        begin = time.monotonic()
    assert time.monotonic() - begin < 5
    monkeypatch.setattr(builder, "AT_ONCE", 50_000)
    with open_backend(location, OPTIONS) as store:
        assert state(store) == "complete"
        agree(store, names, dict.fromkeys(names, 100))


def test_no_room_to_grow(location, small_tables, monkeypatch, caplog):
    real, full = os.posix_fallocate, [True]

    def fallocate(fd, offset, nbytes):
        if full[0] and "presence-" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise OSError(28, "No space left on device")
        return real(fd, offset, nbytes)

    names = keys(200)
    with open_backend(location, OPTIONS) as store:
        monkeypatch.setattr(os, "posix_fallocate", fallocate)
        with caplog.at_level(logging.WARNING):
            for at in range(0, 200, 20):
                assert put(store, names[at : at + 20], [100] * 20).prefix == 20
                agree(store, names, dict.fromkeys(names[: at + 20], 100))
        assert sum("presence table" in r.message for r in caplog.records) == 1
        assert state(store) == "off"
        assert not files(location)
    with open_backend(location, OPTIONS) as store:
        assert state(store) == "off"
        agree(store, names, dict.fromkeys(names, 100))
        full[0] = False
        store.verify()
        assert state(store) == "complete"
        agree(store, names, dict.fromkeys(names, 100))


def test_lost_words_come_back(location):
    names = keys(50)
    with open_backend(location, OPTIONS) as store:
        put(store, names, [100] * 50)
        settle(store)
        for heal in (lambda: put(store, names, [100] * 50), store.verify):
            table(store).remove(words_of(store, names[:9], 100))
            assert int(store.exists(names, [100] * 50).sum()) == 41
            stored(store, names[:9], [100] * 9)
            heal()
            assert store.exists(names, [100] * 50).all()
            settle(store)
            assert store.exists(names, [100] * 50).all()


def test_words_of_nothing_go(location):
    names, never = keys(50), keys(9, "never")
    with open_backend(location, OPTIONS) as store:
        put(store, names, [100] * 50)
        settle(store)
        asks = lambda: expect(get(store, never, [100] * 9)[0], *[Status.ABSENT] * 9)
        for heal in (asks, store.verify):
            settle(store)
            assert table(store).add(words_of(store, never, 100))
            assert store.exists(never, [100] * 9).all()
            heal()
            assert not store.exists(never, [100] * 9).any()
            agree(store, names, dict.fromkeys(names, 100))


def test_flipped_bits_never_serve_other_bytes(location):
    names, rng = keys(60), random.Random(11)
    with open_backend(location, OPTIONS) as store:
        put(store, names, [100] * 60)
        settle(store)
        flat = table(store).rows.reshape(-1)
        for _ in range(10):
            used = np.flatnonzero(flat)
            for at in rng.sample(used.tolist(), 5):
                flat[at] ^= np.uint64(1 << rng.randrange(64))
            outcome, held = get(store, names, [100] * 60)
            assert outcome.prefix == 60
            assert all(held.read(i) == content(name, 100) for i, name in enumerate(names))
        store.verify()
        agree(store, [*names, key("x")], dict.fromkeys(names, 100))
        assert table(store).count() == 60
