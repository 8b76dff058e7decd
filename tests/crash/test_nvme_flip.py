"""One flipped byte, anywhere in payload or index: a miss or an error, never other bytes."""

import os
import random
import shutil
import subprocess
import sys

import pytest

from kvconnect.backend import Status
from kvconnect.errors import CorruptionError
from kvconnect.testing.suite.base import content, get, key, put
from kvconnect_nvme import open_backend
from kvconnect_nvme.keys import pack

OPTIONS = {"capacity": "1MiB"}
COUNT = 40

READER = """
import sys
from kvconnect.errors import KVConnectError
from kvconnect.testing.suite.base import content, get, key
from kvconnect_nvme import open_backend
try:
    store = open_backend(sys.argv[1], {"capacity": "1MiB"})
    names = [key(n) for n in range(40)]
    outcome, held = get(store, names, [2304] * 40)
    for i, name in enumerate(names):
        if outcome.ok[i] and held.read(i) != content(name, 2304):
            sys.exit(3)
    store.close()
except KVConnectError:
    sys.exit(0)
"""


def fill(location):
    with open_backend(location, OPTIONS) as store:
        names = [key(n) for n in range(COUNT)]
        assert put(store, names, [2304] * COUNT).prefix == COUNT
    return names


def test_a_flipped_payload_byte_is_a_miss(tmp_path):
    location, rng = str(tmp_path / "store"), random.Random(3)
    names = fill(location)
    slab = tmp_path / "store" / "slab-0000.dat"
    for _ in range(20):
        data = slab.read_bytes()
        victim = rng.randrange(COUNT)
        at = data.index(content(names[victim], 2304)) + rng.randrange(2304)
        with slab.open("r+b") as file:
            file.seek(at)
            file.write(bytes([data[at] ^ (1 << rng.randrange(8))]))
        with open_backend(location, OPTIONS) as store:
            outcome, _ = get(store, names, [2304] * COUNT)
            assert [i for i in range(COUNT) if not outcome.ok[i]] == [victim]
            assert not store.exists([names[victim]], [2304]).any()
            assert put(store, names, [2304] * COUNT).prefix == COUNT
            assert get(store, names, [2304] * COUNT)[0].prefix == COUNT


def test_a_flipped_index_byte_never_serves_other_bytes(tmp_path):
    # In processes of their own: LMDB has no page checksums, and a damaged page pointer may
    # well end the process. Whatever happens, no load may return other bytes as a hit.
    location, rng, codes = str(tmp_path / "store"), random.Random(5), []
    fill(location)
    clean = shutil.copytree(location, tmp_path / "clean")
    size = (clean / "index" / "data.mdb").stat().st_size
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    places = [rng.randrange(size) for _ in range(24)]
    for start in range(0, len(places), 4):
        running = []
        for at in places[start : start + 4]:
            damaged = tmp_path / f"damaged{at}"
            shutil.copytree(clean, damaged)
            with (damaged / "index" / "data.mdb").open("r+b") as file:
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ (1 << rng.randrange(8))]))
            command = [sys.executable, "-c", READER, str(damaged)]
            running.append((at, subprocess.Popen(command, env=env, stderr=subprocess.PIPE)))
        for at, process in running:
            _, errors = process.communicate(timeout=60)
            codes.append(process.returncode)
            assert process.returncode != 3, f"byte {at} of the index: other bytes were served"
            assert process.returncode <= 0, f"byte {at}: {errors.decode()[-600:]}"
    crashed = sum(code < 0 for code in codes)
    assert crashed <= len(codes) // 4, f"{crashed} of {len(codes)} readers were killed"


def test_damage_in_an_entry_is_noticed(tmp_path):
    location = str(tmp_path / "store")
    names = fill(location)
    with open_backend(location, OPTIONS) as store:

        def damage(session):
            entries = session.tables.entries
            for n in (3, 5):
                value = bytearray(session.get(pack(names[n]), entries))
                value[1] ^= 0x10  # the address: now another object's
                session.txn.put(pack(names[n]), bytes(value), db=entries)
            one, two = (session.get(pack(names[n]), entries) for n in (7, 8))
            session.txn.put(pack(names[7]), two, db=entries)
            session.txn.put(pack(names[8]), one, db=entries)

        store.core.env.write(damage)
        outcome, _ = get(store, names, [2304] * COUNT)
        bad = {3: Status.CHECKSUM, 5: Status.CHECKSUM, 7: Status.IDENTITY, 8: Status.IDENTITY}
        assert outcome.status.tolist() == [bad.get(n, Status.OK) for n in range(COUNT)]
        # Where they lay was not known for sure, so their space is still set aside.
        assert store.stats()["used_bytes"] == 4096 * COUNT
        assert store.verify().recovered == 4 * 4096
        stats = store.stats()
        assert stats["used_bytes"] == 4096 * stats["objects"] == 4096 * (COUNT - 4)
        assert stats["total_bytes"] == 1 << 20
        assert put(store, names, [2304] * COUNT).prefix == COUNT


def test_damaged_counters_are_an_error_that_says_what_to_do(tmp_path):
    location = str(tmp_path / "store")
    fill(location)
    store = open_backend(location, OPTIONS)
    env = store.core.env
    with env._env.begin(write=True) as txn:
        value = bytearray(txn.get(b"counters", db=env.tables.meta))
        value[3] ^= 1
        txn.put(b"counters", bytes(value), db=env.tables.meta)
    with pytest.raises(CorruptionError, match="remove its index"):
        store.exists([key(0)], [2304])
    store.close()
    with pytest.raises(CorruptionError, match="remove its index"):
        open_backend(location, OPTIONS)
    shutil.rmtree(tmp_path / "store" / "index")
    with open_backend(location, OPTIONS) as store:
        assert store.list_keys() == []
        assert put(store, [key(0)], [2304]).prefix == 1
