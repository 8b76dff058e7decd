"""`kvconnect find` and its library call: a page hash to the bytes that are stored of it."""

import os
import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvconnect
from kvconnect.backend import SupportsListing
from kvconnect.cli.main import app
from kvconnect.errors import CapabilityError, ConfigError
from kvconnect.find import find
from kvconnect.memory import MemoryBackend
from kvconnect.placement import Placement
from kvconnect.wrappers import Wrapper
from tests.unit.held_pools import held, identity_of, whole

PAGE = "ab" * 32


def store_page(store, rank_pool, placement, name=PAGE, page=0, put=None, **changes):
    """Fill pool page `page` with bytes that never repeat and store it; return the content."""
    content = rank_pool.random(1, seed=10 * len(changes) + page)
    rank_pool.write([page], content)
    group = changes.pop("head_group", None)
    identity = identity_of(rank_pool.pool, placement, **changes)
    with kvconnect.Connector(
        rank_pool.pool, placement, identity, store, self_test=False, head_group=group
    ) as connector:
        assert connector.put([name], [page], **(put or {})).ok.all()
        return connector.identity


def read(location):
    with Path(location.path).open("rb") as file:
        file.seek(location.offset)
        return file.read(location.nbytes)


@pytest.fixture
def url(tmp_path):
    return f"nvme://{tmp_path}/store?capacity=4MiB"


@pytest.fixture
def store(url):
    with kvconnect.open(url) as store:
        yield store


def test_every_object_of_the_page_is_found_with_its_bytes(store):
    pool = held("cphsld")
    identity = store_page(store, pool, whole(pool.pool), head_group=2)
    found = find(store, PAGE)
    assert [one.identity for one in found] == [identity] * 2
    expected = {pool.canonical(0, slice(None), slice(at, at + 2)) for at in (0, 2)}
    assert {read(one.location) for one in found} == expected
    assert all(one.location.intact for one in found)
    assert sorted(one.key for one in found) == [one.key for one in found] == store.list_keys()


def test_identities_are_told_apart_and_other_pages_left_out(store):
    one, two = held("cphsld"), held("cphsld", dtype="float16")
    mine = store_page(store, one, whole(one.pool))
    theirs = store_page(store, two, whole(two.pool))
    store_page(store, one, whole(one.pool), name="cd" * 32, page=1)
    found = {one.identity: read(one.location) for one in find(store, PAGE)}
    assert found.keys() == {mine, theirs}
    assert found[theirs] == two.canonical(0, slice(None), slice(None))
    assert find(store, "ef" * 32) == []


def test_ranks_are_found_by_the_parts_they_stored(store):
    part = held("cphsld", heads=1)
    for rank in (0, 2):
        placement = Placement.tensor_parallel(layers=3, heads=4, rank=rank, size=4)
        store_page(store, part, placement)
    assert len(find(store, PAGE)) == 2


@pytest.mark.parametrize("name", [PAGE, b"\x00\xff" * 16])
def test_text_and_bytes_are_two_names(store, name):
    pool = held("cphsld")
    store_page(store, pool, whole(pool.pool), name=name)
    assert len(find(store, name)) == 1
    other = bytes.fromhex(name) if isinstance(name, str) else name.hex()
    assert find(store, other) == []
    with pytest.raises(ConfigError, match="empty"):
        find(store, "")


def test_damage_is_told_and_nothing_is_dropped(store):
    pool = held("cphsld")
    store_page(store, pool, whole(pool.pool))
    (place,) = [one.location for one in find(store, PAGE)]
    with Path(place.path).open("r+b") as file:
        file.seek(place.offset + place.nbytes - 1)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    for _ in range(2):
        (one,) = find(store, PAGE)
        assert one.location.intact is False
    os.truncate(place.path, place.offset + 1)
    assert find(store, PAGE)[0].location.intact is False


def test_pins_and_expiry(store):
    pool = held("cphsld")
    store_page(store, pool, whole(pool.pool), put={"pin": True, "ttl": 1000.0})
    (one,) = find(store, PAGE)
    assert one.location.pinned
    assert one.location.expires == pytest.approx(time.time() + 1000, abs=60)


def test_objects_in_every_slab_are_found(tmp_path):
    pool = held("cphsld")
    with kvconnect.open(f"nvme://{tmp_path}/many?capacity=64KiB&slab=8KiB") as store:
        names = [f"{n:064x}" for n in range(12)]
        for n, name in enumerate(names):
            store_page(store, pool, whole(pool.pool), name=name, page=n % 4)
            (one,) = find(store, name)
            assert read(one.location) == pool.canonical(n % 4, slice(None), slice(None))
        assert len({find(store, name)[0].location.path for name in names}) == 6


def test_without_checksums_nothing_is_claimed(tmp_path):
    with kvconnect.open(f"nvme://{tmp_path}/plain?capacity=4MiB&checksum=false") as store:
        pool = held("cphsld")
        store_page(store, pool, whole(pool.pool))
        assert find(store, PAGE)[0].location.intact is None


def test_a_store_that_is_no_file_tells_keys_only():
    with MemoryBackend() as store:
        pool = held("cphsld")
        store_page(store, pool, whole(pool.pool))
        (one,) = find(store, PAGE)
        assert one.location is None
        assert store.list_keys() == [one.key]


def test_a_store_that_cannot_list_is_refused():
    class Core(Wrapper):
        def __init__(self, inner):
            self.inner = inner

    with Core(MemoryBackend()) as core:
        assert not isinstance(core, SupportsListing)
        with pytest.raises(CapabilityError, match="core"):
            find(core, PAGE)


def test_records_that_are_none_are_passed_over(store):
    pool = held("cphsld")
    store.put_record("identity/0123456789abcdef", b"{")
    store.put_record("other", b"x")
    unset = identity_of(pool.pool, whole(pool.pool))
    store.put_record("identity/fedcba9876543210", unset.to_json())
    store_page(store, pool, whole(pool.pool))
    assert len(find(store, PAGE)) == 1


def command(*arguments):
    return CliRunner().invoke(app, ["find", *arguments])


def test_the_command_prints_what_an_operator_needs(store, url):
    pool = held("cphsld")
    identity = store_page(store, pool, whole(pool.pool), put={"pin": True})
    (one,) = find(store, PAGE)
    done = command(url, PAGE)
    assert done.exit_code == 0, done.output
    for word in (identity.namespace, "org/model", "bfloat16", "kv", one.key, one.location.path):
        assert word in done.output
    assert re.search(rf"offset +{one.location.offset}\n +state +intact, pinned\n", done.output)
    assert command(url, "ef" * 32).exit_code == 1
    assert "nothing is stored" in command(url, "ef" * 32).output


def test_the_command_takes_hex_for_bytes(store, url):
    pool = held("cphsld")
    store_page(store, pool, whole(pool.pool), name=bytes.fromhex(PAGE), put={"ttl": 500.0})
    done = command(url, PAGE)
    assert done.exit_code == 0
    assert re.search(r"expires in (49\d|500) s", done.output)


def test_the_command_says_what_is_damaged(store, url):
    pool = held("cphsld")
    store_page(store, pool, whole(pool.pool))
    (one,) = find(store, PAGE)
    with Path(one.location.path).open("r+b") as file:
        file.seek(one.location.offset)
        file.write(bytes(one.location.nbytes))
    assert "DAMAGED" in command(url, PAGE).output
