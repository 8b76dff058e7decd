"""Hosts of a local cluster as if they were somebody's machines: an sshd on each, keys, a TOML.

The runner's connections come from the last host's address, through the network that faults break.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from kvconnect.testing.cluster.cluster import Cluster
from kvconnect.testing.cluster.inventory import Inventory

SSHD = "/usr/sbin/sshd"
RELAY = """
import os, select, socket, sys
s = socket.create_connection((sys.argv[1], 22))
while True:
    ready = select.select([0, s], [], [])[0]
    if 0 in ready:
        data = os.read(0, 65536)
        if not data: break
        s.sendall(data)
    if s in ready:
        data = s.recv(65536)
        if not data: break
        os.write(1, data)
"""


def key(path):
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, timeout=30)
    return path.with_suffix(".pub").read_text()


class Machines:
    """`cluster` is what is beneath; `inventory()` reaches its hosts by ssh."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder = cluster, folder
        (folder / "authorized").write_text(key(folder / "user"))
        public = key(folder / "hostkey")
        self.sshd = [self._serve(host, public) for host in cluster.hosts]

    def _serve(self, host, public):
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd locks itself in
        with (self.folder / "known").open("a") as known:
            known.write(f"{host.name} {public}")
        python = os.pathsep.join(p for p in sys.path if p)
        config = self.folder / f"sshd{host.index}"
        config.write_text(
            f"ListenAddress {host.address}\nHostKey {self.folder}/hostkey\nUsePAM no\n"
            f"AuthorizedKeysFile {self.folder}/authorized\nStrictModes no\n"
            f"PermitRootLogin prohibit-password\nPasswordAuthentication no\nPidFile none\n"
            f"SetEnv PYTHONPATH={python}\n"
        )
        sshd = host.spawn([SSHD, "-D", "-e", "-f", str(config)], name="sshd")
        host.await_port(22, 10, sshd)
        return sshd

    def namespace(self, index):
        return f"kvc-{self.cluster.directory.parent.name}-{index}"

    def toml(self, count=None, **fields):
        """The text of an inventory of the first `count` hosts, or all."""
        through = self.namespace(len(self.cluster.hosts) - 1)
        relay = self.folder / "relay.py"
        relay.write_text(RELAY)
        text = "[options]\nlease = 5.0\n"
        for host in self.cluster.hosts[:count]:
            entry = {
                "name": f"machine{host.index}", "ssh": f"root@{host.name}",
                "address": host.address, "directory": str(host.directory),
                "python": sys.executable, "identity": "user", "known_hosts": "known",
                "faults": True, "fill": "1GiB",
                "proxy_command":
                    f"ip netns exec {through} {sys.executable} -ISu {relay} {host.address}",
            }  # fmt: skip
            rows = [
                f"{k} = {str(v).lower() if isinstance(v, bool) else repr(v)}"
                for k, v in {**entry, **fields}.items()
            ]
            text += "\n".join(["[[host]]", *rows, ""])
        return text

    def inventory(self, count=None, **fields):
        path = self.folder / "hosts.toml"
        path.write_text(self.toml(count, **fields))
        return Inventory.read(path)


@contextlib.contextmanager
def machines(hosts, folder, **settings):
    """A local cluster with an sshd on every host."""
    with Cluster.local(hosts, **settings) as cluster:
        folder.mkdir(exist_ok=True)
        try:
            yield Machines(cluster, folder)
        finally:
            shutil.rmtree(folder)
