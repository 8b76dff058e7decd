"""The same hosts over ssh: a real sshd on each, reached through the network that is broken."""

import pytest

from kvconnect.testing.cluster.cluster import Cluster
from tests.cluster import host_cases
from tests.cluster.ssh_hosts import machines

port = host_cases.port


@pytest.fixture(scope="module")
def reached(tmp_path_factory):
    with (
        machines(3, tmp_path_factory.mktemp("keys"), disk=64 * host_cases.MIB) as made,
        Cluster.over_ssh(made.inventory()) as cluster,
    ):
        yield cluster


class TestSshHosts(host_cases.HostCases):
    slows_what_it_receives = False

    @pytest.fixture
    def cluster(self, reached):
        reached.reset()
        return reached
