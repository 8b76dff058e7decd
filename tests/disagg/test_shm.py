import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvconnect.disagg.shm import Metadata, ShmTransport, decode
from kvconnect.disagg.shm_move import LONG_RUN, SLICE_BYTES
from kvconnect.disagg.transport import PeerStatus, Runs, Way
from kvconnect.errors import (
    ClosedError,
    ConfigError,
    RegistrationError,
    TransferTimeoutError,
    UnavailableError,
)
from kvconnect.region import Region

ROOT = Path(__file__).parents[2]


def u64(*values):
    return np.array(values, dtype=np.uint64)


def region_of(array, name="r"):
    return Region(name, array.ctypes.data, array.nbytes)


@contextlib.contextmanager
def two(a, b):
    """Two transports of this process over the arrays `a` and `b`, the first connected."""
    with ShmTransport() as ours, ShmTransport() as theirs:
        held = [ours.register([region_of(a, "a")]), theirs.register([region_of(b, "b")])]
        with ours.connect(theirs.describe(), 1) as peer:
            yield ours, theirs, peer
        for handle in held:
            handle.close()


@contextlib.contextmanager
def process(pages=8):
    """Yield (process, metadata, address, nbytes, ask) of a rank in another process."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'backends'}"}
    command = [sys.executable, str(Path(__file__).with_name("peer_process.py")), str(pages)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as child:
        metadata, address, nbytes = child.stdout.readline().split()

        def ask(line):
            child.stdin.write(f"{line}\n")
            child.stdin.flush()
            return int(child.stdout.readline())

        try:
            yield child, bytes.fromhex(metadata), int(address), int(nbytes), ask
        finally:
            child.kill()


def fds():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("way", Way)
def test_runs_of_all_lengths_arrive_and_nothing_else_changes(way):
    rng = np.random.default_rng(1)
    a, b = (rng.integers(0, 256, 1 << 20, dtype=np.uint8) for _ in range(2))
    lengths = [1, 7, 256, 256, 4096, LONG_RUN - 1, LONG_RUN, 5 * LONG_RUN]
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])) * 2 + 3
    there = rng.permutation(len(lengths))
    far = np.concatenate(([0], np.cumsum(np.array(lengths)[there])[:-1])) * 2 + 5
    far = far[np.argsort(there)]
    want_a, want_b = a.copy(), b.copy()
    for s, f, n in zip(starts, far, lengths, strict=True):
        if way is Way.PUSH:
            want_b[f : f + n] = a[s : s + n]
        else:
            want_a[s : s + n] = b[f : f + n]
    with two(a, b) as (ours, _, peer):
        runs = Runs(
            (starts + a.ctypes.data).astype(np.uint64),
            (far + b.ctypes.data).astype(np.uint64),
            np.array(lengths, dtype=np.uint64),
        )
        transfer = ours.submit(peer, way, runs, 5)
        outcome = transfer.wait(5)
        assert outcome.status is PeerStatus.OK
        assert outcome.nbytes == sum(lengths)
        assert transfer.done()
    assert np.array_equal(a, want_a)
    assert np.array_equal(b, want_b)


def test_memory_that_was_not_registered_or_granted_is_refused_before_anything_moves():
    a, b = np.zeros(4096, np.uint8), np.ones(4096, np.uint8)
    other = np.full(4096, 9, np.uint8)
    with two(a, b) as (ours, _, peer):
        good_a, good_b = a.ctypes.data, b.ctypes.data
        for local, remote, n in (
            (other.ctypes.data, good_b, 16),
            (good_a, other.ctypes.data, 16),
            (good_a + 4090, good_b, 16),
            (good_a, good_b + 4081, 16),
        ):
            runs = Runs(u64(good_a, local), u64(good_b, remote), u64(16, n))
            with pytest.raises(
                RegistrationError, match=r"descriptor 1 .* outside every registered"
            ):
                ours.submit(peer, Way.PUSH, runs, 1)
    assert b.min() == 1
    with pytest.raises(ConfigError, match="1 local, 1 remote addresses and 2 sizes"):
        Runs(u64(1), u64(1), u64(1, 2))


def test_granted_memory_of_a_peer_is_reached_and_no_other():
    a, b = np.zeros(4096, np.uint8), np.ones(4096, np.uint8)
    other = np.full(4096, 9, np.uint8)
    with two(a, b) as (ours, theirs, peer):
        ours.reach(peer, b.ctypes.data + 16, 32)[:] = 5
        assert np.array_equal(np.flatnonzero(b == 5), np.arange(16, 48))
        for address, n in ((other.ctypes.data, 16), (b.ctypes.data + 4081, 16), (a.ctypes.data, 1)):
            with pytest.raises(RegistrationError, match="outside every registered"):
                ours.reach(peer, address, n)
        with pytest.raises(ConfigError, match="another transport"):
            ours.reach(object(), b.ctypes.data, 16)
        theirs.close()
        with pytest.raises(UnavailableError, match="closed or died"):
            ours.reach(peer, b.ctypes.data, 16)


def test_memory_of_another_process_stays_mapped_while_it_is_looked_at():
    with process() as (child, metadata, address, nbytes, ask), ShmTransport() as ours:
        with ours.connect(metadata, 5) as peer:
            seen = ours.reach(peer, address, nbytes)
            assert int(seen.astype(np.uint64).sum()) == ask("sum")
            seen[7] = 200
            assert ask("byte 7") == 200
        with pytest.raises(UnavailableError, match="closed or died"):
            ours.reach(peer, address, nbytes)
        child.kill()
        child.wait(10)
        assert seen[7] == 200
        seen[:] = 3


def test_a_batch_for_which_there_is_no_time_ends_as_timeout_and_is_quiet():
    a, b = np.ones(4096, np.uint8), np.zeros(4096, np.uint8)
    with two(a, b) as (ours, _, peer):
        transfer = ours.submit(
            peer, Way.PUSH, Runs(u64(a.ctypes.data), u64(b.ctypes.data), u64(64)), 0
        )
        assert transfer.wait(5).status is PeerStatus.TIMEOUT
        assert transfer.done()


def test_cancel_stops_between_slices_and_the_memory_stays_leased_until_then():
    size = 4 * SLICE_BYTES
    a, b = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    with two(a, b) as (ours, _, peer):
        n = size // LONG_RUN
        at = np.arange(n, dtype=np.uint64) * np.uint64(LONG_RUN)
        runs = Runs(at + np.uint64(a.ctypes.data), at + np.uint64(b.ctypes.data), at * 0 + LONG_RUN)
        transfers = [ours.submit(peer, Way.PUSH, runs, 30) for _ in range(3)]
        transfers[2].cancel()
        assert transfers[2].wait(30).status is PeerStatus.CANCELLED
        assert [t.wait(30).status for t in transfers[:2]] == [PeerStatus.OK] * 2
        assert b.min() == 1


def test_unregistering_waits_for_the_copy():
    size = 2 * SLICE_BYTES
    a, b = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    with ShmTransport() as ours, ShmTransport() as theirs:
        handle, _ = ours.register([region_of(a)]), theirs.register([region_of(b)])
        peer = ours.connect(theirs.describe(), 1)
        whole = Runs(u64(a.ctypes.data), u64(b.ctypes.data), u64(size))
        transfer = ours.submit(peer, Way.PUSH, whole, 30)
        handle.close()
        assert transfer.done()
        with pytest.raises(RegistrationError):
            ours.submit(peer, Way.PUSH, whole, 30)


def test_a_closed_transport_refuses_and_its_peers_are_gone():
    a, b = np.ones(64, np.uint8), np.zeros(64, np.uint8)
    ours, theirs = ShmTransport(), ShmTransport()
    ours.register([region_of(a)]), theirs.register([region_of(b)])
    peer = ours.connect(theirs.describe(), 1)
    metadata = theirs.describe()
    assert peer.alive()
    theirs.close()
    theirs.close()
    assert not peer.alive()
    outcome = ours.submit(
        peer, Way.PUSH, Runs(u64(a.ctypes.data), u64(b.ctypes.data), u64(64)), 1
    ).wait(5)
    assert outcome.status is PeerStatus.PEER_GONE
    assert b.max() == 0
    with pytest.raises(ClosedError):
        theirs.describe()
    with pytest.raises(UnavailableError, match="no peer of generation"):
        ours.connect(metadata, 0.5)
    ours.close()
    with pytest.raises(ClosedError):
        ours.submit(peer, Way.PUSH, Runs(u64(), u64(), u64()), 1)


@pytest.mark.parametrize(
    "metadata", [b"", b"\x80", b"x" * 5000, msgspec.msgpack.encode({"type": 1})]
)
def test_metadata_that_cannot_be_is_one_error(metadata):
    with ShmTransport() as ours, pytest.raises(ConfigError, match="cannot be read"):
        ours.connect(metadata, 1)


def test_another_process_is_written_and_read():
    before = fds()
    with process() as (_, metadata, address, nbytes, ask), ShmTransport() as ours:
        mine = np.zeros(nbytes, np.uint8)
        with ours.register([region_of(mine)]), ours.connect(metadata, 5) as peer:
            whole = Runs(u64(mine.ctypes.data), u64(address), u64(nbytes))
            assert ours.submit(peer, Way.PULL, whole, 5).wait(5).ok
            assert np.array_equal(mine, np.arange(nbytes, dtype=np.uint64) % 251)
            mine[:] = 7
            at = u64(mine.ctypes.data + 100), u64(address + 200)
            assert ours.submit(peer, Way.PUSH, Runs(*at, u64(50)), 5).wait(5).ok
            assert [ask(f"byte {i}") for i in (199, 200, 249, 250)] == [199, 7, 7, 250]
            assert ask("attached") == 1
        deadline = time.monotonic() + 5
        while ask("attached"):
            assert time.monotonic() < deadline
    assert fds() == before


def test_a_wrong_token_gets_nothing():
    with process() as (_, metadata, *_rest), ShmTransport() as ours:
        data = decode(metadata)
        forged = Metadata(data.generation, secrets.token_bytes(32), data.grants)
        with pytest.raises(UnavailableError, match=r"refused|no peer"):
            ours.connect(msgspec.msgpack.encode(forged), 3)


def test_private_memory_of_another_process_is_refused_with_the_fix():
    with process() as (_, metadata, *_rest), ShmTransport() as ours:
        data = decode(metadata)
        private = msgspec.structs.replace(data.grants[0], memory=-1)
        with pytest.raises(RegistrationError, match="shared=True"):
            ours.connect(
                msgspec.msgpack.encode(Metadata(data.generation, data.token, (private,))), 3
            )
        beyond = msgspec.structs.replace(data.grants[0], offset=1 << 30)
        with pytest.raises(RegistrationError, match="of a memory of"):
            ours.connect(
                msgspec.msgpack.encode(Metadata(data.generation, data.token, (beyond,))), 3
            )
        assert fds() < 200


def test_a_killed_peer_is_noticed_and_its_restart_is_another_peer():
    before = fds()
    for _ in range(20):
        with process() as (child, metadata, address, nbytes, _ask), ShmTransport() as ours:
            mine = np.zeros(nbytes, np.uint8)
            with ours.register([region_of(mine)]), ours.connect(metadata, 5) as peer:
                assert peer.alive()
                child.send_signal(signal.SIGKILL)
                child.wait(5)
                assert not peer.alive()
                whole = Runs(u64(mine.ctypes.data), u64(address), u64(nbytes))
                assert ours.submit(peer, Way.PUSH, whole, 5).wait(5).status is PeerStatus.PEER_GONE
                with pytest.raises(UnavailableError):
                    ours.connect(metadata, 1)
    assert fds() == before


def test_threads_share_a_transport():
    a, b = (np.zeros(1 << 20, np.uint8) for _ in range(2))
    a[:] = np.arange(len(a)) % 253
    with two(a, b) as (ours, _, peer):

        def push(number):
            size = len(a) // 8
            for step in range(0, size, 1024):
                at = number * size + step
                runs = Runs(u64(a.ctypes.data + at), u64(b.ctypes.data + at), u64(1024))
                assert ours.submit(peer, Way.PUSH, runs, 10).wait(10).ok

        threads = [threading.Thread(target=push, args=(i,)) for i in range(8)]
        [t.start() for t in threads]
        [t.join() for t in threads]
    assert np.array_equal(a, b)


def test_close_while_copying_waits_or_raises_and_can_be_repeated():
    a, b = np.ones(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
    ours, theirs = ShmTransport(), ShmTransport()
    ours.register([region_of(a)]), theirs.register([region_of(b)])
    peer = ours.connect(theirs.describe(), 1)
    transfer = ours.submit(
        peer, Way.PUSH, Runs(u64(a.ctypes.data), u64(b.ctypes.data), u64(1 << 20)), 10
    )
    with contextlib.suppress(TransferTimeoutError):
        ours.close()
    ours.close()
    assert transfer.done()
    theirs.close()
    ctypes.memset(b.ctypes.data, 0, len(b))
