"""kill -9 of a writer at any instant: nothing acknowledged is lost, nothing visible is wrong."""

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvconnect.backend import Status
from kvconnect.testing.suite.base import content, expect, get, key, keys, put
from kvconnect_nvme import env as env_module
from kvconnect_nvme import open_backend, owners
from kvconnect_nvme.env import IndexEnv
from tests.crash.writers import Writers

SIZES = [480, 2304, 4096, 12289]


def check(store, numbers, required):
    """Return how many of `numbers` are present; those in `required` must be."""
    names = [key(n % 400) for n in numbers]
    sizes = [SIZES[n % len(SIZES)] for n in numbers]
    outcome, held = get(store, names, sizes)
    seen = 0
    for i, (n, name) in enumerate(zip(numbers, names, strict=True)):
        if outcome.ok[i]:
            seen += 1
            allowed = required.get(n % 400) or {"", "b"}
            assert held.read(i) in {content(name, sizes[i], v) for v in allowed}, f"object {n}"
        else:
            assert n % 400 not in required, f"acknowledged object {n}: {outcome.causes}"
    return seen


def run_rounds(folder, capacity, rounds, *, evicts, io="threads"):
    """Start and kill writers; return the acknowledged versions by key number."""
    rng, acknowledged, start = random.Random(1), {}, 0
    location = str(folder / "store")
    options = {"capacity": str(capacity), "io_threads": "2", "io": io}
    with Writers(folder) as writers, open_backend(location, options) as reader:
        for number in range(rounds):
            writer = writers.start("batches", location, start, SIZES, capacity, io)
            writer.ready()
            # So many batches, and some way into the next: no matter how fast the machine is.
            seen = b""
            for _ in range(rng.randrange(number == 0, 12)):
                seen += writer.lines.readline()
                check(reader, rng.sample(range(400), 8), {})
            end = time.monotonic() + rng.uniform(0.0, 0.02)
            while time.monotonic() < end:
                check(reader, rng.sample(range(400), 8), {})
            lines = (seen + writer.kill()).decode().split("\n")[:-1]
            for item in " ".join(lines).split():
                n, _, version = item.partition(":")
                acknowledged[int(n) % 400] = {version}
            start += 4 * len(lines)
            # The batch under way may or may not have been published.
            unsure = {n % 400 for n in range(start, start + 8)}
            required = {n: v for n, v in acknowledged.items() if n not in unsure and not evicts}
            check(reader, sorted(acknowledged), required)
            for n in unsure & set(acknowledged):
                acknowledged[n] = {"", "b"}
            start += 8
            with open_backend(location, options) as again:
                check(again, sorted(acknowledged), required)
                stats = again.stats()
                used, free, held = (stats[f"{k}_bytes"] for k in ("used", "free", "held"))
                assert used + free + held == stats["total_bytes"] == capacity
                # Only the reader is left, and it has stored nothing.
                assert held == 0, f"round {number}: dead writers still hold {held} B"
    return acknowledged


def test_a_killed_writer_loses_nothing(tmp_path):
    # 400 keys, a quarter of them 16 KiB and the others 4 KiB on disk, are less than the low
    # watermark of 4 MiB: nothing is evicted, so every acknowledged object must be there.
    acknowledged = run_rounds(tmp_path, 4 << 20, 50, evicts=False)
    assert len(acknowledged) > 100
    with open_backend(str(tmp_path / "store"), {}) as last:
        assert last.stats()["evicted"] == 0
        report = last.verify()
        assert report.bad == 0
        assert sum(last.clear(c) for c in "0123456789abcdef") == report.objects
        assert last.stats()["free_bytes"] == 4 << 20


def test_a_killed_writer_on_nixl(tmp_path):
    pytest.importorskip("nixl_cu12")
    run_rounds(tmp_path, 4 << 20, 5, evicts=False, io="nixl-posix")


def test_a_writer_killed_while_it_evicts(tmp_path):
    run_rounds(tmp_path, 512 << 10, 15, evicts=True)
    with open_backend(str(tmp_path / "store"), {}) as last:
        assert last.stats()["evicted"] > 0
        assert last.verify().bad == 0


def test_killed_between_making_a_slab_and_noting_it(tmp_path, monkeypatch):
    # The file takes the room that is asked for; it must not count against itself.
    location = str(tmp_path / "store")
    with open_backend(location, {"capacity": "8MiB"}) as store:
        slab = Path(location, "slab-0000.dat")
        with slab.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 8 << 20)
        room = SimpleNamespace(f_bavail=(2 << 20) // 4096, f_frsize=4096)
        monkeypatch.setattr(os, "statvfs", lambda _path: room)
        expect(put(store, keys(1), [100]), Status.OK)


def test_an_owner_is_not_dead_because_no_descriptor_is_left(tmp_path, monkeypatch):
    location = str(tmp_path / "store")
    with open_backend(location, {"capacity": "8MiB"}) as store:
        put(store, keys(1), [100])
        core, real = store.core, os.open

        def full(path, *how):
            if "owners" in str(path):
                raise OSError(24, "Too many open files")
            return real(path, *how)

        monkeypatch.setattr(os, "open", full)
        assert owners.others_alive(Path(location, "owners"))
        assert owners.sweep(Path(location, "owners"), core.env, core.slabs.slab_bytes) == 0
        monkeypatch.undo()
        assert store.stats()["held_bytes"] > 0
        expect(put(store, keys(2), [100, 200]), Status.OK, Status.OK)


@pytest.mark.parametrize("checksum", ["true", "false"])
def test_a_power_cut_does_not_bring_an_evicted_object_back(tmp_path, monkeypatch, checksum):
    # durability=data may lose the newest commit. If that one evicted, the object is back, and
    # the bytes of its successor lie there, which a reader without checksums cannot tell.
    options = {"capacity": "16KiB", "high": "1", "low": "1", "checksum": checksum, "io": "threads"}
    before, after = tmp_path / "before", tmp_path / "after"
    with open_backend(str(before), options) as store:
        expect(put(store, keys(4), [4096] * 4), *[Status.OK] * 4)
        file, sync, write = before / "index" / "data.mdb", IndexEnv.sync, os.pwritev
        safe = [meta_pages(file)]

        def synced(env):
            sync(env)
            safe[0] = meta_pages(file)

        def written(*how):
            count = write(*how)
            if not after.exists():
                shutil.copytree(before, after, ignore=shutil.ignore_patterns("owners", "lock*"))
                with (after / "index" / "data.mdb").open("r+b") as lost:
                    lost.write(safe[0])
            return count

        monkeypatch.setattr(IndexEnv, "sync", synced)
        monkeypatch.setattr(os, "pwritev", written)
        expect(put(store, [key("new")], [4096]), Status.OK)
        monkeypatch.undo()
    with open_backend(str(after), options | {"checksum": "false"}) as store:
        outcome, held = get(store, keys(4), [4096] * 4)
        for i in outcome.ok.nonzero()[0].tolist():
            assert held.read(i) == content(keys(4)[i], 4096)
        assert outcome.ok.sum() == 3


READER = """
import sys, time
from kvconnect_nvme import open_backend
with open_backend(sys.argv[1], {"durability": "none"}) as store, store.core.env.read():
    print("reading", flush=True)
    time.sleep(60)
"""


def test_a_killed_reader_does_not_make_the_index_grow(tmp_path, monkeypatch):
    monkeypatch.setattr(env_module, "MAP_BYTES", 1 << 20)
    location = str(tmp_path / "store")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with open_backend(location, {"capacity": "8MiB", "durability": "none"}) as store:
        command = [sys.executable, "-c", READER, location]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as reader:
            assert reader.stdout.readline() == b"reading\n"
            reader.kill()
        for n in range(500):
            store.put_record("again", bytes([n % 256]) * 2000)
        assert store.stats()["index_file_bytes"] <= 1 << 20


def meta_pages(file):
    with file.open("rb") as index:
        return index.read(2 * 4096)
