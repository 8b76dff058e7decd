"""kill -9 of writers while the presence table changes and grows: `exists` stays right both ways."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from kvconnect.testing.suite.base import key
from kvconnect_nvme import open_backend, presence_file
from kvconnect_nvme.presence import Presence

OPTIONS = {"capacity": "64MiB", "durability": "none", "io_threads": "2"}
ALL = 4000

WRITER = """
import random, sys
from kvconnect.testing.suite.base import key, put
from kvconnect_nvme import open_backend, presence_file
presence_file.SMALLEST = 1  # so that it grows again and again
rng = random.Random(int(sys.argv[2]))
options = {"capacity": "64MiB", "durability": "none", "io_threads": "2"}
with open_backend(sys.argv[1], options) as store:
    print("ready", flush=True)
    while True:
        numbers = rng.sample(range(4000), rng.randint(1, 60))
        names = [key(n) for n in numbers]
        if rng.random() < 0.4:
            print("remove", *numbers, flush=True)
            store.remove(names)
        else:
            print("put", *numbers, flush=True)
            assert put(store, names, [100] * len(names)).prefix == len(names)
        print("done", flush=True)
"""


def replay(lines, there):
    """Apply what was acknowledged; return the numbers of the change under way."""
    unsure = set()
    for line in lines:
        what, *rest = line.split()
        if what == "done":
            unsure = set()
            continue
        unsure = set(map(int, rest))
        if what == "put":
            there |= unsure
        else:
            there -= unsure
    return unsure


def both_ways(store, monkeypatch):
    """Ask with and without the table; return what both say."""
    names = [key(n) for n in range(ALL)]
    with store.core.env.read() as session:
        assert store.core.env.presence.view(session) is not None
    found = store.exists(names, [100] * ALL)
    with monkeypatch.context() as patch:
        patch.setattr(Presence, "view", lambda *_: None)
        assert (store.exists(names, [100] * ALL) == found).all()
    return set(np.flatnonzero(found).tolist())


def test_killed_while_it_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(presence_file, "SMALLEST", 1)
    location, there, rng = str(tmp_path / "store"), set(), random.Random(4)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with open_backend(location, OPTIONS) as reader:
        for number in range(30):
            if number % 10 == 9:
                # The next table begins small again: growing is what is to be killed.
                for file in Path(location, "index").glob("presence-*"):
                    file.unlink()
            command = [sys.executable, "-c", WRITER, location, str(number)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as writer:
                assert writer.stdout.readline() == b"ready\n"
                end = time.monotonic() + rng.uniform(0, 0.15)
                while time.monotonic() < end:
                    reader.exists([key(n) for n in range(50)], [100] * 50)
                writer.send_signal(signal.SIGKILL)
                lines = writer.stdout.read().decode().splitlines()
                assert writer.wait(10) == -signal.SIGKILL
            unsure = replay(lines, there)
            for _ in range(2):
                present = both_ways(reader, monkeypatch)
                assert present - unsure == there - unsure, f"round {number}"
                # Another writer applies what the dead one had left.
                reader.put_record("round", str(number).encode())
            there = present
        assert len(there) > 500
    with open_backend(location, OPTIONS) as last:
        assert both_ways(last, monkeypatch) == there
        assert last.verify().unlisted == 0
        with last.core.env.read() as session:
            assert last.core.env.presence.view(session).file.table.count() == len(there)
        assert len(list(Path(location, "index").glob("presence-*"))) == 1


FORKER = """
import os, sys
from kvconnect.testing.suite.base import key, put
from kvconnect_nvme import open_backend, presence_file
presence_file.SMALLEST = 1
store = open_backend(sys.argv[1], {"capacity": "64MiB", "durability": "none"})
real, calls = getattr(presence_file, sys.argv[2]), []
def dying(*how):
    calls.append(1)
    if len(calls) == int(sys.argv[3]):
        os.kill(os.getpid(), 9)
    return real(*how)
setattr(presence_file, sys.argv[2], dying)
for n in range(100):
    put(store, [key(40 * n + i) for i in range(40)], [100] * 40)
    print(40 * (n + 1), flush=True)
"""


def test_killed_in_the_midst_of_growing(tmp_path, monkeypatch):
    # In the middle of copying the words, in turn at each of the first writes.
    monkeypatch.setattr(presence_file, "SMALLEST", 1)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    for at in range(1, 9):
        location = str(tmp_path / f"store{at}")
        command = [sys.executable, "-c", FORKER, location, "_write", str(at)]
        done = subprocess.run(command, env=env, capture_output=True, check=False, timeout=60)
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-800:]
        count = int(done.stdout.split()[-1]) if done.stdout.split() else 0
        with open_backend(location, OPTIONS) as store:
            present = both_ways(store, monkeypatch)
            assert present >= set(range(count))
            assert present <= set(range(count + 40))
            assert len(list(Path(location, "index").glob("presence-*"))) == 1
