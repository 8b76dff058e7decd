"""Objects in the bucket that are not what was stored, strangers beside them, and large listings."""

import os
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash

import kvconnect
from kvconnect.backend import Op, Status
from kvconnect.errors import ConfigError, CorruptionError
from kvconnect.testing.memory import Objects
from kvconnect.testing.suite.base import content, expect, filled, get, key, keys, move, put, stored
from kvconnect_nixl.s3 import open_backend
from kvconnect_nixl.s3.seal import NBYTES as TRAILER
from tests.backends.s3_server import S3Server, client

SIZE = 2304


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = S3Server(tmp_path_factory.mktemp("moto"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def bucket(server):
    return server.bucket()


@pytest.fixture
def prefix():
    return f"p{uuid.uuid4().hex[:8]}/fleet"


@pytest.fixture
def store(server, bucket, prefix):
    with open_backend(f"{bucket}/{prefix}", server.options()) as store:
        yield store


@pytest.fixture
def behind(server, bucket, prefix):
    """The bucket as another tool sees it."""
    return Behind(server.client, bucket, prefix)


class Behind:
    def __init__(self, s3, bucket, prefix):
        self.s3, self.bucket, self.prefix = s3, bucket, prefix

    def name(self, name):
        return f"{self.prefix}/objects/{name[:16]}/{name[16:]}"

    def read(self, name):
        return self.s3.get_object(Bucket=self.bucket, Key=self.name(name))["Body"].read()

    def write(self, name, data):
        self.s3.put_object(Bucket=self.bucket, Key=self.name(name), Body=data)


def test_an_object_is_its_payload_and_a_trailer(store, behind):
    name = key("layout")
    put(store, [name], [SIZE])
    data = behind.read(name)
    payload, trailer = data[:SIZE], data[SIZE:]
    assert payload == content(name, SIZE)
    seed = xxhash.xxh3_64_intdigest(bytes.fromhex(name))
    assert len(trailer) == TRAILER == 72
    assert trailer[:8] == b"kvc-s3\x00\x01"
    assert int.from_bytes(trailer[8:16], "little") == SIZE
    assert int.from_bytes(trailer[16:24], "little") == 0
    assert int.from_bytes(trailer[24:32], "little") == xxhash.xxh3_64_intdigest(payload, seed)
    assert trailer[32:64] == bytes.fromhex(name)
    assert int.from_bytes(trailer[64:], "little") == xxhash.xxh3_64_intdigest(trailer[:64])


DAMAGE = {
    "gone": (lambda data, other: None, Status.ABSENT),
    "empty": (lambda data, other: b"", Status.SIZE_MISMATCH),
    "one byte": (lambda data, other: b"x", Status.SIZE_MISMATCH),
    "payload alone": (lambda data, other: data[:SIZE], Status.SIZE_MISMATCH),
    "a byte short": (lambda data, other: data[:-1], Status.SIZE_MISMATCH),
    "a byte long": (lambda data, other: data + b"\0", Status.SIZE_MISMATCH),
    "much longer": (lambda data, other: data + bytes(4096), Status.SIZE_MISMATCH),
    "twice": (lambda data, other: data + data, Status.SIZE_MISMATCH),
    "first byte": (lambda data, other: flip(data, 0), Status.CHECKSUM),
    "last byte": (lambda data, other: flip(data, SIZE - 1), Status.CHECKSUM),
    "stored checksum": (lambda data, other: flip(data, SIZE + 24), Status.CHECKSUM),
    "stored key": (lambda data, other: flip(data, SIZE + 40), Status.CHECKSUM),
    "stored length": (lambda data, other: flip(data, SIZE + 8), Status.CHECKSUM),
    "another's object": (lambda data, other: other, Status.IDENTITY),
    "another's trailer": (lambda data, other: data[:SIZE] + other[SIZE:], Status.IDENTITY),
    "a stranger's": (lambda data, other: b"\x11" * len(data), Status.IDENTITY),
}


def flip(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_was_not_stored_is_a_miss_with_its_reason(store, behind, kind):
    change, status = DAMAGE[kind]
    names, sizes = keys(3), [SIZE] * 3
    put(store, names, sizes)
    stored(store, names, sizes)  # the buffers now hold right bytes of all three
    damaged = change(behind.read(names[1]), behind.read(names[2]))
    if damaged is None:
        behind.s3.delete_object(Bucket=behind.bucket, Key=behind.name(names[1]))
    else:
        behind.write(names[1], damaged)
    for _ in range(2):
        outcome, held = get(store, names, sizes)
        expect(outcome, Status.OK, status, Status.OK)
        assert not outcome.dirty.any()
        assert held.untouched(1), "unproved bytes reached the caller's memory"
    seen = store.exists(names, sizes).tolist()
    # The payload is not read by exists; all else it can tell.
    assert seen == [True, kind in {"first byte", "last byte"}, True]
    put(store, names, sizes)
    stored(store, names, sizes)


def test_two_objects_swapped(store, behind):
    names = keys(2)
    put(store, names, [SIZE, 4096])
    first, second = (behind.read(name) for name in names)
    behind.write(names[0], second)
    behind.write(names[1], first)
    outcome, held = get(store, names, [SIZE, 4096])
    expect(outcome, Status.IDENTITY, Status.IDENTITY)
    assert held.buffer.canaries().all()
    assert not store.exists(names, [SIZE, 4096]).any()


def test_a_stale_buffer_is_never_a_hit(store, behind):
    # The same key through the same slot: first whole, then cut where only the slot has the rest.
    name = key("stale")
    put(store, [name], [SIZE])
    whole = behind.read(name)
    for cut in (0, 1, 100, SIZE - 1, SIZE, SIZE + 8, SIZE + TRAILER - 1):
        stored(store, [name], [SIZE])
        behind.write(name, whole[:cut])
        outcome, held = get(store, [name], [SIZE])
        expect(outcome, Status.SIZE_MISMATCH)
        assert held.untouched(0)
        behind.write(name, whole)


def test_storing_again_replaces_whatever_is_there(store, behind):
    name = key("again")
    behind.write(name, b"\x22" * 100)
    expect(put(store, [name], [SIZE]), Status.OK)
    assert behind.read(name)[:SIZE] == content(name, SIZE)


def test_clear_touches_its_own_objects_only(server, bucket, prefix, store, behind):
    ours, theirs = keys(5, "llama"), keys(5, "llama-2")
    put(store, ours + theirs, [64] * 10)
    store.put_record("identity/llama", b"{}")
    namespace = ours[0][:16]
    strangers = [
        "README",
        f"{prefix}-2/objects/{namespace}/{ours[0][16:]}",
        f"{prefix}/objects/{namespace}/README",
        f"{prefix}/objects/{namespace}/{ours[0][16:]}.part",
        f"{prefix}/objects/{namespace}x/{ours[0][16:]}",
    ]
    for name in strangers:
        server.client.put_object(Bucket=bucket, Key=name, Body=b"not yours")
    with open_backend(f"{bucket}/{prefix}-2", server.options()) as other:
        assert other.list_keys() == [ours[0]]
        assert store.clear(namespace) == 5
        assert other.list_keys() == [ours[0]]
    for name in strangers:
        found = server.client.get_object(Bucket=bucket, Key=name)
        assert found["Body"].read() == b"not yours"
    assert store.list_keys() == sorted(theirs)
    assert store.records() == {"identity/llama": b"{}"}
    stored(store, theirs, [64] * 5)


def test_more_than_one_page_of_keys(server, store, behind):
    # 1100 names: two pages of a listing, two requests to delete.
    names = keys(1100)
    s3 = client(server.endpoint)
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(
                lambda name: s3.put_object(Bucket=behind.bucket, Key=behind.name(name), Body=b""),
                names,
            )
        )
    s3.close()
    put(store, [key("kept", "other")], [8])
    assert store.list_keys(names[0][:16]) == sorted(names)
    assert len(store.list_keys()) == 1101
    assert store.clear(names[0][:16]) == 1100
    assert store.list_keys() == [key("kept", "other")]


def test_a_damaged_record_is_named(store, behind):
    store.put_record("identity/a", b"value")
    name = f"{behind.prefix}/records/{b'identity/a'.hex()}"
    behind.s3.put_object(Bucket=behind.bucket, Key=name, Body=b"value")
    with pytest.raises(CorruptionError, match="identity/a"):
        store.records()


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "a", "A" * 64, "0" * 63, "0" * 65, "0" * 63 + "/", "é" * 64]
)
def test_only_hex_keys_become_names(store, name):
    held = filled([[8]], [name])
    with store.register([held.region]):
        for op in Op:
            with pytest.raises(ConfigError, match="hex"):
                store.submit(held.batch(op, [name]))
    for call in (lambda: store.exists([name], [8]), lambda: store.remove([name])):
        with pytest.raises(ConfigError, match="hex"):
            call()


def test_the_connector_on_a_url(server, bucket, prefix):
    options = "&".join(f"{name}={value}" for name, value in server.options().items())
    with kvconnect.open(f"nixl+s3://{bucket}/{prefix}?{options}") as store:
        assert repr(store) == f"S3Backend({bucket}/{prefix} at {server.endpoint})"
        names = keys(4)
        source, target = filled([[512] * 8] * 4, names), Objects([[4096]] * 4)
        with store.register([source.region, target.region]):
            assert move(store, source.batch(Op.STORE, names)).prefix == 4
            assert move(store, target.batch(Op.LOAD, names)).prefix == 4
        assert [target.read(i) for i in range(4)] == [content(n, 4096) for n in names]
        assert store.stats()["store.objects"] == 4
        assert store.stats()["load.bytes"] == 4 * 4096


EXIT = """
import sys
from kvconnect_nixl.s3 import open_backend
from kvconnect.testing.suite.base import get, keys, put
location, options = sys.argv[1], dict(pair.split("=", 1) for pair in sys.argv[2:])
store = open_backend(location, options)
put(store, keys(2), [2304] * 2)
print(get(store, keys(4), [2304] * 4)[0].counts(), flush=True)
"""


def test_a_process_that_forgets_to_close_ends_well(server, bucket, prefix):
    options = [f"{name}={value}" for name, value in server.options().items()]
    command = [sys.executable, "-W", "error", "-c", EXIT, f"{bucket}/{prefix}", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{'OK': 2, 'ABSENT': 2}\n"
    assert not done.stderr
