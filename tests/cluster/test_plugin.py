"""The pytest plugin, by running pytest on small test files of a user's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvconnect.testing.cluster import tools
from tests.cluster.host_cases import MIB
from tests.cluster.ssh_hosts import machines

pytest_plugins = ["pytester"]

PLUGIN = ("-p", "kvconnect.testing.cluster.plugin", "-p", "no:cacheprovider")
SHARED = """
    import os
    import pytest

    pytestmark = pytest.mark.cluster(hosts=2, disk=32 << 20, rate="100mbit")
    seen = []

    def rate(host):
        return "htb" in host.admin(["tc", "qdisc"])

    def test_one(cluster):
        zero, one = cluster.hosts
        seen.append((cluster, zero.spawn(["sleep", "600"], name="sleeper")))
        zero.cut()
        zero.fill_disk(leave=4096)
        one.drop(50)
        zero.shape(None)
        one.run(["touch", "left"], timeout=5)

    def test_two(cluster):
        before, sleeper = seen.pop()
        assert cluster is before
        assert not sleeper.alive
        for host in cluster.hosts:
            assert "-j DROP" not in host.admin(["iptables-save"])
            assert rate(host)
            assert host.run(["ls"], timeout=5).stdout.split() in ([], ["lost+found"])

    @pytest.mark.cluster(hosts=1, disk=32 << 20)
    def test_three(cluster):
        assert len(cluster.hosts) == 1
        assert not rate(cluster.host(0))
"""
FAILS = """
    import pytest

    @pytest.mark.cluster(hosts=1, disk=32 << 20)
    def test_it(cluster):
        cluster.host(0).spawn(["sh", "-c", "echo of the old >&2"], name="old").wait(5)

    @pytest.mark.cluster(hosts=1, disk=32 << 20)
    def test_that(cluster):
        cluster.host(0).spawn(["sh", "-c", "echo last words >&2"], name="speaker").wait(5)
        assert False
"""
ANY = """
    def test_it(cluster):
        pass
"""


def test_tests_share_a_cluster_and_find_it_as_new(pytester):
    pytester.makepyfile(SHARED)
    pytester.runpytest_inprocess(*PLUGIN).assert_outcomes(passed=3)


def test_logs_of_a_failed_test_are_kept_and_named(pytester):
    pytester.makepyfile(FAILS)
    result = pytester.runpytest_inprocess(*PLUGIN)
    result.assert_outcomes(passed=1, failed=1)
    (at,) = [n for n, line in enumerate(result.outlines) if "logs of the cluster's hosts" in line]
    folder = Path(result.outlines[at + 1])
    (log,) = folder.glob("host0/*")
    assert log.name.endswith("-speaker.log")
    assert log.read_text() == "last words\n"


@pytest.mark.parametrize("ci", ["", "true"])
def test_without_root_the_reason_is_said_and_ci_fails(pytester, monkeypatch, ci):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    pytester.makepyfile(ANY)
    result = pytester.runpytest_inprocess(*PLUGIN, "-rs")
    result.assert_outcomes(**({"errors": 1} if ci else {"skipped": 1}))
    result.stdout.fnmatch_lines(["*a cluster of namespaces needs root*"])


def test_a_missing_tool_is_the_reason(pytester, monkeypatch):
    monkeypatch.setenv("CI", "")
    monkeypatch.setattr(tools, "_PATH", "/nowhere")
    pytester.makepyfile(ANY)
    result = pytester.runpytest_inprocess(*PLUGIN, "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*apt-get install*iptables*"])


@pytest.mark.parametrize("arguments", ["host=2", "3", "hosts='2'"])
def test_a_wrong_marker_is_an_error_that_says_what_is_right(pytester, arguments):
    pytester.makepyfile(
        f"""
        import pytest

        @pytest.mark.cluster({arguments})
        def test_it(cluster):
            pass
        """
    )
    result = pytester.runpytest_inprocess(*PLUGIN)
    assert result.parseoutcomes() == {"errors": 1}
    result.stdout.fnmatch_lines(["*pytest.mark.cluster: *hosts=3, disk=*"])


def test_hosts_of_an_inventory(pytester, tmp_path):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.cluster(hosts=2, rate="1gbit")
        def test_there(cluster):
            assert [host.name for host in cluster.hosts] == ["machine0", "machine1"]
            assert cluster.host(1).run(["pwd"], timeout=9).stdout.strip().endswith("cluster/data")

        @pytest.mark.cluster(hosts=1, local=True)
        def test_here(cluster):
            pass

        def test_more(cluster):
            pass
        """
    )
    with machines(2, tmp_path / "keys", disk=32 * MIB) as beneath:
        beneath.inventory()
        file = beneath.folder / "hosts.toml"
        result = pytester.runpytest_inprocess(*PLUGIN, "-rs", "--hosts", str(file))
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(
        ["*hardware: this test takes hosts of this machine*", "*hardware: *3 hosts, --hosts has 2*"]
    )


def test_nobody_gets_the_plugin_who_does_not_ask():
    code = "import sys, pytest; pytest.main(['--version']); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "kvconnect" not in done.stdout.split()
