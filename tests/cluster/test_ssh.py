"""What clusters over ssh promise beyond being hosts: no trace, one user, no harm, typed errors."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from kvconnect.errors import CapabilityError, CapacityError, ConfigError, UnavailableError
from kvconnect.testing.cluster import ssh_faults, tools
from kvconnect.testing.cluster.cluster import Cluster
from kvconnect.testing.cluster.inventory import Inventory
from kvconnect.testing.peer_suite.base import until
from tests.cluster.host_cases import MIB, ended
from tests.cluster.ssh_hosts import machines

ALONE = "a Python without packages"
RUNNER = """
    import sys, time
    from kvconnect.testing.cluster.cluster import Cluster
    from kvconnect.testing.cluster.inventory import Inventory
    cluster = Cluster.over_ssh(Inventory.read(sys.argv[1]))
    host = cluster.host(0)
    host.cut(); host.drop(5); host.shape("1mbit"); host.fill_disk(leave=8 << 20)
    stray = host.spawn(["sh", "-c", "setsid sleep 600 & echo $!; sleep 600"], name="stray")
    print(stray.receive(10), flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def beneath(tmp_path_factory):
    with machines(2, tmp_path_factory.mktemp("keys"), disk=64 * MIB) as made:
        yield made


def traces(beneath):
    """What is left on the machines, asked without ssh."""
    found = []
    for host in beneath.cluster.hosts:
        saved = host.admin(["iptables-save"]) + host.admin(["tc", "qdisc"])
        found += [line for line in saved.splitlines() if "KVCONNECT" in line or "htb" in line]
        found += [path for path in host.directory.iterdir() if path.name != "lost+found"]
        listed = host.run(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'"], timeout=10)
        found += [line for line in listed.stdout.split() if "ssh_agent" in line or line == "600"]
    return found


@pytest.fixture
def runner(beneath):
    """A runner of its own that has broken everything it can; its stray process and its agent."""
    beneath.inventory()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    argv = [sys.executable, "-c", textwrap.dedent(RUNNER), str(beneath.folder / "hosts.toml")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=env) as process:
        process.stray = int(process.stdout.readline())
        assert len(traces(beneath)) > 8
        yield process
        process.kill()
    until(lambda: not traces(beneath), 20)


def agents(beneath, index):
    host = beneath.cluster.host(index)
    found = host.run(["sh", "-c", "grep -l ssh_agent /proc/[0-9]*/cmdline"], timeout=10).stdout
    return [int(line.split("/")[2]) for line in found.split()]


def test_close_leaves_nothing(beneath):
    cluster = Cluster.over_ssh(beneath.inventory())
    cluster.host(0).spawn(["sleep", "600"], name="sleeper")
    cluster.host(0).cut()
    cluster.host(1).shape("1mbit")
    cluster.host(1).fill_disk(leave=8 * MIB)
    assert len(traces(beneath)) > 8
    scratch = cluster.directory.parent
    assert scratch.exists()
    cluster.close()
    cluster.close()
    assert traces(beneath) == []
    assert not scratch.exists()


def test_after_kill_of_the_runner_the_hosts_clean_up_by_themselves(beneath, runner):
    runner.kill()
    runner.wait(10)
    until(lambda: not traces(beneath), 15)


def test_what_a_killed_agent_leaves_is_swept_by_the_next_start(beneath, runner):
    for index in (0, 1):
        for pid in agents(beneath, index):
            beneath.cluster.host(index).run(["kill", "-9", str(pid)], timeout=5)
    runner.kill()
    runner.wait(10)
    assert traces(beneath) != []
    assert not ended(beneath.cluster.host(0), runner.stray)
    with Cluster.over_ssh(beneath.inventory()) as cluster:
        assert ended(cluster.host(0), runner.stray)
        assert cluster.host(0).run(["ls"], timeout=5).stdout == ""
    assert traces(beneath) == []


def test_a_runner_that_hangs_loses_the_hosts_after_the_lease(beneath, runner):
    runner.send_signal(signal.SIGSTOP)
    until(lambda: not traces(beneath), 20)


def test_a_host_serves_one_cluster_at_a_time(beneath, runner):
    with pytest.raises(UnavailableError, match=rf"machine0: in use by .*, process {runner.pid}"):
        Cluster.over_ssh(beneath.inventory())
    assert runner.poll() is None
    assert len(traces(beneath)) > 8


def test_the_runner_keeps_its_connection_whatever_is_cut(beneath):
    with Cluster.over_ssh(beneath.inventory()) as cluster:
        for host in cluster.hosts:
            host.cut()
            host.drop(100)
            host.shape("8kbit")
        started = time.monotonic()
        for host in cluster.hosts:
            done = host.run(["head", "-c", "400000", "/dev/zero"], timeout=20)
            assert len(done.stdout) == 400000
        assert time.monotonic() - started < 10  # at that rate it would take minutes


def test_more_processes_than_sessions_of_one_connection(beneath):
    with Cluster.over_ssh(beneath.inventory(1)) as cluster:
        host = cluster.host(0)
        cats = [host.spawn(["cat"], name=f"cat{n}") for n in range(14)]
        for number, cat in enumerate(cats):
            cat.send(str(number))
        assert [cat.receive(5) for cat in cats] == [str(n) for n in range(14)]
        host.kill()
        assert {cat.wait(5) for cat in cats} == {-signal.SIGKILL}
        pids = [cat.pid for cat in cats]
        until(lambda: all(ended(host, pid) for pid in pids), 5)


def test_faults_are_only_where_they_are_allowed(beneath):
    text = beneath.toml()
    first, second = text.rsplit("[[host]]", 1)
    path = beneath.folder / "hosts.toml"
    path.write_text(f"{first}[[host]]{second.replace('faults = true', 'faults = false')}")
    with Cluster.over_ssh(Inventory.read(path)) as cluster:
        zero, one = cluster.hosts
        for fault in (
            zero.cut, one.cut, lambda: zero.drop(1), lambda: one.shape("1mbit"), one.dropped,
            lambda: cluster.partition([[0], [1]]),
        ):  # fmt: skip
            with pytest.raises(CapabilityError, match="machine1 takes no network faults"):
                fault()
        zero.shape("1gbit")
        assert "-j DROP" not in zero.admin(["iptables-save"])
        assert "KVCONNECT" not in beneath.cluster.host(1).admin(["iptables-save"])
        cluster.reset()


def test_a_disk_is_filled_as_far_as_the_inventory_says(beneath):
    with Cluster.over_ssh(beneath.inventory(1, fill="1MiB")) as cluster:
        host = cluster.host(0)
        with pytest.raises(CapacityError, match="fill=1048576 B is the most"):
            host.fill_disk()
        room = os.statvfs(host.directory)
        assert host.fill_disk(leave=room.f_bavail * room.f_frsize - 4096) == 4096
    with (
        Cluster.over_ssh(beneath.inventory(1, fill=0)) as cluster,
        pytest.raises(CapabilityError, match="set fill"),
    ):
        cluster.host(0).fill_disk(leave=1)


def test_no_power_is_cut_and_no_rate_of_others_is_lost(beneath):
    below = beneath.cluster.host(0)
    with Cluster.over_ssh(beneath.inventory(1)) as cluster:
        with pytest.raises(CapabilityError, match="power"):
            cluster.host(0).power_cut()
        below.admin(["tc", "qdisc", "add", "dev", "eth0", "root", "handle", "7:", "bfifo"])
        with pytest.raises(CapabilityError, match="eth0 has a queueing discipline already, 7: as"):
            cluster.host(0).shape("1mbit")
        cluster.reset()
    assert "bfifo 7: dev eth0 root" in below.admin(["tc", "qdisc"])
    below.admin(["tc", "qdisc", "del", "dev", "eth0", "root"])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"python": ALONE}, "does not import kvconnect .* install kvconnect.*No module named"),
        ({"python": "/no/such/python"}, "does not run; set python= .*No such file"),
        ({"address": "10.73.0.99"}, "machine0: address=10.73.0.99 is on no interface"),
        ({"directory": "/no/such/folder"}, "machine0: /no/such/folder is no folder"),
        ({"identity": "hostkey"}, "ssh cannot reach machine0 .*Permission denied"),
        ({"known_hosts": "/dev/null"}, "ssh cannot reach machine0 .*verification failed"),
        ({"proxy_command": "false"}, "ssh cannot reach machine0"),
    ],
)
def test_what_cannot_be_is_one_typed_error(beneath, fields, words):
    if fields.get("python") == ALONE:
        alone = beneath.folder / "alone"
        alone.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
        alone.chmod(0o755)
        fields = {"python": str(alone)}
    inventory = beneath.inventory(1, **fields)
    with (
        pytest.raises((UnavailableError, ConfigError), match=f"(?s){words}"),
        Cluster.over_ssh(inventory),
    ):
        pass
    assert traces(beneath) == []


def test_another_version_is_refused(beneath, monkeypatch):
    monkeypatch.setattr("kvconnect.__version__", "9.9")
    words = r"has kvconnect 0\.\S+, the runner 9\.9"
    with pytest.raises(UnavailableError, match=words):
        Cluster.over_ssh(beneath.inventory(1))


def test_logs_are_kept_where_asked(beneath, tmp_path):
    with Cluster.over_ssh(beneath.inventory(1), directory=tmp_path) as cluster:
        assert cluster.host(0).run(["sh", "-c", "echo $TMPDIR"], timeout=5).stdout.strip()
        cluster.host(0).spawn(["sh", "-c", "echo words >&2"], name="speaker").wait(5)
    assert (tmp_path / "machine0" / "000-speaker.log").read_text() == "words\n"


def test_a_user_who_is_no_administrator_is_told(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setitem(os.environ, "PATH", "/nowhere")
    monkeypatch.setattr(tools, "_PATH", "/nowhere")
    with pytest.raises(UnavailableError, match=r"not found: ip, .*sudo"):
        ssh_faults.need()


def test_without_root_the_tools_run_by_sudo_that_must_not_ask(monkeypatch, tmp_path):
    sudo = tmp_path / "sudo"
    sudo.write_text(f'#!/bin/sh\nprintf "%s " "$@" >>{tmp_path}/asked\nshift\nexec "$@"\n')
    sudo.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(tools, "_PATH", f"{tmp_path}:{tools._PATH}")
    ssh_faults.need()
    assert (tmp_path / "asked").read_text() == "-n tc -V "
    sudo.write_text("#!/bin/sh\necho a password is required >&2\nexit 1\n")
    with pytest.raises(UnavailableError, match=r"need root, or sudo .*a password is required"):
        ssh_faults.need()
