"""Writers to be killed, forked from a process that has imported all they need.

A Python that starts takes a second, on a busy machine ten; a hundred of them are most of what a
crash test takes. The process that forks opens no store: LMDB does not survive a fork.
"""

import json
import os
import random
import signal
import subprocess
import sys
import traceback
from pathlib import Path

from kvconnect.testing.suite.base import key, put
from kvconnect_nvme import open_backend, presence_file


class Writer:
    """A process that writes lines to `lines` until it is killed."""

    def __init__(self, writers, pid, lines):
        self._writers, self.pid, self.lines = writers, pid, lines

    def ready(self):
        assert self.lines.readline() == b"ready\n"

    def kill(self):
        """Kill it; return what else it wrote."""
        os.kill(self.pid, signal.SIGKILL)
        return self.end()

    def end(self):
        """Wait until it is dead, by SIGKILL; return what else it wrote."""
        with self.lines:
            rest = self.lines.read()
        assert self._writers.ended(self.pid) == -signal.SIGKILL
        return rest


class Writers:
    """The process that forks them; `folder` takes their pipes."""

    def __init__(self, folder):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [sys.executable, "-m", __spec__.name]
        self._folder, self._count, self._alive = folder, 0, set()
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        )

    def ask(self, *words):
        self._server.stdin.write(json.dumps(words).encode() + b"\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def start(self, what, *arguments):
        """Start one of `KINDS`."""
        self._count += 1
        pipe = self._folder / f"pipe{self._count}"
        os.mkfifo(pipe)
        pid = self.ask("start", what, str(pipe), *arguments)
        self._alive.add(pid)
        return Writer(self, pid, pipe.open("rb"))

    def ended(self, pid):
        """Wait for the end of a writer; return its exit status."""
        self._alive.discard(pid)
        return self.ask("wait", pid)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in self._alive:  # a test has failed
            os.kill(pid, signal.SIGKILL)
        with self._server:
            self._server.stdin.close()
            self._server.wait(30)


def batches(location, start, sizes, capacity, io):
    """Store four keys at a time; say which are stored."""
    options = {"capacity": str(capacity), "io_threads": "2", "io": io}
    with open_backend(location, options) as store:
        print("ready", flush=True)
        for batch in range(start, start + 100000, 4):
            numbers = [batch + i for i in range(4)]
            # Every third batch rewrites keys of before with other bytes: as safe as the first.
            version = "b" if batch % 12 == 0 else ""
            names = [key(n % 400) for n in numbers]
            out = put(store, names, [sizes[n % len(sizes)] for n in numbers], version)
            done = [f"{n}:{version}" for n, ok in zip(numbers, out.ok, strict=True) if ok]
            print(" ".join(done), flush=True)


PRESENCE = {"capacity": "64MiB", "durability": "none", "io_threads": "2", "io": "threads"}


def changes(location, seed):
    """Store and remove keys while the table grows again and again; say what, and when done."""
    presence_file.SMALLEST = 1
    rng = random.Random(seed)
    with open_backend(location, PRESENCE) as store:
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


def growing(location, function, at):
    """Store keys; die at the call number `at` of a function of the table's file."""
    presence_file.SMALLEST = 1
    store = open_backend(location, PRESENCE)
    real, calls = getattr(presence_file, function), []

    def dying(*how):
        calls.append(1)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*how)

    setattr(presence_file, function, dying)
    for n in range(100):
        put(store, [key(40 * n + i) for i in range(40)], [100] * 40)
        print(40 * (n + 1), flush=True)


KINDS = {one.__name__: one for one in (batches, changes, growing)}


def serve():
    for line in sys.stdin:
        word, *rest = json.loads(line)
        if word == "wait":
            print(os.waitstatus_to_exitcode(os.waitpid(rest[0], 0)[1]), flush=True)
        elif pid := os.fork():
            print(pid, flush=True)
        else:
            run(*rest)


def run(what, pipe, *arguments):
    try:
        sys.stdout = Path(pipe).open("w")  # noqa: SIM115 - it goes with the process
        KINDS[what](*arguments)
    except Exception:  # noqa: BLE001 - what is left is to say so and to end
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    serve()
