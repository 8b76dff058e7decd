"""kill -9 of writers while the presence table changes and grows: `exists` stays right both ways."""

import random
import time
from pathlib import Path

import numpy as np

from kvconnect.testing.suite.base import key
from kvconnect_nvme import open_backend, presence_file
from kvconnect_nvme.presence import Presence
from tests.crash.writers import PRESENCE, Writers

ALL = 4000


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
    with Writers(tmp_path) as writers, open_backend(location, PRESENCE) as reader:
        for number in range(30):
            if number % 10 == 9:
                # The next table begins small again: growing is what is to be killed.
                for file in Path(location, "index").glob("presence-*"):
                    file.unlink()
            writer = writers.start("changes", location, number)
            writer.ready()
            # So many changes, and some way into the next: no matter how fast the machine is.
            seen = b""
            for _ in range(2 * rng.randrange(24)):
                seen += writer.lines.readline()
                reader.exists([key(n) for n in range(50)], [100] * 50)
            end = time.monotonic() + rng.uniform(0.0, 0.02)
            while time.monotonic() < end:
                reader.exists([key(n) for n in range(50)], [100] * 50)
            unsure = replay((seen + writer.kill()).decode().splitlines(), there)
            for _ in range(2):
                present = both_ways(reader, monkeypatch)
                assert present - unsure == there - unsure, f"round {number}"
                # Another writer applies what the dead one had left.
                reader.put_record("round", str(number).encode())
            there = present
        assert len(there) > 500
    with open_backend(location, PRESENCE) as last:
        assert both_ways(last, monkeypatch) == there
        assert last.verify().unlisted == 0
        with last.core.env.read() as session:
            assert last.core.env.presence.view(session).file.table.count() == len(there)
        assert len(list(Path(location, "index").glob("presence-*"))) == 1


def test_killed_in_the_midst_of_growing(tmp_path, monkeypatch):
    # In the middle of copying the words, in turn at each of the first writes.
    monkeypatch.setattr(presence_file, "SMALLEST", 1)
    with Writers(tmp_path) as writers:
        for at in range(1, 9):
            location = str(tmp_path / f"store{at}")
            said = writers.start("growing", location, "_write", at).end().split()
            count = int(said[-1]) if said else 0
            with open_backend(location, PRESENCE) as store:
                present = both_ways(store, monkeypatch)
                assert present >= set(range(count))
                assert present <= set(range(count + 40))
                assert len(list(Path(location, "index").glob("presence-*"))) == 1
