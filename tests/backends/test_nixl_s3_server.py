"""A server that is dead, stalled, busy, cut off or refuses: bounded time, one reason, recovery."""

import logging
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from kvconnect.backend import Op, Status
from kvconnect.errors import TransferTimeoutError, UnavailableError
from kvconnect.testing.memory import Objects
from kvconnect.testing.suite.base import expect, filled, get, key, keys, put, stored
from kvconnect_nixl.s3 import open_backend
from tests.backends.s3_server import (
    KEYS,
    Plan,
    Proxy,
    S3Server,
    Timed,
    error_body,
    free_port,
    open_fds,
    wait_until,
)

SIZE = 2304
BIG = 1 << 20
BUSY = Plan(answer=("503 Slow Down", error_body("SlowDown")))
REFUSED = Plan(answer=("403 Forbidden", error_body("InvalidAccessKeyId")))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = S3Server(tmp_path_factory.mktemp("moto"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def bucket(server):
    return server.bucket()


@pytest.fixture
def proxy(server):
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def place(bucket):
    return f"{bucket}/p{uuid.uuid4().hex[:8]}"


@pytest.fixture
def opened(server, proxy, place):
    """Open stores behind the proxy; they are closed once it behaves."""
    stores = []

    def open_store(**options):
        options = server.options(**{"cooldown": 0.2, **options}) | {"endpoint": proxy.endpoint}
        stores.append(open_backend(place, options))
        return stores[-1]

    yield open_store
    proxy.release()
    for store in stores:
        store.close()


def causes(outcome, status):
    assert {Status(int(one)) for one in outcome.status} == {status}, dict(outcome.causes)
    return set(outcome.causes.values())


def test_no_server_at_open(bucket):
    options = {"endpoint": f"http://127.0.0.1:{free_port()}", **KEYS}
    with Timed(5), pytest.raises(UnavailableError, match="cannot be reached"):
        open_backend(bucket, options)


def test_no_answer_at_open(proxy, server, bucket):
    proxy.always = Plan(hold="down")
    options = server.options(request_timeout=0.3) | {"endpoint": proxy.endpoint}
    with Timed(3), pytest.raises(UnavailableError, match="does not answer"):
        open_backend(bucket, options)


def test_refused_credentials(opened, proxy, server, place, caplog):
    caplog.set_level(logging.DEBUG)
    store = opened(cooldown=30)
    put(store, keys(1), [SIZE])
    proxy.always = REFUSED
    with Timed(5):
        words = causes(get(store, keys(40), [SIZE] * 40)[0], Status.BACKEND_ERROR)
    assert all("403 InvalidAccessKeyId; check the credentials" in word for word in words)
    before = proxy.requests
    with Timed(3), pytest.raises(UnavailableError, match=r"InvalidAccessKeyId.*not asked again"):
        store.exists(keys(40), [SIZE] * 40)
    assert proxy.requests == before
    with pytest.raises(UnavailableError, match="InvalidAccessKeyId") as error:
        open_backend(place, server.options() | {"endpoint": proxy.endpoint})
    shown = [repr(store), repr(store.options), str(error.value), str(store.stats()), caplog.text]
    assert not any(KEYS["secret_key"] in text for text in (*shown, *words))


def test_a_dead_server_costs_its_time_once(tmp_path):
    server = S3Server(tmp_path)
    try:
        bucket, names = server.bucket(), keys(200)
        options = server.options(cooldown=2)
        with open_backend(bucket, options) as store:
            put(store, names[:3], [SIZE] * 3)
            server.kill()
            with Timed(10):
                words = causes(put(store, names, [SIZE] * 200), Status.BACKEND_ERROR)
            assert all("cannot be reached" in word for word in words)
            with Timed(3):
                outcome, held = get(store, names, [SIZE] * 200)
            words = causes(outcome, Status.BACKEND_ERROR)
            assert all("not asked again" in word for word in words)
            assert held.buffer.canaries().all()
            with Timed(3), pytest.raises(UnavailableError, match="not asked again"):
                store.exists(names, [SIZE] * 200)
            assert store.stats()["circuit_trips"] == 1
            server.start()
            server.client.create_bucket(Bucket=bucket)
            wait_until(lambda: not store.stats()["circuit_open"], 10, "the circuit closes")
            put(store, names[:3], [SIZE] * 3, "new")
            stored(store, names[:3], [SIZE] * 3, "new")
    finally:
        server.stop()


def test_a_server_killed_in_mid_transfer(tmp_path):
    server = S3Server(tmp_path)
    try:
        bucket, names = server.bucket(), keys(64)
        with open_backend(bucket, server.options(cooldown=0.2)) as store:
            held = filled([[BIG // 4]] * 64, names)
            with store.register([held.region]):
                transfer = store.submit(held.batch(Op.STORE, names))
                wait_until(
                    lambda: store.stats().get("store.objects", 0) >= 4, 20, "some are stored"
                )
                server.kill()
                with Timed(15):
                    outcome = transfer.wait(30)
                assert transfer.done()
            assert 4 <= outcome.ok.sum() < 64
            assert {Status(int(s)) for s in outcome.status} == {Status.OK, Status.BACKEND_ERROR}
            wait_until(lambda: not store.stats()["given_up"], 10, "nothing is under way")
            assert store.stats()["bounce_out_bytes"] == 0
    finally:
        server.stop()


def test_a_stalled_server_is_bounded_and_recovers(opened, proxy):
    store = opened(request_timeout=0.5, threads=4)
    put(store, keys(20), [SIZE] * 20)
    proxy.always = Plan(hold="down")
    with Timed(2), pytest.raises(UnavailableError, match="does not answer"):
        store.exists(keys(20), [SIZE] * 20)
    wait_until(lambda: not store.stats()["circuit_open"], 5, "the load finds out by itself")
    asked = proxy.requests
    with Timed(9):
        outcome, held = get(store, keys(4), [SIZE] * 4)
    assert all("does not answer" in word for word in causes(outcome, Status.BACKEND_ERROR))
    assert proxy.requests > asked + 4
    assert held.buffer.canaries().all()
    proxy.release()
    wait_until(lambda: not store.stats()["circuit_open"], 5, "the circuit closes")
    stored(store, keys(20), [SIZE] * 20)


def test_late_bytes_never_reach_memory_that_is_used_again(opened, proxy):
    store = opened(timeout=1.0, threads=2, cooldown=0.01)
    names = keys(2)
    put(store, names, [BIG] * 2)
    target = Objects([[BIG]])
    proxy.plans = [Plan(hold="down", after=100_000)]
    with store.register([target.region]):
        transfer = store.submit(target.batch(Op.LOAD, names[:1]))
        assert proxy.held.wait(5), "part of the object is on its way"
        outcome = transfer.wait(5)
        expect(outcome, Status.TIMEOUT)
        assert transfer.done(), "the memory is the caller's again"
        assert target.untouched(0)
        target.buffer.view[:] = 0xEE
        # NIXL still holds the buffer that the bytes will land in: nobody else gets it.
        late = store.stats()
        assert late["given_up"] == 1
        assert late["bounce_out_bytes"] >= BIG
        wait_until(lambda: not store.stats()["circuit_open"], 5, "the circuit closes")
        stored(store, names[1:], [BIG])
        with pytest.raises(TransferTimeoutError, match="under way"):
            store.core.wire.close()
        proxy.release()
        wait_until(lambda: not store.stats()["given_up"], 10, "the late bytes arrive")
        assert (target.buffer.view == 0xEE).all(), "late bytes in memory that was handed out again"
    assert store.stats()["bounce_out_bytes"] == 0
    stored(store, names, [BIG] * 2)


def test_a_late_store_never_replaces_a_newer_one(opened, proxy):
    store = opened(timeout=1.0, threads=4, cooldown=0.05)
    name = key("late")
    proxy.plans = [Plan(hold="up", after=100_000)]
    expect(put(store, [name], [BIG], "old"), Status.TIMEOUT)
    assert store.stats()["given_up"] == 1
    wait_until(lambda: not store.stats()["circuit_open"], 5, "the circuit closes")
    # The old bytes may land at any time: a newer store is not OK before they have.
    expect(put(store, [name], [BIG], "new"), Status.TIMEOUT)
    proxy.release()
    wait_until(lambda: not store.stats()["given_up"], 10, "the old store ends")
    expect(put(store, [name], [BIG], "new"), Status.OK)
    stored(store, [name], [BIG], "new")


def test_close_waits_for_what_was_given_up(server, proxy, place):
    options = server.options(timeout=0.5) | {"endpoint": proxy.endpoint}
    store = open_backend(place, options)
    put(store, keys(1), [BIG])
    proxy.plans = [Plan(hold="down", after=100_000)]
    expect(get(store, keys(1), [BIG])[0], Status.TIMEOUT)
    with pytest.raises(TransferTimeoutError, match="close again later"):
        store.close()
    proxy.release()
    store.close()
    store.close()


@pytest.mark.parametrize("after", [0, 100, 200_000])
def test_an_answer_that_is_cut_off_is_fetched_again(opened, proxy, after):
    store = opened()
    names = keys(3)
    put(store, names, [BIG] * 3)
    proxy.plans = [Plan(cut="down", after=after)] * 2
    stored(store, names, [BIG] * 3)
    assert store.stats()["load.retries"] == 2


@pytest.mark.parametrize("after", [0, 200_000])
def test_a_store_that_is_cut_off_is_sent_again(opened, proxy, after):
    store = opened()
    proxy.plans = [Plan(cut="up", after=after)]
    expect(put(store, keys(1), [BIG]), Status.OK)
    assert store.stats()["store.retries"] == 1
    stored(store, keys(1), [BIG])


def test_nothing_half_stored_is_visible(opened, proxy):
    store = opened(retries=0)
    proxy.plans = [Plan(cut="up", after=200_000)]
    expect(put(store, keys(1), [BIG]), Status.BACKEND_ERROR)
    assert store.list_keys() == []
    expect(get(store, keys(1), [BIG])[0], Status.ABSENT)


def test_a_store_whose_answer_was_lost_is_not_sent_again(opened, proxy):
    store = opened()
    proxy.plans = [Plan(lose=True)]
    expect(put(store, keys(1), [SIZE]), Status.OK)
    assert store.stats().get("store.retries", 0) == 0
    stored(store, keys(1), [SIZE])


def test_a_busy_server_is_asked_again(opened, proxy):
    store = opened()
    names, sizes = keys(4), [SIZE] * 4
    proxy.plans = [BUSY] * 3
    expect(put(store, names, sizes), *[Status.OK] * 4)
    proxy.plans = [BUSY] * 3
    stored(store, names, sizes)
    proxy.plans = [BUSY] * 3
    assert store.exists(names, sizes).all()
    assert store.stats()["circuit_trips"] == 0


def test_tries_again_do_not_wait_for_buffers_that_they_hold(opened, proxy):
    store = opened(bounce="128KiB", timeout=8.0)
    names, sizes = keys(6), [60_000] * 6
    proxy.plans = [Plan(cut="up", after=100), Plan(cut="up", after=100)]
    expect(put(store, names, sizes), *[Status.OK] * 6)
    assert store.stats()["store.retries"] == 2
    stored(store, names, sizes)


def test_a_server_that_stays_busy_is_bounded(opened, proxy):
    store = opened(retries=2)
    proxy.always = BUSY
    with Timed(5):
        words = causes(put(store, keys(8), [SIZE] * 8), Status.BACKEND_ERROR)
    assert all("503 SlowDown" in word for word in words)
    proxy.release()
    expect(put(store, keys(1), [SIZE]), Status.OK)


def test_puts_alone_are_refused(opened, proxy):
    # Looking is allowed: the reason can only be told by what was tried.
    store = opened(retries=1)
    proxy.plans = [REFUSED, Plan(), REFUSED, Plan()]
    words = causes(put(store, keys(1), [SIZE]), Status.BACKEND_ERROR)
    assert words == {f"PUT of {SIZE} B failed 2 times, though the server answers"}


def test_a_cancelled_load_lets_go_at_once(opened, proxy):
    store = opened(threads=2, timeout=30.0)
    put(store, keys(8), [BIG] * 8)
    target = Objects([[BIG]] * 8)
    proxy.plans = [Plan(hold="down", after=100_000)] * 2
    with store.register([target.region]):
        transfer = store.submit(target.batch(Op.LOAD, keys(8)))
        assert proxy.held.wait(10)
        transfer.cancel()
        assert transfer.settled(10), "the server is silent, the caller does not wait for it"
        assert transfer.wait(0).counts() == {"CANCELLED": 8}
        assert store.stats()["given_up"] == 2
        proxy.release()
        wait_until(lambda: not store.stats()["given_up"], 10, "the late bytes arrive")
        assert target.buffer.canaries().all()


def test_a_cancelled_store_is_awaited(opened, proxy):
    store = opened(threads=2, timeout=30.0)
    held = filled([[BIG]] * 8, keys(8))
    proxy.plans = [Plan(hold="up", after=100_000)] * 2
    with store.register([held.region]):
        transfer = store.submit(held.batch(Op.STORE, keys(8)))
        assert proxy.held.wait(10)
        transfer.cancel()
        assert not transfer.settled(0.3), "two may become visible: they are not called cancelled"
        proxy.release()
        outcome = transfer.wait(20)
        assert transfer.done()
    assert outcome.counts() == {"OK": 2, "CANCELLED": 6}
    assert store.exists(keys(8), [BIG] * 8).tolist() == outcome.ok.tolist()


def test_requests_at_once_are_bounded(opened, proxy):
    store = opened(threads=3, request_timeout=10)
    names, sizes = keys(60), [SIZE] * 60
    put(store, names, sizes)
    assert store.exists(names, sizes).all()
    wait_until(lambda: not proxy.now, 5, "the proxy's connections end")
    proxy.peak = 0
    proxy.always = Plan(hold="down")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(store.exists, names, sizes)
        wait_until(lambda: proxy.now == 3, 5, "looks are under way")
        assert wait([asked], 0.3).not_done
        assert proxy.peak == 3
        proxy.release()
        assert asked.result(20).all()
    wait_until(lambda: not proxy.now, 5, "the proxy's connections end")
    proxy.peak = 0
    proxy.always = Plan(hold="down")
    target = Objects([[SIZE]] * 60)
    with store.register([target.region]):
        transfers = [store.submit(target.batch(Op.LOAD, names)) for _ in range(3)]
        wait_until(lambda: proxy.now == 3, 5, "requests are under way")
        assert not transfers[0].settled(0.3)
        assert proxy.peak == 3
        proxy.release()
        assert [transfer.wait(20).prefix for transfer in transfers] == [60] * 3


def test_everything_returns_to_where_it_was(server, proxy, place):
    def life():
        options = server.options(timeout=0.5, threads=4, retries=0, cooldown=0.01)
        options |= {"endpoint": proxy.endpoint}
        with open_backend(place, options) as store:
            put(store, keys(3), [BIG] * 3)
            proxy.plans = [Plan(cut="down", after=1000)] * 3
            get(store, keys(6), [BIG] * 6)
            proxy.plans = [Plan(hold="down", after=1000)] * 2
            expect(get(store, keys(1), [BIG])[0], Status.TIMEOUT)
            proxy.release()
            wait_until(lambda: not store.stats()["circuit_open"], 5, "the circuit closes")
            assert store.exists(keys(9), [BIG] * 9).sum() == 3

    def counts():
        return open_fds(), len([t for t in threading.enumerate() if "kvconnect" in t.name])

    life()
    wait_until(lambda: proxy.now == 0, 5, "the proxy's connections end")
    before = counts()
    for _ in range(2):
        life()
    wait_until(lambda: proxy.now == 0, 5, "the proxy's connections end")
    wait_until(lambda: counts() <= before, 5, f"{counts()} after, {before} before")
