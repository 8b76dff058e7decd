"""Masters of which one leads, found through a real etcd, for tests."""

import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from .mooncake_master import Master, Owner, free_port


def ask(address, path):
    """Return what an HTTP service says; may raise `OSError`."""
    with urllib.request.urlopen(f"http://{address}/{path}", timeout=2) as answer:
        return answer.read().decode()


class Etcd:
    """One etcd in a folder, killed at the end; `address` as kvconnect takes it."""

    def __init__(self, folder):
        folder = Path(folder)
        folder.mkdir(parents=True)
        self.port = free_port()
        self.url, peers = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{free_port()}"
        self.address = f"etcd://127.0.0.1:{self.port}"
        command = [
            "etcd", "--data-dir", str(folder / "data"),
            "--listen-client-urls", self.url, "--advertise-client-urls", self.url,
            "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers,
            "--initial-cluster", f"default={peers}",
        ]  # fmt: skip
        with (folder / "etcd.log").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + 15
        while time.monotonic() < until:
            with suppress(OSError):
                if "true" in ask(f"127.0.0.1:{self.port}", "health"):
                    return
            time.sleep(0.05)
        raise AssertionError((folder / "etcd.log").read_text()[-1000:])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()


class Candidate(Master):
    """A master that leads once etcd says so."""

    def __init__(self, folder, etcd):
        self.connection = etcd.address
        flags = (
            "--enable_ha=true", "--ha_backend_type=etcd", "--enable_oplog=true",
            f"--ha_backend_connstring={etcd.url}",
        )  # fmt: skip
        super().__init__(folder, *flags)

    def state(self):
        """Return how it stands: candidate, standby, leader_warmup, serving; "" if it is dead."""
        with suppress(OSError):
            return ask(self.admin, "ha_status")
        return ""

    def answers(self):
        # Its other port is closed while it does not lead.
        return bool(ask(self.admin, "ha_status"))

    def owner(self, mib=64):
        one = Owner(self.connection, mib)
        self.owners.append(one)
        return one
