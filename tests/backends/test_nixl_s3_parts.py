"""The parts of the S3 store that need no server."""

import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvconnect
from kvconnect.backend import Status
from kvconnect.errors import ConfigError, UnavailableError
from kvconnect.registry import split_url
from kvconnect_nixl.s3 import open_backend, seal
from kvconnect_nixl.s3.circuit import Circuit
from kvconnect_nixl.s3.names import Names
from kvconnect_nixl.s3.options import parse, parse_place
from kvconnect_nixl.s3.slots import STEP, SlotPool

KEY = "0123456789abcdef" * 4
HEX = st.text("0123456789abcdef", min_size=64, max_size=64)
SECRETS = {"access_key": "AK", "secret_key": "do-not-show", "session_token": "nor-this"}


@pytest.mark.parametrize("location", ["kv-cache", "kv-cache/a", "kv.cache/a/b_c=1/D.2", "abc/"])
def test_places(location):
    place = parse_place(location)
    assert f"{place.bucket}/{place.prefix}".rstrip("/") == location.rstrip("/")


@pytest.mark.parametrize(
    "location",
    ["", "/a", "ab", "Bucket", "a..b", "-abc", "abc-", "a" * 64, "kv_cache", "kv-cache//a",
     "kv-cache/../a", "kv-cache/a/../b", "kv-cache/.", "kv-cache/a b", "kv-cache/é",
     "kv-cache/a//b", "kv-cache/" + "a" * 513, "kv-cache/a?b", "kv-cache/a\n"],
)  # fmt: skip
def test_places_that_are_none(location):
    with pytest.raises(ConfigError):
        parse_place(location)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"endpoints": "http://a"}, "endpoint"),
        ({"endpoint": "a:9000"}, "endpoint"),
        ({"endpoint": "ftp://a"}, "endpoint"),
        ({"endpoint": "http://"}, "endpoint"),
        ({"endpoint": "http://a:99999"}, "endpoint"),
        ({"endpoint": "http://a/bucket"}, "endpoint"),
        ({"endpoint": "http://AK:do-not-show@a"}, "endpoint"),
        ({"threads": "0"}, "threads"),
        ({"threads": "many"}, "threads"),
        ({"bounce": "1KiB"}, "bounce"),
        ({"timeout": "inf"}, "timeout"),
        ({"request_timeout": "0"}, "request_timeout"),
        ({"cooldown": "-1"}, "cooldown"),
        ({"retries": "-1"}, "retries"),
        ({"addressing": "auto"}, "addressing"),
        ({"access_key": "AK"}, "secret_key"),
        ({"secret_key": "do-not-show"}, "access_key"),
        ({"session_token": "nor-this"}, "access_key"),
    ],
)
def test_options_that_cannot_be(options, named):
    with pytest.raises(ConfigError, match=named) as error:
        open_backend("kv-cache", options)
    assert "do-not-show" not in str(error.value)
    assert "nor-this" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    ["nixl+s3://AK:do-not-show@kv-cache", "nixl+s3://AK:do-not-show@kv-cache/a?x=1&x=2",
     "nixl+s3://AK:do-not-show@[", "nixl+s3://kv-cache#secret_key=do-not-show"],
)  # fmt: skip
def test_credentials_in_the_wrong_place_are_not_shown(url):
    with pytest.raises(ConfigError) as error:
        kvconnect.open(url)
    assert "do-not-show" not in str(error.value)


def test_secrets_are_never_shown():
    options = parse({"endpoint": "https://s3.example", **SECRETS})
    assert options.secret_key == "do-not-show"
    assert not any(secret in repr(options) for secret in SECRETS.values())
    assert options.scheme == "https"


def test_the_scheme_is_known():
    url = "nixl+s3://kv-cache/team?endpoint=http://127.0.0.1:9000&region=eu-1"
    options = {"endpoint": "http://127.0.0.1:9000", "region": "eu-1"}
    assert split_url(url) == ("nixl+s3", "kv-cache/team", options)
    with pytest.raises(ConfigError, match="no bucket name"):
        kvconnect.open("nixl+s3://No/x")


@given(HEX)
def test_names_and_back(key):
    names = Names("a/b")
    name = names.of(key)
    assert name == f"a/b/objects/{key[:16]}/{key[16:]}"
    assert names.key_of(name) == key
    assert Names("a").key_of(name) is None
    for cut in (0, 1, 15, 16, 17, 63, 64):
        assert name.startswith(names.under(key[:cut]))
        assert names.under(key[:cut]).replace("/", "")[len("abobjects") :] == key[:cut]


def test_names_of_strangers():
    names = Names("p")
    good = names.of(KEY)
    for name in (
        good.upper(), good + "0", good[:-1], good.replace("p/", "q/", 1), good + "/", "README",
        "p/objects/" + KEY, "/" + good, good.replace("objects", "records"),
    ):  # fmt: skip
        assert names.key_of(name) is None
    for prefix in ("~", "A", "g", "../", KEY + "0", "é"):
        assert names.under(prefix) is None


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=50))
def test_records_are_hex(name):
    names = Names("")
    stored = names.record(name)
    assert set(stored.removeprefix("records/")) <= set("0123456789abcdef")
    assert names.record_of(stored) == name
    assert names.key_of(stored) is None


@pytest.mark.parametrize("name", ["", "a" * 201])
def test_record_names_that_cannot_be(name):
    with pytest.raises(ConfigError, match="record name"):
        Names("").record(name)


def test_other_names_are_no_records():
    names = Names("p")
    for name in ("p/records/", "p/records/abc", "p/records/xx", "records/61", "p/records/ff"):
        assert names.record_of(name) is None


@given(st.binary(min_size=1, max_size=200), HEX, st.integers(0, 2**63))
def test_a_seal_proves_its_payload(payload, key, expiry):
    raw = bytes.fromhex(key)
    made = seal.sealed(raw, payload, expiry)
    tail = made.pack()
    assert len(tail) == seal.NBYTES
    assert seal.unpack(tail) == made
    size, nbytes = len(payload) + len(tail), len(payload)
    assert seal.verdict(size, tail, raw, nbytes, max(expiry - 1, 0))[0] is Status.OK
    other = bytes([raw[0] ^ 1]) + raw[1:]
    assert seal.verdict(size, tail, other, nbytes, 0)[0] is Status.IDENTITY
    assert seal.verdict(size, tail, raw, nbytes + 1, 0)[0] is Status.SIZE_MISMATCH
    assert seal.verdict(size + 1, tail, raw, nbytes + 1, 0)[0] is Status.SIZE_MISMATCH
    assert seal.verdict(None, b"", raw, nbytes, 0)[0] is Status.ABSENT
    if expiry:
        assert seal.verdict(size, tail, raw, nbytes, expiry)[0] is Status.ABSENT
    assert seal.sealed(other, payload).checksum != made.checksum


@given(st.integers(0, seal.NBYTES * 8 - 1))
def test_no_flipped_bit_of_a_seal_goes_unseen(bit):
    tail = bytearray(seal.sealed(bytes(32), b"payload", 5).pack())
    tail[bit // 8] ^= 1 << bit % 8
    assert seal.unpack(bytes(tail)) is None
    status, _ = seal.verdict(7 + seal.NBYTES, bytes(tail), bytes(32), 7, 0)
    assert status in {Status.CHECKSUM, Status.IDENTITY}


def test_a_seal_is_read_by_other_hosts():
    made = seal.sealed(bytes(range(32)), b"abc", 7)
    assert struct.unpack_from("<8sQQ", made.pack()) == (b"kvc-s3\x00\x01", 3, 7)


def test_a_cleared_tail_is_no_seal():
    room = memoryview(bytearray(b"\xaa" * (seal.NBYTES + seal.MARK + 5)))
    marks = {seal.clear_tail(room) for _ in range(8)}
    assert len(marks) == 8, "a mark that repeats could be what the server sent"
    assert seal.unpack(bytes(room[: seal.NBYTES])) is None
    assert bytes(room[-5:]) == b"\xaa" * 5


def test_a_circuit_opens_and_closes():
    now = [100.0]
    circuit = Circuit(5.0, lambda: now[0])
    circuit.check()
    circuit.trip("dead")
    circuit.trip("still dead")
    with pytest.raises(UnavailableError, match=r"still dead; not asked again for 5\.0 s"):
        circuit.check()
    now[0] += 4.9
    assert circuit.error() is not None
    now[0] += 0.2
    circuit.check()
    circuit.trip("dead again")
    assert circuit.trips == 2
    assert circuit.error() is not None


def test_slots_do_not_overlap():
    pool = SlotPool(4 * STEP)
    first, second, third = (pool.take(n) for n in (1, STEP + 1, STEP))
    assert pool.take(1) is None
    assert [slot.offset for slot in (first, second, third)] == [0, STEP, 3 * STEP]
    assert pool.out == 4 * STEP
    for slot, byte in ((first, 1), (second, 2), (third, 3)):
        slot.view[:] = bytes([byte]) * len(slot.view)
        assert slot.address == pool.address + slot.offset
        assert slot.region.nbytes == len(slot.view)
    assert (set(first.view), set(second.view), set(third.view)) == ({1}, {2}, {3})
    pool.give(second)
    again = pool.take(2 * STEP)
    assert again.offset == STEP
    for slot in (again, third, first):
        pool.give(slot)
    assert pool.out == 0
    assert pool.take(4 * STEP + 1) is None


def test_slots_from_many_threads():
    pool, owned, errors = SlotPool(16 * STEP), [None] * 16, []

    def work(mine):
        for round_ in range(300):
            slot = pool.take(STEP * (1 + round_ % 3))
            if slot is None:
                continue
            steps = range(slot.offset // STEP, -(-(slot.offset + len(slot.view)) // STEP))
            for step in steps:
                if owned[step] is not None:
                    errors.append((mine, owned[step]))
                owned[step] = mine
            for step in steps:
                owned[step] = None
            pool.give(slot)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors
    assert pool.out == 0
