"""A frozen process does nothing from the moment `freeze` returns."""

import os
import signal
import subprocess
import sys
import time

import pytest

from kvconnect.testing.frozen import freeze

COUNTING = """
import mmap, sys, threading
file = open(sys.argv[1], "r+b")
memory = mmap.mmap(file.fileno(), 4096)
def count(place):
    while True:
        memory[place] = (memory[place] + 1) % 256
threads = [threading.Thread(target=count, args=(i,)) for i in range(4)]
for thread in threads:
    thread.start()
print("up", flush=True)
"""


@pytest.fixture
def counting(tmp_path):
    """A process of four threads that write into a file; and the file."""
    path = tmp_path / "counts"
    path.write_bytes(bytes(4096))
    process = subprocess.Popen(
        [sys.executable, "-c", COUNTING, str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "up\n"
        yield process, path
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_nothing_runs_after_it(counting):
    process, path = counting
    for _ in range(10):
        freeze(process.pid)
        before = path.read_bytes()
        time.sleep(0.02)
        assert path.read_bytes() == before
        os.kill(process.pid, signal.SIGCONT)
        until = time.monotonic() + 10
        while path.read_bytes() == before:
            assert time.monotonic() < until


def test_a_process_that_has_ended(counting):
    process, _ = counting
    process.kill()
    process.wait()
    with pytest.raises(ProcessLookupError):
        freeze(process.pid)


def test_one_that_does_not_stop_in_time(counting, monkeypatch):
    process, _ = counting
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    with pytest.raises(TimeoutError, match=rf"process {process.pid} still runs 0.05 s"):
        freeze(process.pid, 0.05)
