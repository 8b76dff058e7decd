"""A real `mooncake_master` and owners of segments in processes of their own, for tests.

python mooncake_master.py ADDRESS MIB [HOST]    gives a segment to a master until its input ends
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from kvconnect.testing.frozen import freeze
from kvconnect_mooncake import library, open_backend

FLAGS = ("--client_ttl=3", "--put_start_discard_timeout_sec=3")
LEASE = 10.0
"""Seconds, as in production: a load that a busy machine makes late is a miss."""


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Master:
    """A master with fixed ports, which can be killed and started again."""

    def __init__(self, folder, *flags, lease=LEASE):
        self.port, self.admin_port = free_port(), free_port()
        self.address, self.admin = f"127.0.0.1:{self.port}", f"127.0.0.1:{self.admin_port}"
        self.folder, self.flags = Path(folder), (*FLAGS, *flags)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.owners, self.lease = [], lease
        self.start()

    def start(self):
        command = [
            str(library.master_binary()),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.port}",
            f"--metrics_port={self.admin_port}",
            f"--default_kv_lease_ttl={round(self.lease * 1000)}",
            "--logtostderr",
            *self.flags,
        ]
        with (self.folder / "master.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + 15
        while time.monotonic() < until:
            with suppress(OSError):
                if self.answers():
                    return
            time.sleep(0.02)
        raise AssertionError((self.folder / "master.log").read_text()[-1000:])

    def answers(self):
        """Tell whether it is there; may raise `OSError`."""
        socket.create_connection(("127.0.0.1", self.port), 1).close()
        return True

    def owner(self, mib=64):
        one = Owner(self.address, mib)
        self.owners.append(one)
        return one

    def segments(self):
        """Return the details of what is mounted, as the master tells over HTTP."""
        url = f"http://{self.admin}/get_segments_detail"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)["segments"]

    def stop(self):
        freeze(self.process.pid)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for owner in self.owners:
            owner.kill()
        self.kill()


class Owner:
    """A process that gives memory to the store."""

    def __init__(self, address, mib):
        self.nbytes = mib << 20
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.process = subprocess.Popen(
            [sys.executable, __file__, address, str(mib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        self.pid = self.process.pid
        line = self.process.stdout.readline()
        assert line.startswith("up "), line
        self.name = line.split()[1]

    def stop(self):
        freeze(self.pid)

    def go_on(self):
        os.kill(self.pid, signal.SIGCONT)

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def wait_for(true, seconds=15.0, what="it"):
    """Poll until `true()`; AssertionError if it takes too long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if got := true():
            return got
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen in {seconds} s")


def opened(master, **more):
    """Open a store on a master, with its lease and little patience."""
    fixed = {"admin": master.admin, "lease": str(master.lease), "space_wait": "0.3"}
    fixed["linger"] = "0"
    return open_backend(master.address, fixed | more)


def main(address, mib, host="127.0.0.1"):
    store = library.load("tcp").MooncakeDistributedStore()
    code = store.setup(host, "P2PHANDSHAKE", int(mib) << 20, 4 << 20, "tcp", "", address)
    print("up" if code == 0 else "failed", store.get_hostname() if code == 0 else code, flush=True)
    sys.stdin.read()
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
