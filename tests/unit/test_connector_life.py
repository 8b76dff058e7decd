"""Attaching, closing, threads and batches of the connector."""

import threading
import time
import weakref

import pytest

import kvconnect
from kvconnect.backend import Capabilities, Op, Status
from kvconnect.connector import Connector
from kvconnect.errors import (
    ClosedError,
    RegistrationError,
    TransferTimeoutError,
)
from kvconnect.placement import Placement, Span
from kvconnect.wrappers import Delayed, Wrapper
from tests.unit.attached import attach, hashes, same, wait_for
from tests.unit.held_pools import held


def test_two_connectors_on_one_pool_close_in_any_order_and_twice(one, store):
    """Case 15."""
    first, second = attach(one, store), attach(one, store)
    assert first.put(hashes(0), [0]).ok.all()
    first.close()
    first.close()
    assert second.get(hashes(0), [1]).ok.all()
    second.close()
    second.close()
    first.close()
    assert store._registrations.regions == ()


def test_memory_that_is_not_registered_is_refused(one, connector, store):
    """Case 16: the registration is gone behind the connector's back."""
    store._registrations.drop(connector._registration.regions)
    before = one.snapshot()
    for call in (connector.put, connector.get):
        with pytest.raises(RegistrationError, match="refused"):
            call(hashes(0), [0])
    assert store.list_keys() == []
    assert one.untouched_outside([], before)
    store._registrations.add(connector._registration.regions)


def test_a_failed_registration_leaves_no_staging_buffer(one, store):
    class Refusing(Wrapper):
        capabilities = Capabilities(scatter_gather=False)

        def register(self, regions):
            raise RegistrationError("memlock")

    with pytest.raises(RegistrationError, match="memlock"):
        attach(one, Refusing(store), head_group=2)


# Case 23: threads.


def test_a_writer_and_a_reader_thread_on_one_connector(one, connector):
    """1000 rounds each; every byte the reader takes for a hit is one of the written versions."""
    versions = [one.random(1, seed=n) for n in range(8)]
    problems = []

    def write():
        for round_ in range(1000):
            page, version = round_ % 4, round_ % 8
            one.write([page], versions[version])
            if not connector.put([f"v{version}"], [page]).ok.all():
                problems.append(f"put {round_}")

    def read():
        for round_ in range(1000):
            page, version = 4 + round_ % 4, round_ % 8
            got = connector.get([f"v{version}"], [page])
            if got.ok.all() and not same(one.read([page]), versions[version]):
                problems.append(f"get {round_}")
            elif not got.ok.all() and got.status[0] != Status.ABSENT:
                problems.append(repr(got))

    threads = [threading.Thread(target=work) for work in (write, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == []
    assert connector.stats()["put.ok"] == 1000
    assert connector.get([f"v{n}" for n in range(8)], range(8)).ok.all()


# Case 30 and closing.


def test_attaching_to_a_pool_in_use_changes_no_byte(one, store):
    content = one.random(8)
    one.write(range(8), content)
    before = one.snapshot()
    with attach(one, store, self_test=True) as connector:
        assert one.untouched_outside([], before)
        assert connector.put(hashes(0), [0]).ok.all()


def test_calls_after_close_are_refused(one, store):
    connector = attach(one, store)
    connector.close()
    for call in (
        lambda: connector.put(hashes(0), [0]),
        lambda: connector.get(hashes(0), [0]),
        lambda: connector.exists(hashes(0)),
        lambda: connector.remove(hashes(0)),
        lambda: connector.why("page0"),
        connector.clear,
    ):
        with pytest.raises(ClosedError, match="closed connector"):
            call()
    assert "namespace" in connector.explain()


@pytest.fixture
def delayed(store):
    with Delayed(store, obeys_cancel=False) as delayed:
        yield delayed


def test_close_waits_for_the_call_under_way(one, delayed):
    connector = attach(one, delayed)
    outcomes, order = [], []

    def put():
        outcomes.append(connector.put(hashes(0), [0]))
        order.append("put")

    def close():
        connector.close()
        order.append("close")

    with delayed.held():
        threads = [threading.Thread(target=put), threading.Thread(target=close)]
        threads[0].start()
        wait_for(lambda: delayed.waiting)
        threads[1].start()
        wait_for(lambda: connector._closing)
        with pytest.raises(ClosedError):
            connector.exists(hashes(0))
        assert order == []
    for thread in threads:
        thread.join(30)
    assert outcomes[0].ok.all()
    assert order == ["put", "close"]


def test_close_refuses_while_memory_is_held_and_can_be_repeated(one, store, delayed):
    """Detach with work in flight: it stays registered, and is unregistered once afterwards."""
    connector = attach(one, delayed)
    closes = []
    registration_close = connector._registration.close
    connector._registration.close = lambda: (closes.append(1), registration_close())
    with delayed.held():
        got = connector.get(hashes(0), [2], timeout=0.02)
        assert got.counts() == {"TIMEOUT": 1}
        assert connector.quarantined() == [2]
        for _ in range(2):
            with pytest.raises(TransferTimeoutError, match="1 pages are still in flight"):
                connector.close(timeout=0.02)
        assert store._registrations.regions
        assert closes == []
    connector.close()
    assert closes == [1]
    assert store._registrations.regions == ()


def test_an_idle_connector_closes_while_another_ones_memory_is_held(one, delayed):
    """Detaching one pool must not wait for the transfers of another."""
    busy, idle = attach(one, delayed), attach(held("cplshd", pages=8), delayed)
    with delayed.held():
        assert busy.get(hashes(0), [2], timeout=0.02).counts() == {"TIMEOUT": 1}
        started = time.monotonic()
        idle.close(timeout=5)
        assert time.monotonic() - started < 2
        with pytest.raises(TransferTimeoutError):
            busy.close(timeout=0.02)
    busy.close()


def test_leaving_the_with_block_closes(one, store):
    with attach(one, store) as connector:
        assert store._registrations.regions
    assert store._registrations.regions == ()
    with pytest.raises(ClosedError):
        connector.put(hashes(0), [0])


def test_closing_gives_the_bounce_buffer_back(one, store):
    connector = attach(one, store, want="staged")
    connector.put(hashes(0), [0])
    memory = weakref.ref(connector._staging._map)
    connector.close()
    assert memory() is None


def test_the_backend_stays_the_callers(one, store):
    attach(one, store).close()
    assert store.list_keys() == []


# Words and numbers.


def test_explain_and_repr_say_what_is_connected(one, connector):
    text = connector.explain()
    for name, value in connector.identity.fields():
        assert f"{name}={value!r}" in text
    assert connector.identity.namespace in text
    assert connector.plan.explain() in text
    assert repr(connector) == (
        f"Connector('pool' on memory, {connector.plan.mode.value}, "
        f"namespace {connector.identity.namespace})"
    )


def test_stats_count_pages_by_reason_and_bytes(one, connector):
    connector.put(hashes(0, 1), [0, 1])
    connector.get(hashes(0, 9), [2, 3])
    connector.exists(hashes(0, 1, 9))
    stats = connector.stats()
    nbytes = one.pool.page_nbytes
    expected = {
        "put.calls": 1,
        "put.ok": 2,
        "put.bytes": 2 * nbytes,
        "get.ok": 1,
        "get.absent": 1,
        "get.bytes": nbytes,
        "exists.calls": 1,
        "exists.pages": 3,
        "exists.hits": 2,
        "quarantined.pages": 0,
        "staging.bytes": 0,
    }
    assert expected.items() <= stats.items()
    assert stats["put.rate"] == pytest.approx(stats["put.bytes"] / stats["put.seconds"])


def test_batches_are_cut_by_bytes(one, store):
    class Watching(Wrapper):
        def submit(self, batch):
            sizes.append(int(batch.nbytes.sum()))
            return super().submit(batch)

    sizes = []
    with attach(one, Watching(store), batch_bytes=3 * 384) as connector:
        assert connector.put(hashes(*range(8)), range(8)).ok.all()
    assert sizes == [3 * 384, 3 * 384, 2 * 384]


def test_a_shard_is_part_of_the_key_and_not_of_the_pool(one, store):
    placements = [
        Placement(Span(0, 3, 3), Span(0, 4, 4), shards=(("cp", Span(n, n + 1, 2)),))
        for n in range(2)
    ]
    first, second = [attach(one, store, placement=p) for p in placements]
    with first, second:
        content = one.random(1)
        one.write([0], content)
        first.put(hashes(0), [0])
        assert not second.exists(hashes(0)).pages.any()
        one.write([1], one.random(1, seed=5))
        second.put(hashes(0), [1])
        assert first.get(hashes(0), [2]).ok.all()
        assert same(one.read([2]), content)


def test_the_public_names_are_these_classes():
    assert kvconnect.Connector is Connector
    assert kvconnect.Placement is Placement
    assert Op.STORE is not Op.LOAD
