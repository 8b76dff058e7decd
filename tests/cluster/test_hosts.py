"""Hosts on this machine, against what the kernel and plain sockets say."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kvconnect.errors import TransferTimeoutError, UnavailableError
from kvconnect.testing.cluster import sweep
from kvconnect.testing.cluster.cluster import Cluster
from kvconnect.testing.peer_suite.base import until

MIB = 1 << 20
PY = [sys.executable, "-I", "-S", "-u", "-c"]

CONNECT = """
import socket, sys
s = socket.socket(); s.settimeout(float(sys.argv[3]))
try: s.connect((sys.argv[1], int(sys.argv[2]))); print("open")
except TimeoutError: print("silent")
except OSError as e: print(type(e).__name__)
"""
LISTEN = """
import socket, sys
s = socket.create_server(("0.0.0.0", int(sys.argv[1]))); print("ready")
while True:
    c, _ = s.accept()
    while c.recv(1 << 20): pass
    try: c.sendall(b"k")
    except OSError: pass
    c.close()
"""
DATAGRAMS_SENT = 2000
DATAGRAMS = f"""
import socket, sys, time
s = socket.socket(type=socket.SOCK_DGRAM)
for n in range({DATAGRAMS_SENT}):
    s.sendto(b"x", (sys.argv[1], int(sys.argv[2])))
    if n % 50 == 0: time.sleep(0.001)
"""
COUNT = """
import select, socket, sys
s = socket.socket(type=socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
s.bind(("0.0.0.0", int(sys.argv[1]))); print("ready"); n = 0
while True:
    ready = select.select([s, 0], [], [])[0]
    if s in ready: s.recv(100); n += 1
    else: print(n); break
"""
SEND = """
import socket, sys, time
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
t = time.monotonic(); s.sendall(bytes(int(sys.argv[3]))); s.shutdown(1); s.recv(1)
print(time.monotonic() - t)
"""


@pytest.fixture(scope="module")
def three():
    with Cluster.local(3, disk=64 * MIB) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def port(three):
    port = three.host(1).free_port()
    with three.host(1).spawn([*PY, LISTEN, str(port)], name="listen", ready="ready"):
        yield port


def connect(source, target, port, timeout=0.4):
    done = source.run([*PY, CONNECT, target.address, str(port), str(timeout)], timeout=10)
    return done.stdout.strip()


def test_a_host_is_a_host(three):
    boots, names = set(), set()
    for host in three.hosts:
        script = "cat /proc/sys/kernel/random/boot_id; hostname; ls /sys/class/net"
        boot, name, *devices = host.run(["sh", "-c", script], timeout=10).stdout.split()
        assert set(devices) == {"eth0", "lo"}
        boots.add(boot)
        names.add(name)
    assert names == {"host0", "host1", "host2"}
    assert len(boots | {Path("/proc/sys/kernel/random/boot_id").read_text().strip()}) == 4


def test_run(three):
    done = three.host(0).run(["sh", "-c", "cat; echo e >&2; exit 3"], timeout=10, input="given")
    assert (done.returncode, done.stdout, done.stderr) == (3, "given", "e\n")
    with pytest.raises(TransferTimeoutError):
        three.host(0).run(["sleep", "60"], timeout=0.1)
    with pytest.raises(UnavailableError, match="no-such-program"):
        three.host(0).run(["no-such-program"], timeout=1)


def test_a_process_is_stopped_and_goes_on(three):
    host = three.host(0)
    with host.spawn(["cat"], name="cat") as cat:
        cat.send("one")
        assert cat.receive(5) == "one"
        cat.stop()
        until(lambda: "State:\tT" in host.read(f"/proc/{cat.pid}/status"), 5)
        cat.send("two")
        with pytest.raises(TransferTimeoutError):
            cat.receive(0.2)
        cat.go_on()
        assert cat.receive(5) == "two"
        assert host.counts(cat.pid).fds == 3
    assert cat.wait(0) == -signal.SIGKILL
    with pytest.raises(UnavailableError):
        host.counts(cat.pid)


def test_a_cut_is_silent_and_heals(three, port):
    zero, one, two = three.hosts
    assert connect(zero, one, port) == "open"
    assert connect(zero, one, port + 1) == "ConnectionRefusedError"
    one.cut()
    assert {connect(zero, one, port), connect(two, one, port)} == {"silent"}
    assert one.dropped() > 0
    one.heal()
    assert connect(zero, one, port) == "open"


def test_a_partition_parts_groups(three, port):
    zero, one, two = three.hosts
    three.partition([[0], [1, 2]])
    assert (connect(zero, one, port), connect(two, one, port)) == ("silent", "open")
    three.heal()
    assert connect(zero, one, port) == "open"


def test_a_rate_holds_both_ways(three, port):
    zero, one, _ = three.hosts
    send = [*PY, SEND, one.address, str(port), str(10 * MIB)]
    for shaped in (zero, one):
        shaped.shape("200mbit")
        seconds = float(zero.run(send, timeout=20).stdout)
        shaped.shape(None)
        assert 150e6 < 10 * MIB * 8 / seconds < 215e6
    assert 10 * MIB * 8 / float(zero.run(send, timeout=20).stdout) > 400e6


@pytest.mark.parametrize("lossy", [0, 1], ids=["sender", "receiver"])
def test_loss_is_counted(three, lossy):
    zero, one, _ = three.hosts
    port = str(one.free_port())
    with one.spawn([*PY, COUNT, port], name="count", ready="ready") as count:
        three.host(lossy).drop(20)
        assert zero.run([*PY, DATAGRAMS, one.address, port], timeout=20).returncode == 0
        lost = one.dropped()
        three.host(lossy).drop(None)
        assert zero.run([*PY, DATAGRAMS, one.address, port], timeout=20).returncode == 0
        count.send("")
        assert int(count.receive(10)) == 2 * DATAGRAMS_SENT - lost
    assert 300 < lost < 500  # of 2000: five standard deviations on either side


def test_a_full_disk(three):
    host = three.host(2)
    host.fill_disk(leave=MIB)
    room = os.statvfs(host.directory)
    assert 0 <= room.f_bavail * room.f_frsize <= MIB
    write = ["dd", "if=/dev/zero", "of=big", "bs=1M", "count=3"]
    assert "No space left" in host.run(write, timeout=10).stderr
    host.free_disk()
    assert host.run(write, timeout=10).returncode == 0


def test_clocks_agree(three):
    reading = three.host(1).clock()
    assert abs(reading.offset_seconds) <= reading.error_seconds + 0.005


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
        with host.spawn([*PY, LISTEN, str(port)], name="listen", ready="ready"):
            assert connect(cluster.host(1), host, port, 3) == "open"


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
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with (
        Cluster.local(1, disk=32 * MIB) as alive,
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, env=env
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
