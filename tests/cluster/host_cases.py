"""What holds for the hosts of every cluster, against what the kernel and plain sockets say."""

import signal

import pytest

from kvconnect.errors import ConfigError, TransferTimeoutError, UnavailableError
from kvconnect.testing.peer_suite.base import until

MIB = 1 << 20
SMALL = {"hosts": 3, "disk": 64 * MIB}

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

FAMILY = "setsid sleep 600 & echo $!; sleep 600 & echo $!; wait"
ROOM = """
import os
room = os.statvfs("."); print(room.f_bavail * room.f_frsize)
"""


def py(host, code, *arguments):
    return [host.python, "-I", "-S", "-u", "-c", code, *(str(a) for a in arguments)]


def connect(source, target, port, timeout=0.4):
    done = source.run(py(source, CONNECT, target.address, port, timeout), timeout=10)
    return done.stdout.strip()


@pytest.fixture
def port(cluster):
    one = cluster.host(1)
    port = one.free_port()
    one.spawn(py(one, LISTEN, port), name="listen", ready="ready")
    return port


def ended(host, pid):
    try:
        host.counts(pid)
    except UnavailableError:
        return True
    return False


class HostCases:
    """Inherited for each kind of host; the fixture `cluster` has three of them."""

    slows_what_it_receives = True

    def test_run(self, cluster):
        done = cluster.host(0).run(
            ["sh", "-c", "cat; echo e >&2; exit 3"], timeout=10, input="given"
        )
        assert (done.returncode, done.stdout, done.stderr) == (3, "given", "e\n")
        with pytest.raises(TransferTimeoutError):
            cluster.host(0).run(["sleep", "60"], timeout=0.1)
        with pytest.raises(UnavailableError, match="no-such-program"):
            cluster.host(0).run(["no-such-program"], timeout=1)

    def test_a_process_is_stopped_and_goes_on(self, cluster):
        host = cluster.host(0)
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

    def test_a_cut_is_silent_and_heals(self, cluster, port):
        zero, one, two = cluster.hosts
        assert connect(zero, one, port) == "open"
        assert connect(zero, one, port + 1) == "ConnectionRefusedError"
        with pytest.raises(ConfigError, match=r"takes hosts, as cluster.host\(1\); not 7"):
            one.cut([7])
        one.cut()
        assert {connect(zero, one, port), connect(two, one, port)} == {"silent"}
        assert one.dropped() > 0
        one.heal()
        assert connect(zero, one, port) == "open"

    def test_a_partition_parts_groups(self, cluster, port):
        zero, one, two = cluster.hosts
        cluster.partition([[0], [1, 2]])
        assert (connect(zero, one, port), connect(two, one, port)) == ("silent", "open")
        cluster.heal()
        assert connect(zero, one, port) == "open"

    def test_a_rate_holds(self, cluster, port):
        zero, one, _ = cluster.hosts
        send = py(zero, SEND, one.address, port, 10 * MIB)
        for shaped in (zero, one) if self.slows_what_it_receives else (zero,):
            shaped.shape("1mbit")
            shaped.shape("200mbit")
            seconds = float(zero.run(send, timeout=20).stdout)
            shaped.shape(None)
            assert 150e6 < 10 * MIB * 8 / seconds < 215e6
        assert 10 * MIB * 8 / float(zero.run(send, timeout=20).stdout) > 400e6

    @pytest.mark.parametrize("lossy", [0, 1], ids=["sender", "receiver"])
    def test_loss_is_counted(self, cluster, lossy):
        zero, one, _ = cluster.hosts
        port = one.free_port()
        with one.spawn(py(one, COUNT, port), name="count", ready="ready") as count:
            cluster.host(lossy).drop(20)
            assert zero.run(py(zero, DATAGRAMS, one.address, port), timeout=20).returncode == 0
            lost = one.dropped()
            cluster.host(lossy).drop(None)
            assert zero.run(py(zero, DATAGRAMS, one.address, port), timeout=20).returncode == 0
            count.send("")
            assert int(count.receive(10)) == 2 * DATAGRAMS_SENT - lost
        assert 300 < lost < 500  # of 2000: five standard deviations on either side

    def test_a_full_disk(self, cluster):
        host = cluster.host(2)
        host.fill_disk(leave=MIB)
        assert 0 <= int(host.run(py(host, ROOM), timeout=10).stdout) <= MIB
        write = ["dd", "if=/dev/zero", "of=big", "bs=1M", "count=3"]
        assert "No space left" in host.run(write, timeout=10).stderr
        host.free_disk()
        assert host.run(write, timeout=10).returncode == 0

    def test_kill_takes_those_too_who_left_their_group(self, cluster):
        host = cluster.host(0)
        parent = host.spawn(["sh", "-c", FAMILY], name="family")
        pids = [int(parent.receive(5)) for _ in range(2)]
        assert [host.counts(pid).threads for pid in pids] == [1, 1]
        host.kill()
        assert parent.wait(5) == -signal.SIGKILL
        for pid in pids:
            until(lambda pid=pid: ended(host, pid), 5)

    def test_everybody_stops_and_goes_on(self, cluster):
        host = cluster.host(1)
        with host.spawn(["cat"], name="one") as one, host.spawn(["cat"], name="two") as two:
            host.stop()
            for cat in (one, two):
                until(lambda cat=cat: "State:\tT" in host.read(f"/proc/{cat.pid}/status"), 5)
            host.go_on()
            for cat in (one, two):
                cat.send("there")
                assert cat.receive(5) == "there"

    def test_clocks_agree(self, cluster):
        reading = cluster.host(1).clock()
        assert abs(reading.offset_seconds) <= reading.error_seconds + 0.005
