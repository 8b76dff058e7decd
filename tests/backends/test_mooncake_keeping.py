"""Mooncake: whose objects are kept, which of them together, how long, and where."""

import json
import urllib.request

import pytest

from kvconnect.backend import Op, Status
from kvconnect.errors import CapabilityError, ConfigError, UnavailableError
from kvconnect.testing.suite import keys
from kvconnect.testing.suite.base import content, expect, filled, get, move, put, stored
from kvconnect_mooncake.names import PAGE_CHARACTERS

from .mooncake_master import Master, opened, wait_for

MIB = 1 << 20
QUOTA = 8 * MIB
SMALL = 16
"""MiB; the library mounts no smaller segment."""


def register(master, tenant):
    """Make a tenant known to the master."""
    request = urllib.request.Request(
        f"http://{master.admin}/api/v1/tenant_quotas?tenant_id={tenant}",
        json.dumps({"requested_quota_bytes": QUOTA}).encode(),
        method="PUT",
    )
    with urllib.request.urlopen(request, timeout=5) as answer:
        assert answer.status == 200


@pytest.fixture(scope="module")
def tenants(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tenants")
    (folder / "quotas").write_text("version: 1\ntenants: []\n")
    flags = "--enable_multi_tenants=true", f"--tenant_quota_connector_uri={folder / 'quotas'}"
    with Master(folder / "master", *flags, lease=1.0) as master:
        master.owner(64)
        for tenant in ("red", "blue"):
            register(master, tenant)
        yield master


def test_tenants_do_not_see_each_other(tenants):
    names, sizes = keys(3), [2304] * 3
    with opened(tenants, tenant="red") as red, opened(tenants, tenant="blue") as blue:
        expect(put(red, names, sizes, "red"), *[Status.OK] * 3)
        assert not blue.exists(names, sizes).any()
        outcome, held = get(blue, names, sizes)
        expect(outcome, *[Status.ABSENT] * 3)
        assert all(held.untouched(index) for index in range(3))
        # The same keys with other bytes: two objects, each for one of them.
        expect(put(blue, names, sizes, "blue"), *[Status.OK] * 3)
        stored(red, names, sizes, "red")
        stored(blue, names, sizes, "blue")
        assert blue.remove(names[:1]).all()
        assert blue.clear(names[0][:16]) == 2
        stored(red, names, sizes, "red")
        for call in (red.list_keys, red.records):
            with pytest.raises(CapabilityError, match="tenant='red'"):
                call()


def test_a_tenant_over_its_quota_loses_its_own(tenants):
    with (
        opened(tenants, tenant="red", space_wait="20") as red,
        opened(tenants, tenant="blue") as blue,
    ):
        kept = keys(4, "kept")
        expect(put(blue, kept, [MIB] * 4), *[Status.OK] * 4)
        for number in range(4):
            expect(put(red, keys(4, f"more {number}"), [MIB] * 4), *[Status.OK] * 4)
        stored(blue, kept, [MIB] * 4)
    with opened(tenants, tenant="red", space_wait="0.3") as red:
        outcome = put(red, keys(1, "huge"), [QUOTA + MIB])
        expect(outcome, Status.NO_SPACE)
        assert "quota" in outcome.causes[0]


def test_a_tenant_that_nobody_keeps_apart(tenants, tmp_path):
    with pytest.raises(ConfigError, match=r"'green' is not known .*tenant_id=green"):
        opened(tenants, tenant="green")
    # It would take the objects, for everybody to see.
    with Master(tmp_path / "plain") as plain:
        with pytest.raises(ConfigError, match="without --enable_multi_tenants"):
            opened(plain, tenant="red")
        with pytest.raises(UnavailableError, match="admin="):
            opened(plain, tenant="red", admin="127.0.0.1:1")


def small(folder, *flags, **more):
    """Start a master, with an owner of the least memory unless told otherwise."""
    master = Master(folder, "--eviction_high_watermark_ratio=0.9", *flags, **more)
    master.owner(SMALL)
    return master


def fill(store):
    """Store more than the memory holds, a few at a time; the bytes do not matter."""
    names = keys(24, "filler")
    held = filled([[MIB]] * 4, names[:4])
    with store.register([held.region]):
        for low in range(0, len(names), 4):
            batch = held.batch(Op.STORE, names[low : low + 4])
            expect(move(store, batch), *[Status.OK] * 4)


def test_soft_pins_resist_eviction_for_their_time(tmp_path):
    pinned, plain = keys(4, "pinned"), keys(4, "plain")
    with small(tmp_path / "master", lease=0.2) as master:
        with opened(master, soft_pin="60", space_wait="5") as store:
            expect(put(store, pinned, [MIB] * 4), *[Status.OK] * 4)
        with opened(master, soft_pin="0.1", space_wait="5") as store:
            expect(put(store, plain, [MIB] * 4), *[Status.OK] * 4)
        with opened(master, space_wait="5") as store:
            fill(store)
            assert not store.exists(plain, [MIB] * 4).any(), "its time is over"
            stored(store, pinned, [MIB] * 4)


@pytest.mark.parametrize("group", ["page", "none"])
def test_objects_of_a_page_leave_together(tmp_path, group):
    pages = [name[:PAGE_CHARACTERS] for name in keys(12)]
    parts = [[f"{page}{part:016x}" for part in range(4)] for page in pages]
    master = small(tmp_path / "master", lease=0.2)
    with master, opened(master, group=group, space_wait="5") as store:
        for names in parts:
            expect(put(store, names, [MIB // 2] * 4), *[Status.OK] * 4)
        there = [int(store.exists(names, [MIB // 2] * 4).sum()) for names in parts]
    assert 0 in there, "nothing was evicted: no test"
    assert 4 in there
    if group == "page":
        assert set(there) == {0, 4}


@pytest.fixture
def offload(monkeypatch):
    """Let objects go to the SSD soon and one by one; the library's defaults gather 256 MiB."""
    for name, value in (
        ("HEARTBEAT_INTERVAL_SECONDS", 1),
        ("LOCAL_BUFFER_SIZE_BYTES", 16 * MIB),
        ("BUCKET_KEYS_LIMIT", 1),
    ):
        monkeypatch.setenv(f"MOONCAKE_OFFLOAD_{name}", str(value))


def all_stored(store, names, version=""):
    """Check objects of 1 MiB, a few at a time: memory for all would take longer than moving it."""
    for low in range(0, len(names), 4):
        some = names[low : low + 4]
        stored(store, some, [MIB] * len(some), version)


def where(store, names):
    """Return for each object where its bytes are: M memory, S SSD, both or neither."""
    out = []
    for name in store.core.names.names(names):
        replicas = store.core.client._store.get_replica_desc(name)
        memory = any(one.is_memory_replica() for one in replicas)
        out.append("M" * memory + "S" * any(one.is_local_disk_replica() for one in replicas))
    return out


def test_what_leaves_the_memory_comes_back_from_the_ssd(tmp_path, offload):
    (tmp_path / "ssd").mkdir()
    names = keys(20)
    with Master(tmp_path / "master", "--enable_offload=true", lease=1.0) as master:
        options = {"segment": f"{SMALL}MiB", "ssd": str(tmp_path / "ssd"), "space_wait": "5"}
        with opened(master, **options) as store:
            for low in range(0, 20, 4):
                some = names[low : low + 4]
                expect(put(store, some, [MIB] * 4), *[Status.OK] * 4)
                wait_for(lambda some=some: all("S" in w for w in where(store, some)), 20, "SSD")
            assert where(store, names).count("S") >= 4, "all are in memory: no test"
            all_stored(store, names)
            # A put of what is on the SSD alone is no other object, and other bytes replace it.
            for version in ("", "new"):
                expect(put(store, names[:2], [MIB] * 2, version), Status.OK, Status.OK)
                all_stored(store, names[:2], version)
            # Another process's client reads them through the one that has the disk.
            with opened(master) as other:
                all_stored(other, names[2:])
        assert master.segments() == [], "its memory has left the store with it"


def test_without_an_ssd_it_is_gone(tmp_path):
    with Master(tmp_path / "master", lease=0.2) as master:
        with opened(master, segment=f"{SMALL}MiB", space_wait="5") as store:
            names = keys(20)
            for low in range(0, 20, 4):
                expect(put(store, names[low : low + 4], [MIB] * 4), *[Status.OK] * 4)
            there = store.exists(names, [MIB] * 20)
            assert not there[:4].any()
            held = [name for name, here in zip(names, there, strict=True) if here]
            all_stored(store, held)
        (tmp_path / "ssd").mkdir()
        with pytest.raises(UnavailableError, match="without --enable_offload"):
            opened(master, segment=f"{SMALL}MiB", ssd=str(tmp_path / "ssd"))


def test_hard_pins_are_never_evicted(tmp_path):
    pinned = keys(4, "pinned")
    with small(tmp_path / "master", lease=0.2) as master, opened(master, space_wait="5") as store:
        held = filled([[MIB]] * 4, pinned)
        with store.register([held.region]):
            expect(move(store, held.batch(Op.STORE, pinned, pin=True)), *[Status.OK] * 4)
        fill(store)
        outcome, again = get(store, pinned, [MIB] * 4)
        expect(outcome, *[Status.OK] * 4)
        assert all(again.read(i) == content(name, MIB) for i, name in enumerate(pinned))
