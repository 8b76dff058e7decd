import os
import socket
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.disagg import keys as key_files
from kvconnect.disagg.cause import Cause
from kvconnect.disagg.channel import Channel
from kvconnect.disagg.messages import (
    MAX_FRAME_BYTES,
    VERSION,
    Abort,
    Envelope,
    Grant,
    Moved,
    Ping,
    Quiet,
    Ready,
    Refused,
    SideGrant,
    Taken,
    decode,
    encode,
    pack_pages,
    unpack_pages,
)
from kvconnect.errors import ClosedError, ConfigError, UnavailableError
from tests.disagg.endpoints import Cluster
from tests.disagg.fleet import Fleet, fill, u64

US, THEM = "a" * 32, "b" * 32

requests = st.text(min_size=1, max_size=40)
pages = st.lists(st.integers(0, 2**62), max_size=30).map(lambda p: pack_pages(u64(p)))
layers = st.tuples(st.integers(0, 99), st.integers(0, 99))
names = st.text(min_size=1, max_size=20)
digests = st.none() | st.binary(max_size=16)
messages = st.one_of(
    st.builds(Refused, st.text(max_size=50)),
    st.builds(
        Grant, requests, pages, st.integers(0, 2**40), st.sampled_from(["push", "pull"]),
        st.floats(1e-3, 1e4), st.booleans(),
        st.lists(st.builds(SideGrant, names, pages, st.integers(0, 2**40)), max_size=3).map(tuple),
    ),
    st.builds(Moved, requests, layers, st.integers(0, 2**60), digests, st.booleans(), names),
    st.builds(Ready, requests, layers, pages, digests, names),
    st.builds(Taken, requests, st.integers(0, 2**60)),
    st.builds(Abort, requests, st.text(max_size=50), st.sampled_from(Cause)),
    st.builds(Quiet, requests),
    st.builds(Ping, st.booleans()),
)  # fmt: skip


@given(messages)
def test_every_message_survives_the_wire(message):
    envelope = Envelope(US, THEM, message)
    assert decode(encode(envelope)) == envelope


@given(st.binary(max_size=400))
@settings(max_examples=500)
def test_garbage_is_one_typed_error(data):
    for frame in (data, bytes([VERSION]) + data):
        with pytest.raises(ConfigError):
            decode(frame)


@given(messages, st.integers(0, 10_000), st.integers(0, 255))
@settings(max_examples=500)
def test_a_changed_byte_is_an_error_or_another_valid_message(message, at, value):
    frame = bytearray(encode(Envelope(US, THEM, message)))
    frame[at % len(frame)] = value
    try:
        decoded = decode(bytes(frame))
    except ConfigError:
        return
    assert len(decoded.sender) == 32
    assert set(decoded.sender) <= set("0123456789abcdef")


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"", "of 0 B"),
        (b"\x01" + encode(Envelope(US, THEM, Quiet("r")))[1:], "version 1, this side speaks 3"),
        (encode(Envelope(US, THEM, Quiet("r"))) + b"x", "cannot be read"),
        (b"\x01" * (MAX_FRAME_BYTES + 1), f"{MAX_FRAME_BYTES + 1} B"),
    ],
)
def test_frames_that_cannot_be_say_why(frame, words):
    with pytest.raises(ConfigError, match=words):
        decode(frame)


def test_sizes_are_bounded_where_they_are_made():
    with pytest.raises(ConfigError, match="at most"):
        pack_pages(np.zeros(1 << 20, dtype=np.uint64))
    with pytest.raises(ConfigError, match="multiple of 8"):
        unpack_pages(b"1234567")
    with pytest.raises(ConfigError, match="larger than"):
        encode(Envelope(US, THEM, Refused("x" * (MAX_FRAME_BYTES + 1))))


def test_keys_are_made_once_and_read_by_their_owner_alone(tmp_path):
    keys, path = key_files.generate(), tmp_path / "keys"
    key_files.save(keys, path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert key_files.load(path) == keys
    assert keys.secret not in repr(keys)
    with pytest.raises(ConfigError, match="never overwritten"):
        key_files.save(keys, path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 0640"):
        key_files.load(path)


@pytest.mark.parametrize("data", [b"", b"{}", b'{"public": "x", "secret": "y"}', b"[1]"])
def test_files_that_hold_no_keys_are_refused(tmp_path, data):
    path = tmp_path / "keys"
    path.touch(0o600)
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"kvconnect keys|holds no key pair"):
        key_files.load(path)
    with pytest.raises(ConfigError, match="make one with"):
        key_files.load(tmp_path / "none")


@pytest.mark.parametrize(
    ("address", "fine"),
    [
        ("tcp://127.0.0.1:5", True), ("tcp://127.0.0.1:*", True), ("tcp://localhost:5", True),
        ("ipc:///tmp/x", True), ("tcp://0.0.0.0:5", False), ("tcp://10.0.0.1:5", False),
        ("tcp://host:5", False), ("tcp://*:5", False), ("udp://127.0.0.1:5", False),
        ("127.0.0.1:5", False), ("tcp://127.0.0.1", False),
    ],
)  # fmt: skip
def test_without_keys_no_network_is_reached(address, fine):
    if fine:
        key_files.check_address(address, None)
    else:
        with pytest.raises(ConfigError, match="control address"):
            key_files.check_address(address, None)
    if fine or ("://" in address and address.startswith("tcp") and address.count(":") > 1):
        key_files.check_address(address, key_files.generate())


class Ear:
    """A channel that keeps what it hears."""

    def __init__(self, keys=None):
        self.heard, self.event = [], threading.Event()
        self.channel = Channel(keys, self.hear, lambda: None)

    def hear(self, route, envelope):
        self.heard.append((route, envelope.message))
        self.event.set()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.channel.close()


def say(ear, route, message):
    ear.channel.post(lambda: ear.channel.send(route, Envelope(US, THEM, message)))


@pytest.mark.parametrize("with_keys", [False, True])
def test_two_channels_talk_both_ways(with_keys):
    keys = key_files.generate() if with_keys else None
    with Ear(keys) as server, Ear(keys) as client:
        route = client.channel.dial(server.channel.listen("tcp://127.0.0.1:*"), b"n" * 16)
        say(client, route, Quiet("there"))
        assert server.event.wait(5)
        back, message = server.heard[0]
        assert message == Quiet("there")
        say(server, back, Quiet("back"))
        assert client.event.wait(5)
        assert client.heard == [(route, Quiet("back"))]


@pytest.mark.parametrize("wrong", ["other pair", "no keys"])
def test_who_has_not_the_keys_is_not_heard(wrong):
    ours = key_files.generate()
    theirs = key_files.generate() if wrong == "other pair" else None
    with Ear(ours) as server, Ear(theirs) as stranger, Ear(ours) as friend:
        address = server.channel.listen("tcp://127.0.0.1:*")
        say(stranger, stranger.channel.dial(address, b"s" * 16), Quiet("stranger"))
        time.sleep(0.3)
        say(friend, friend.channel.dial(address, b"f" * 16), Quiet("friend"))
        assert server.event.wait(5)
        time.sleep(0.2)
        assert [message for _, message in server.heard] == [Quiet("friend")]


def test_a_client_with_the_public_key_of_the_server_alone_is_not_heard():
    ours = key_files.generate()
    other = key_files.generate()
    with Ear(ours) as server, Ear(ours) as friend:
        address = server.channel.listen("tcp://127.0.0.1:*")
        import zmq

        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.curve_serverkey = ours.public.encode()
            stranger.curve_publickey, stranger.curve_secretkey = (
                other.public.encode(),
                other.secret.encode(),
            )
            stranger.connect(address)
            stranger.send(encode(Envelope(US, THEM, Quiet("stranger"))))
            time.sleep(0.3)
            say(friend, friend.channel.dial(address, b"f" * 16), Quiet("friend"))
            assert server.event.wait(5)
            time.sleep(0.2)
        assert [message for _, message in server.heard] == [Quiet("friend")]


def test_an_address_in_use_and_a_closed_channel_are_errors():
    with Ear() as one, Ear() as two:
        address = one.channel.listen("tcp://127.0.0.1:*")
        with pytest.raises(ConfigError, match="in use"):
            two.channel.listen(address)
        two.channel.close()
        with pytest.raises(ClosedError):
            two.channel.dial(address, b"x" * 16)


def test_sockets_and_threads_go_back_to_baseline():
    def count():
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    with Ear() as warm:
        warm.channel.listen("tcp://127.0.0.1:*")
    before = count()
    for _ in range(10):
        with Ear(key_files.generate()) as ear:
            ear.channel.dial(ear.channel.listen("tcp://127.0.0.1:*"), b"x" * 16)
    deadline = time.monotonic() + 5
    while count() != before:
        assert time.monotonic() < deadline, (count(), before)
        time.sleep(0.02)


def raw(address, data):
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), 2) as connection:
        connection.settimeout(0.2)
        connection.sendall(data)
        try:
            connection.recv(1 << 16)
        except OSError:
            return


def test_garbage_on_the_wire_disturbs_nobody():
    """Raw bytes, valid ZeroMQ frames of noise, oversized frames: transfers go on beside them."""
    prefill = Fleet("page_first", 1, 4, 8, (2,), 2, (4, None))
    decode_side = Fleet("page_head", 2, 4, 8, (2,), 2, (4, None))
    seconds = float(os.environ.get("KVCONNECT_FUZZ_SECONDS", "3"))
    rng = np.random.default_rng(7)
    with Cluster(prefill, decode_side, timeout=20) as cluster:
        for side in cluster.sources:
            fill(side, u64([1, 2]), 8)
        cluster.connect()
        address = cluster.addresses[0]
        import zmq

        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.connect(address)
        good = bytearray(encode(Envelope(US, THEM, Abort("r0", "x"))))
        until, number = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            for _ in range(30):
                dealer.send(rng.bytes(int(rng.integers(0, 300))))
                dealer.send_multipart([b"", rng.bytes(8), b"x"])
                frame = good.copy()
                frame[int(rng.integers(len(frame)))] = int(rng.integers(256))
                dealer.send(bytes(frame))
            raw(address, rng.bytes(200))
            raw(address, b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f" + rng.bytes(50))
            if number % 5 == 0:
                big = context.socket(zmq.DEALER)
                big.linger = 0
                big.connect(address)
                big.send(b"\x01" * (MAX_FRAME_BYTES + 4096))
                time.sleep(0.05)
                big.close(0)
            cluster.blank()
            name = f"r{number}"
            going = [p.send(name, u64([1, 2])) for p in cluster.prefills]
            going += [d.receive(name, u64([5, 3])) for d in cluster.decodes]
            assert all(r.wait(10).ok for r in going)
            assert cluster.holds(u64([5, 3]), 8) == [True] * 2
            number += 1
        assert cluster.prefills[0].counters()["garbage"] > 30
        assert not cluster.prefills[0].counters().get("errors")
        dealer.close(0)
        context.term()


def test_without_pyzmq_the_error_names_the_package(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(UnavailableError, match=r"kvconnect\[disagg\]"):
        Channel(None, lambda *_: None, lambda: None)


def test_a_hello_that_is_no_description_is_answered_by_a_refusal():
    fleet = Fleet("page_first", 1, 4, 4, (2,), 2, (4, None))
    with Cluster(fleet, fleet) as cluster, Ear() as ear:
        hello = cluster.decodes[0].hello()
        route = ear.channel.dial(cluster.addresses[0], b"z" * 16)
        for broken in (
            msgspec.structs.replace(hello, identity=b"{}"),
            msgspec.structs.replace(hello, role="prefill"),
            msgspec.structs.replace(hello, transport="nixl"),
            msgspec.structs.replace(hello, metadata=b"?"),
            msgspec.structs.replace(hello, side=msgspec.structs.replace(hello.side, page_size=7)),
        ):
            ear.event.clear()
            say(ear, route, broken)
            assert ear.event.wait(5)
            assert isinstance(ear.heard[-1][1], Refused)
