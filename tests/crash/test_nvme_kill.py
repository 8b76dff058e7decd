"""kill -9 of a writer at any instant: nothing acknowledged is lost, nothing visible is wrong."""

import os
import random
import signal
import subprocess
import sys
import time

from kvconnect.testing.suite.base import content, get, key
from kvconnect_nvme import open_backend

SIZES = [480, 2304, 4096, 12289]

WRITER = """
import sys
from kvconnect.testing.suite.base import key, put
from kvconnect_nvme import open_backend
location, start, sizes = sys.argv[1], int(sys.argv[2]), [int(s) for s in sys.argv[3].split(",")]
with open_backend(location, {"capacity": sys.argv[4], "io_threads": "2"}) as store:
    print("ready", flush=True)
    for batch in range(start, start + 100000, 4):
        numbers = [batch + i for i in range(4)]
        # Every third batch rewrites keys of before with other bytes: replacing must be as safe.
        version = "b" if batch % 12 == 0 else ""
        names = [key(n % 400) for n in numbers]
        out = put(store, names, [sizes[n % len(sizes)] for n in numbers], version)
        done = [f"{n}:{version}" for n, ok in zip(numbers, out.ok) if ok]
        print(" ".join(done), flush=True)
"""


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


def run_rounds(location, capacity, rounds, *, evicts):
    """Start and kill writers; return the acknowledged versions by key number."""
    rng, acknowledged, kills, start = random.Random(1), {}, 0, 0
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    options = {"capacity": str(capacity), "io_threads": "2"}
    sizes = ",".join(map(str, SIZES))
    with open_backend(location, options) as reader:
        for number in range(rounds):
            command = [sys.executable, "-c", WRITER, location, str(start), sizes, str(capacity)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as writer:
                assert writer.stdout.readline() == b"ready\n"
                end = time.monotonic() + rng.uniform(0.0, 0.12)
                while time.monotonic() < end:
                    check(reader, rng.sample(range(400), 8), {})
                writer.send_signal(signal.SIGKILL)
                lines = writer.stdout.read().decode().split("\n")[:-1]
                kills += writer.wait(10) == -signal.SIGKILL
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
    assert kills == rounds
    return acknowledged


def test_a_killed_writer_loses_nothing(tmp_path):
    # 400 keys, a quarter of them 16 KiB and the others 4 KiB on disk, are less than the low
    # watermark of 4 MiB: nothing is evicted, so every acknowledged object must be there.
    location, begin = str(tmp_path / "store"), time.monotonic()
    acknowledged = run_rounds(location, 4 << 20, 50, evicts=False)
    assert len(acknowledged) > 100
    with open_backend(location, {}) as last:
        assert last.stats()["evicted"] == 0
        report = last.verify()
        assert report.bad == 0
        assert sum(last.clear(c) for c in "0123456789abcdef") == report.objects
        assert last.stats()["free_bytes"] == 4 << 20
    assert time.monotonic() - begin < 120


def test_a_writer_killed_while_it_evicts(tmp_path):
    location = str(tmp_path / "store")
    run_rounds(location, 512 << 10, 15, evicts=True)
    with open_backend(location, {}) as last:
        assert last.stats()["evicted"] > 0
        assert last.verify().bad == 0
