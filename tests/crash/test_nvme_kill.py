"""kill -9 of a writer at any instant: nothing acknowledged is lost, nothing visible is wrong."""

import os
import random
import signal
import subprocess
import sys
import time

from kvconnect.testing.suite.base import content, get, key
from kvconnect_nvme import open_backend

OPTIONS = {"capacity": "4MiB", "io_threads": "2"}
ROUNDS = 50
SIZES = [480, 2304, 4096, 12289]

WRITER = """
import sys
from kvconnect.testing.suite.base import key, put
from kvconnect_nvme import open_backend
location, start, sizes = sys.argv[1], int(sys.argv[2]), [int(s) for s in sys.argv[3].split(",")]
with open_backend(location, {"capacity": "4MiB", "io_threads": "2"}) as store:
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


def test_a_killed_writer_loses_nothing(tmp_path):
    # 400 keys of at most 16 KiB rounded fill less than the low watermark of 4 MiB: nothing is
    # evicted, so that every acknowledged object must be there. 4 sizes: 4, 4, 4 and 16 KiB.
    location, rng, acknowledged = str(tmp_path / "store"), random.Random(1), {}
    path = os.pathsep.join(p for p in sys.path if p)
    options = OPTIONS | {"capacity": "4MiB"}
    begin, kills, start = time.monotonic(), 0, 0
    with open_backend(location, options) as reader:
        for number in range(ROUNDS):
            writer = subprocess.Popen(
                [sys.executable, "-c", WRITER, location, str(start), ",".join(map(str, SIZES))],
                stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip
            assert writer.stdout.readline() == b"ready\n"
            end = time.monotonic() + rng.uniform(0.0, 0.12)
            while time.monotonic() < end:
                check(reader, rng.sample(range(400), 8), {})
            writer.send_signal(signal.SIGKILL)
            kills += writer.wait(10) == -signal.SIGKILL
            lines = writer.stdout.read().decode().split("\n")[:-1]
            writer.stdout.close()
            batches = [line.split() for line in lines]
            for batch in batches:
                for item in batch:
                    n, _, version = item.partition(":")
                    acknowledged[int(n) % 400] = {version}
            start += 4 * len(batches)
            # The batch under way may or may not have been published.
            unsure = {n % 400 for n in range(start, start + 8)}
            required = {n: v for n, v in acknowledged.items() if n not in unsure}
            check(reader, sorted(acknowledged), required)
            for n in unsure & set(acknowledged):
                acknowledged[n] = {"", "b"}
            start += 8
            with open_backend(location, options) as again:
                check(again, sorted(acknowledged), required)
                stats = again.stats()
                used, free, held = (stats[f"{k}_bytes"] for k in ("used", "free", "held"))
                assert used + free + held == stats["total_bytes"] == 4 << 20
                assert held == 0, f"round {number}: dead writers still hold {held} B"
    assert kills == ROUNDS
    assert len(acknowledged) > 100
    with open_backend(location, options) as last:
        report = last.verify()
        assert report.bad == 0
        assert last.clear("0") + sum(last.clear(c) for c in "123456789abcdef") == report.objects
        assert last.stats()["free_bytes"] == 4 << 20
    assert time.monotonic() - begin < 120
