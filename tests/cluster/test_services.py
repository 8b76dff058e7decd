"""Services on hosts: they start, break and come back, and workers on them see what they promise."""

import time

import pytest

from kvconnect.errors import ConfigError, UnavailableError
from kvconnect.testing.cluster.services import KINDS
from kvconnect.testing.cluster.services import make as service
from tests.cluster.l3_fleet import begin, config, lawful, make, start, until

pytestmark = pytest.mark.cluster(hosts=3)

IDS, MORE = tuple(range(8)), tuple(range(8, 16))
PATIENCE = {"deadline": 2.0, "pages": 160}


def whole(call):
    return call.hits == IDS


def took(calls):
    """Seconds from the start of the first to the end of the last."""
    return calls[-1].started + calls[-1].seconds - calls[0].started


@pytest.fixture
def mooncake(cluster):
    """A master on host 0 and an owner on host 1."""
    master = service("mooncake-master", "master", cluster.host(0), None, {})
    owner = service("mooncake-owner", "owner", cluster.host(1), master, {"mib": 32})
    with master, owner:
        master.start()
        owner.start()
        yield master, owner


def test_the_owner_dies_then_another_gives_memory(cluster, mooncake):
    master, owner = mooncake
    assert (master.keeps, owner.keeps) == ("nothing", "nothing")
    worker = start(cluster.host(2), config("one", owner.url(cluster.host(2)), **PATIENCE))
    assert make(worker, "store", IDS).acked == IDS
    assert make(worker, "load", IDS).hits == IDS
    owner.kill()
    assert not owner.alive
    # The first call finds it out; then the master drops what the owner had.
    calls = until(worker, "load", IDS, lambda call: call.misses == {"ABSENT": len(IDS)}, 20)
    assert all(map(lawful, calls))
    assert not any(call.hits for call in calls)
    assert took(calls) < 12
    owner.restart()
    calls = until(worker, "store", MORE, lambda call: call.acked == MORE, 20)
    assert all(map(lawful, calls))
    assert make(worker, "load", MORE).hits == MORE
    # One that is asked to end takes its memory out of the store at once.
    owner.terminate(10)
    call = make(worker, "load", MORE)
    assert lawful(call)
    assert call.hits == ()
    worker.ask("quit")
    assert worker.process.wait(10) == 0


def test_the_master_is_killed_and_started_again_at_its_address(cluster, mooncake):
    master, owner = mooncake
    url = master.url(cluster.host(2))
    worker = start(cluster.host(2), config("one", url, **PATIENCE))
    assert make(worker, "store", IDS).acked == IDS
    master.kill()
    call = make(worker, "load", IDS)
    assert lawful(call)
    assert (call.hits, sum(call.misses.values())) == ((), len(IDS))
    second = begin(cluster.host(1), config("two", url))
    second._until(lambda: second.calls, 20, "a try to open")
    assert (second.calls[0].op, second.calls[0].misses) == ("open", {"UNAVAILABLE": 1})
    master.restart()
    second.answer(0, 30)
    assert second.calls[-1].misses == {}
    calls = until(worker, "store", IDS, lambda call: call.acked == IDS, 20)
    assert all(map(lawful, calls))
    assert until(second, "load", IDS, whole, 10)
    assert owner.alive


def test_an_owner_that_stops_holds_nobody_up_for_longer_than_its_call(cluster, mooncake):
    _, owner = mooncake
    worker = start(cluster.host(2), config("one", owner.url(cluster.host(2)), **PATIENCE))
    assert make(worker, "store", IDS).acked == IDS
    owner.stop()
    calls = [make(worker, "load", IDS) for _ in range(3)]
    assert all(map(lawful, calls))
    assert not any(call.hits for call in calls)
    owner.go_on()
    calls = until(worker, "store", MORE, lambda call: call.acked == MORE, 20)
    assert all(map(lawful, calls))
    assert make(worker, "load", MORE).hits == MORE


def test_an_s3_server_that_stops_and_one_that_forgets(cluster):
    with service("s3", "s3", cluster.host(0), None, {}) as server:
        server.start()
        worker = start(cluster.host(1), config("one", server.url(cluster.host(1)), **PATIENCE))
        assert make(worker, "store", IDS).acked == IDS
        assert make(worker, "load", IDS + MORE).misses == {"ABSENT": len(MORE)}
        server.stop()
        for op in ("load", "store", "exists"):
            call = make(worker, op, IDS)
            assert lawful(call)
            assert (call.hits, call.acked) == ((), ())
            assert sum(call.misses.values()) == len(IDS)
        server.go_on()
        assert all(map(lawful, until(worker, "load", IDS, whole, 15)))
        server.restart()
        calls = until(worker, "load", IDS, lambda call: call.misses == {"ABSENT": len(IDS)}, 15)
        assert all(map(lawful, calls))
        until(worker, "store", IDS, lambda call: call.acked == IDS, 15)
        worker.ask("quit")
        assert worker.process.wait(10) == 0


def test_a_folder_is_on_its_host_alone(cluster):
    one = service("nvme", "kv", cluster.host(0), None, {"durability": "index"})
    one.start()
    assert not one.alive
    url = one.url(cluster.host(0), capacity="16MiB", checksum=False)
    assert url.startswith(f"nvme://{cluster.host(0).directory}/kv?")
    assert {"durability=index", "capacity=16MiB", "checksum=false"} <= {
        *url.split("?")[1].split("&")
    }
    with pytest.raises(ConfigError, match="a folder on host0 cannot be opened on host1"):
        one.url(cluster.host(1))


@pytest.mark.parametrize(
    ("kind", "of", "options", "match"),
    [
        ("mongo", None, {}, r"kind is 'mongo'; it must be one of \['etcd', 'mooncake-master'"),
        ("mooncake-owner", None, {}, "a mooncake-owner is of mooncake-master or etcd; .* nothing"),
        ("mooncake-owner", "nvme", {}, "is of mooncake-master or etcd; here of 'other', a nvme"),
        ("mooncake-master", "s3", {}, "a mooncake-master is of etcd; here of 'other', a s3"),
        ("nvme", "etcd", {}, "a nvme is of no other service"),
        ("s3", "etcd", {}, "a s3 is of no other service"),
        ("etcd", "etcd", {}, "a etcd is of no other service"),
        ("mooncake-master", None, {"leese": 1}, "leese.*lease"),
        ("mooncake-owner", "mooncake-master", {"mib": "many"}, "mib.*many"),
    ],
)
def test_what_a_service_cannot_be(cluster, kind, of, options, match):
    host = cluster.host(0)
    other = None if of is None else service(of, "other", host, None, {})
    with pytest.raises(ConfigError, match=match):
        service(kind, "one", host, other, options)


def test_what_cannot_be_opened(cluster):
    host = cluster.host(0)
    with pytest.raises(ConfigError, match="no mooncake-master is of this etcd"):
        service("etcd", "etcd", host, None, {}).url(host)


def test_a_server_that_ends_says_why(cluster):
    host = cluster.host(0)
    etcd = service("etcd", "etcd", host, None, {})
    host.run(["touch", "etcd"], timeout=10)
    began = time.monotonic()
    with pytest.raises(UnavailableError, match=r"(?s)ended: .*error listing data dir"):
        etcd.start()
    assert time.monotonic() - began < 10
    assert not etcd.alive
    assert sorted(KINDS) == ["etcd", "mooncake-master", "mooncake-owner", "nvme", "s3"]
