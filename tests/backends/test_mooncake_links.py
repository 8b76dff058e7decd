"""Mooncake on three hosts whose links are cut: user, owner of the memory, master.

Packets vanish unannounced, unlike those of a process that was killed or stopped: no kernel
answers any more.
"""

import json
import sys
import time
from pathlib import Path

import pytest

from kvconnect_mooncake import library

from . import mooncake_master, mooncake_worker
from .mooncake_master import FLAGS, LEASE, wait_for

pytestmark = pytest.mark.cluster(hosts=3, disk=16 << 20, local=True)

COUNT = 8
DEADLINE = 1.0


class Hosts:
    """A user of a store on host 0, its memory on host 1, its master on host 2."""

    def __init__(self, cluster):
        self.user_host, self.owner_host, self.master_host = cluster.hosts
        port, admin = self.master_host.free_port(), self.master_host.free_port()
        address = f"{self.master_host.address}:{port}"
        command = [
            str(library.master_binary()), f"--rpc_address={self.master_host.address}",
            f"--rpc_port={port}", f"--metrics_port={admin}", "--logtostderr",
            f"--default_kv_lease_ttl={round(LEASE * 1000)}", *FLAGS,
        ]  # fmt: skip
        master = self.master_host.spawn(command, name="master")
        self.master_host.await_port(port, 15, master)
        script = str(Path(mooncake_master.__file__))
        self.owner_host.spawn(
            [sys.executable, script, address, "64", self.owner_host.address],
            name="owner", ready="up ",
        )  # fmt: skip
        options = {
            "lease": str(LEASE), "breaker": "2", "rpc_timeout": "3", "space_wait": "0.3",
            "admin": f"{self.master_host.address}:{admin}",
        }  # fmt: skip
        script = str(Path(mooncake_worker.__file__))
        self.user = self.user_host.spawn(
            [sys.executable, script, address, json.dumps(options)], name="user", ready="ready"
        )

    def ask(self, *command, timeout=30):
        self.user.send(" ".join(map(str, command)))
        answer = json.loads(self.user.receive(timeout))
        assert not answer.get("wrong"), "OK with other bytes than were stored last"
        return answer

    def settled(self, version):
        """Wait until objects are stored and load again, and no transfer holds memory."""
        wait_for(lambda: self.ask("put", COUNT, version)["ok"] == COUNT, 40, "stores")
        wait_for(lambda: self.ask("get", COUNT, 5, version)["ok"] == COUNT, 20, "loads")
        wait_for(lambda: self.ask("quiet")["held"] == 0, 60, "quiet")


@pytest.fixture
def hosts(cluster):
    return Hosts(cluster)


def test_the_owner_is_cut_off(hosts):
    hosts.settled(0)
    hosts.owner_host.cut()
    got = hosts.ask("get", COUNT, DEADLINE, 0)
    assert got["said"] == {"TIMEOUT": COUNT}
    assert got["seconds"] < DEADLINE + 1
    assert hosts.ask("quiet")["held"] == 1, "its memory is still the library's"
    wait_for(lambda: hosts.ask("quiet")["breakers"] != "none", 20, "the breaker")
    for _ in range(5):
        assert hosts.ask("exists", COUNT)["seconds"] < 1, "the master answers"
        quick = hosts.ask("get", COUNT, 5, 0)
        assert (quick["ok"], quick["seconds"] < 1) == (0, True), "what is cut off is skipped"
    hosts.owner_host.heal()
    begin = time.monotonic()
    hosts.settled(1)
    print(f"after the owner's link: {time.monotonic() - begin:.1f} s")


def test_the_master_is_cut_off(hosts):
    hosts.settled(2)
    hosts.master_host.cut()
    first = hosts.ask("exists", COUNT)
    assert first["error"] == "UnavailableError"
    assert first["seconds"] < 5, "rpc_timeout and a little"
    begin = time.monotonic()
    for _ in range(3):
        assert hosts.ask("exists", COUNT)["error"] == "UnavailableError"
        assert hosts.ask("get", COUNT, 5, 2)["ok"] == 0
        assert hosts.ask("put", COUNT, 3)["ok"] == 0
    assert time.monotonic() - begin < 2, "later calls fail fast"
    hosts.master_host.heal()
    begin = time.monotonic()
    hosts.settled(3)
    assert hosts.ask("exists", COUNT)["there"] == COUNT
    print(f"after the master's link: {time.monotonic() - begin:.1f} s")
