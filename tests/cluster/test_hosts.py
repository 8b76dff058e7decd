"""Hosts on this machine, against what the kernel and plain sockets say."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kvconnect.errors import UnavailableError
from kvconnect.testing.cluster import sweep
from kvconnect.testing.cluster.cluster import Cluster
from tests.cluster import host_cases
from tests.cluster.host_cases import LISTEN, MIB, SMALL, connect, py

port = host_cases.port


@pytest.mark.cluster(**SMALL, local=True)
class TestLocalHosts(host_cases.HostCases):
    pass


@pytest.mark.cluster(**SMALL, local=True)
def test_a_host_is_a_host(cluster):
    boots, names = set(), set()
    for host in cluster.hosts:
        script = "cat /proc/sys/kernel/random/boot_id; hostname; ls /sys/class/net"
        boot, name, *devices = host.run(["sh", "-c", script], timeout=10).stdout.split()
        assert set(devices) == {"eth0", "lo"}
        boots.add(boot)
        names.add(name)
    assert names == {"host0", "host1", "host2"}
    assert len(boots | {Path("/proc/sys/kernel/random/boot_id").read_text().strip()}) == 4


def test_a_power_cut_keeps_what_was_synced_and_only_that():
    with Cluster.local(2, disk=64 * MIB) as cluster:
        host = cluster.host(0)
        boot = host.read("/proc/sys/kernel/random/boot_id")
        host.run(
            ["dd", "if=/dev/urandom", "of=synced", "bs=1M", "count=2", "conv=fsync"], timeout=20
        )
        synced = (host.directory / "synced").read_bytes()
        sleeper = host.spawn(["sleep", "600"], name="sleeper")
        host.run(["dd", "if=/dev/urandom", "of=unsynced", "bs=1M", "count=2"], timeout=20)
        assert (host.directory / "unsynced").stat().st_size == 2 * MIB
        host.power_cut()
        assert sleeper.wait(0) == -signal.SIGKILL
        assert (host.directory / "synced").read_bytes() == synced
        lost = host.directory / "unsynced"
        assert not lost.exists() or lost.stat().st_size < 2 * MIB
        assert host.read("/proc/sys/kernel/random/boot_id") != boot
        port = host.free_port()
        with host.spawn(py(host, LISTEN, port), name="listen", ready="ready"):
            assert connect(cluster.host(1), host, port, 3) == "open"


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def traces(ident):
    found = []
    for command in (["ip", "netns", "list"], ["ip", "link"], ["losetup", "-a"], ["ps", "axww"]):
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found += [line for line in out.splitlines() if ident in line]
    return found + [line for line in Path("/proc/mounts").read_text().splitlines() if ident in line]


def test_kill_of_the_runner_is_swept():
    code = """
        import sys, time
        from kvconnect.testing.cluster.cluster import Cluster
        cluster = Cluster.local(2, disk=32 << 20)
        cluster.host(0).spawn(["sh", "-c", "setsid sleep 987654 & sleep 987654"], name="s")
        print(cluster.directory.parent, flush=True)
        time.sleep(600)
    """
    with (
        Cluster.local(1, disk=32 * MIB) as alive,
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, env=environment()
        ) as runner,
    ):
        folder = Path(runner.stdout.readline().decode().strip())
        assert traces(folder.name)
        runner.kill()
        runner.wait(10)
        sweep.sweep()
        assert traces(folder.name) == []
        assert not folder.exists()
        assert alive.host(0).run(["true"], timeout=5).returncode == 0
        ident = alive.directory.parent.name
    assert traces(ident) == []


def test_clusters_come_and_go_beside_each_other():
    code = """
        from kvconnect.testing.cluster.cluster import Cluster
        for _ in range(6):
            with Cluster.local(3, disk=16 << 20) as cluster:
                assert cluster.host(1).run(["true"], timeout=30).returncode == 0
        print("done")
    """
    argv = [sys.executable, "-c", textwrap.dedent(code)]
    with contextlib.ExitStack() as stack:
        runners = [
            stack.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment()))
            for _ in range(3)
        ]
        said = [runner.communicate(timeout=120)[0] for runner in runners]
    assert said == [b"done\n"] * 3


def test_a_missing_tool_is_named_with_its_package(monkeypatch):
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda n, **k: None if n == "tc" else which(n, **k))
    with pytest.raises(UnavailableError, match="iproute2"):
        Cluster.local(1)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UnavailableError, match="root"):
        Cluster.local(1)


def test_closed_twice_and_quick():
    started = time.monotonic()
    cluster = Cluster.local(3, disk=32 * MIB)
    cluster.close()
    cluster.close()
    assert time.monotonic() - started < 20
