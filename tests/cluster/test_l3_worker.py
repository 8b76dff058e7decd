"""Workers on a store: what they report of an honest one, and that they find out one that lies."""

import time
from itertools import pairwise

import pytest

from kvconnect.errors import BackendError
from kvconnect.testing.cluster.services import make as service
from tests.cluster import lying_store
from tests.cluster.l3_fleet import PAGE, begin, config, group, lawful, make, start, until

pytestmark = pytest.mark.cluster(hosts=2)

IDS = tuple(range(3, 14))
MORE = tuple(range(14, 20))
ANY = {"layout": "page_head", "object_layout": "canonical"}
OTHER = {"layout": "page_first", "object_layout": "canonical"}


@pytest.fixture
def store(cluster):
    """A folder on host 0, in which what is acknowledged survives a power cut."""
    return service("nvme", "kv", cluster.host(0), None, {"durability": "index"})


@pytest.fixture
def url(store):
    return store.url(store.host)


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    return lying_store.environment(tmp_path_factory.mktemp("lying"))


@pytest.fixture
def liar(cluster, known):
    """Start a worker on a store that has one vice."""

    def one(vice, **settings):
        host = cluster.host(0)
        url = f"lying://{host.directory}/{vice}?vice={vice}"
        told = config("victim", url, self_test=False, leaving=2.0, deadline=1.0, **settings)
        return start(host, told, env=known)

    return one


def test_ranks_of_other_shape_share_pages_and_say_so(cluster, url):
    host = cluster.host(0)
    writers = group(host, "writers", url, 2, roles=("write",), **ANY)
    for rank in writers:
        call = make(rank, "store", IDS)
        assert lawful(call)
        assert (call.op, call.asked, call.acked) == ("store", len(IDS), IDS)
        assert (call.hits, call.misses, call.nbytes) == ((), {}, PAGE // 2 * len(IDS))
    reader = start(host, config("reader", url, roles=("read",), **OTHER))
    call = make(reader, "load", IDS + MORE)
    assert lawful(call)
    assert (call.hits, call.acked, call.misses) == (IDS, (), {"ABSENT": len(MORE)})
    assert call.nbytes == PAGE * len(IDS)
    call = make(reader, "exists", IDS + MORE)
    assert (call.hits, call.misses, call.nbytes) == ((), {"ABSENT": len(MORE)}, 0)
    make(writers[0], "store", MORE)
    assert make(reader, "load", MORE).misses == {"PARTIAL": len(MORE)}
    told = reader.ask("verify", ids=IDS + MORE, deadline=2.0)
    assert (tuple(told["ok"]), tuple(told["missing"]), told["wrong"]) == (IDS, MORE, [])


def test_a_group_draws_the_same_calls(cluster, url):
    first, second = group(cluster.host(0), "both", url, 2, pause=0.01)
    for rank in (first, second):
        rank.ask("start")
    for rank in (first, second):
        until_calls(rank, 40)
        rank.ask("pause")
    ended = len(first.calls)
    common = min(len(first.calls), len(second.calls))
    assert common > 10
    drawn = [[(c.op, c.asked, c.acked) for c in rank.calls[:common]] for rank in (first, second)]
    assert drawn[0] == drawn[1]
    assert {op for op, _, _ in drawn[0]} == {"open", "store", "load", "exists"}
    assert all(map(lawful, first.calls + second.calls))
    read = [c for c in first.calls if c.op == "load"]
    assert any(c.hits for c in read)
    assert any(c.misses for c in read)
    numbers = [c.number for c in first.calls]
    assert numbers == list(range(len(numbers)))
    state, seen = first.state(), cluster.host(0).counts(first.process.pid)
    assert len(first.calls) == ended, "a paused worker makes no call"
    assert abs(state.fds - seen.fds) <= 2
    assert abs(state.threads - seen.threads) <= 2
    assert abs(state.rss - seen.rss) < 16 << 20
    first.ask("settings", batch=3, pause=0.5)
    first.ask("start")
    until_calls(first, ended + 3)
    assert [c.asked for c in first.calls[ended:]] == [3] * len(first.calls[ended:])
    gaps = [b.started - a.started for a, b in pairwise(first.calls[ended:])]
    assert min(gaps) > 0.4
    for rank in (first, second):
        rank.ask("quit")
        assert rank.process.wait(10) == 0


def until_calls(worker, count, seconds=10.0):
    """Wait until it has told of so many calls."""
    end = time.monotonic() + seconds
    while len(worker.calls) < count:
        assert time.monotonic() < end
        worker.state()
        time.sleep(0.05)


def test_what_was_acknowledged_outlives_worker_and_power(cluster, url):
    host = cluster.host(0)
    worker = start(host, config("one", url))
    assert make(worker, "store", IDS).acked == IDS
    worker.process.kill()
    worker.process.wait(10)
    worker = start(host, config("one", url))
    assert make(worker, "load", IDS).hits == IDS
    assert make(worker, "store", MORE).acked == MORE
    host.power_cut()
    worker = start(host, config("one", url))
    told = worker.ask("verify", ids=IDS + MORE)
    assert (tuple(told["ok"]), told["missing"], told["wrong"]) == (IDS + MORE, [], [])
    assert make(worker, "store", (1, 2)).acked == (1, 2)


def test_a_full_disk_is_a_miss_and_passes(cluster, url):
    host = cluster.host(0)
    host.fill_disk(1 << 20)
    worker = begin(host, config("one", url, opening=5.0))
    failed = opening(worker)
    assert (failed.error, failed.acked) == ("", ())
    assert set(failed.misses) <= {"NO_SPACE", "BACKEND_ERROR", "UNAVAILABLE"}
    assert failed.misses
    host.free_disk()
    worker.answer(0, 20)
    assert make(worker, "store", IDS).acked == IDS


def opening(worker):
    """Return the first event of a worker, which is a try to open."""
    worker._until(lambda: worker.calls, 20, "a try to open")
    assert worker.calls[0].op == "open"
    return worker.calls[0]


def test_a_configuration_that_cannot_be_is_said_once(cluster):
    host = cluster.host(0)
    worker = begin(host, config("one", f"nvme://{host.directory}/kv?capacty=8MiB"))
    with pytest.raises(BackendError, match=r"ConfigError: .*capacity"):
        worker.answer(0, 20)
    assert worker.calls[0].error.startswith("ConfigError")
    assert worker.process.wait(10) == 2


def test_a_command_that_is_not_known_is_refused(cluster, url):
    worker = start(cluster.host(0), config("one", url))
    with pytest.raises(BackendError, match="word is 'sing'; it must be one of start"):
        worker.ask("sing")
    with pytest.raises(BackendError, match=r"load: .*ids"):
        worker.ask("load")
    assert make(worker, "store", IDS).acked == IDS


def test_one_flipped_bit_is_wrong(liar):
    victim = liar("flip")
    make(victim, "store", IDS)
    call = make(victim, "load", IDS)
    assert len(call.wrong) == 1
    assert set(call.hits) == set(IDS) - set(call.wrong)
    told = victim.ask("verify", ids=IDS)
    assert len(told["wrong"]) == 2, "one in each of two calls of eight"


def test_a_store_that_reads_too_late_stores_wrong_bytes(liar):
    victim = liar("reads-late")
    assert make(victim, "store", IDS).acked == IDS
    calls = until(victim, "load", IDS, lambda call: "ABSENT" not in call.misses, 10)
    assert calls[-1].wrong == IDS


def test_a_store_that_writes_too_late_touches_memory_of_others(liar):
    victim = liar("writes-late")
    make(victim, "store", IDS)
    assert make(victim, "load", IDS).hits == IDS
    calls = until(victim, "exists", IDS, lambda call: call.reused, 10)
    assert set(calls[-1].reused) <= set(IDS)
    assert len(calls[-1].reused) == 1


def test_a_store_that_forgets_loses_what_it_acknowledged(liar):
    victim = liar("forgets")
    assert make(victim, "store", IDS).acked == IDS
    told = victim.ask("verify", ids=IDS)
    assert tuple(told["missing"]) == IDS
    assert told["misses"] == {"ABSENT": len(IDS)}


def test_a_call_that_hangs_ends_and_its_pages_are_not_reused(liar):
    victim = liar("hangs", pages=16)
    make(victim, "store", IDS)
    number = victim.tell("load", ids=IDS)
    began = time.monotonic()
    victim.ask("counts")
    assert time.monotonic() - began < 0.8, "it answers while a call hangs"
    victim.answer(number)
    assert victim.calls[-1].misses == {"TIMEOUT": len(IDS)}
    assert 1.0 <= victim.calls[-1].seconds < 2.0
    assert victim.state().quarantined == PAGE * len(IDS)
    call = make(victim, "load", MORE)
    assert call.misses == {"QUARANTINED": len(MORE)}, "five pages are free, six are asked for"
    with pytest.raises(BackendError, match=r"TransferTimeoutError: close: .*in flight"):
        victim.ask("quit")
    assert victim.process.wait(10) == 3


def test_what_no_store_may_raise_is_an_error_of_the_call(liar):
    victim = liar("raises")
    call = make(victim, "exists", IDS)
    assert call.error == "ValueError: no store may raise this"
    assert call.misses == {}
    assert make(victim, "store", IDS).acked == IDS
