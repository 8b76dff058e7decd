"""The async view: the same results, an event loop that never waits, and a clean end."""

import asyncio
import threading

import pytest

import kvconnect
from kvconnect.aio import AsyncConnector
from kvconnect.errors import ClosedError, ConfigError, PageIndexError
from kvconnect.memory import MemoryBackend
from kvconnect.wrappers import Delayed
from tests.unit.attached import attach, hashes, same, wait_for
from tests.unit.held_pools import held


@pytest.fixture
def one():
    return held("cplshd", pages=8)


def run(work, one, wrap=lambda store: store, **options):
    """Run `work(view, store)` on a view of a fresh connector; both are closed afterwards."""

    async def main():
        with wrap(MemoryBackend()) as store:
            async with AsyncConnector(attach(one, store), **options) as view:
                await asyncio.wait_for(work(view, store), 30)

    asyncio.run(main())


async def until(condition):
    """Poll, as the backend's own threads have no event to tell a loop."""
    async with asyncio.timeout(20):
        while True:
            if condition():
                return
            await asyncio.sleep(0.001)


def test_every_call_does_what_the_connectors_does(one):
    async def work(view, store):
        content = one.random(2)
        one.write([0, 1], content)
        put = await view.put(hashes(0, 1), [0, 1], ttl=100.0, pin=True, timeout=5.0)
        assert (put.ok.all(), put.nbytes) == (True, 2 * one.pool.page_nbytes)
        assert store.stats()["pinned"] == 2
        assert (await view.exists(hashes(0, 1, 2))).pages.tolist() == [True, True, False]
        assert (await view.why("page0")).startswith("hit: 1 of 1")
        got = await view.get(hashes(0, 1, 2), [5, 6, 7], timeout=5.0)
        assert got.ok.tolist() == [True, True, False]
        assert same(one.read([5, 6]), content)
        assert (await view.remove(hashes(0, 2))).pages.tolist() == [True, False]
        assert await view.clear() == 1
        assert not (await view.exists(hashes(0, 1))).pages.any()

    run(work, one)


def test_errors_of_a_call_reach_the_await(one):
    async def work(view, store):
        with pytest.raises(PageIndexError):
            await view.put(hashes(0), [8])
        with pytest.raises(ConfigError):
            await view.get(hashes(0, 1), [0])
        assert (await view.put(hashes(0), [0])).ok.all()

    run(work, one)


def test_the_loop_runs_on_while_calls_wait(one):
    """Four stores hang; the loop opens the gate itself, which it could not if it waited."""

    async def work(view, delayed):
        delayed.hold()
        puts = [asyncio.create_task(view.put([f"p{n}"], [n])) for n in range(4)]
        await until(lambda: delayed.waiting == 4)
        assert not any(task.done() for task in puts)
        delayed.release()
        assert all(outcome.ok.all() for outcome in await asyncio.gather(*puts))

    run(work, one, Delayed)


@pytest.mark.parametrize("threads", [1, 3])
def test_at_most_so_many_calls_are_under_way(one, threads):
    async def work(view, delayed):
        delayed.hold()
        puts = [asyncio.create_task(view.put([f"p{n}"], [n])) for n in range(6)]
        await until(lambda: delayed.waiting == threads)
        await asyncio.sleep(0.02)
        assert delayed.waiting == threads
        delayed.release()
        assert all(outcome.ok.all() for outcome in await asyncio.gather(*puts))

    run(work, one, Delayed, threads=threads)


def test_a_cancelled_await_does_not_cancel_the_transfer(one):
    """Its page stays leased until the transfer ends; then the object is there."""

    async def work(view, delayed):
        delayed.hold()
        put = asyncio.create_task(view.put(hashes(0), [0]))
        await until(lambda: delayed.waiting)
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
        assert view.connector._active == 1
        delayed.release()
        await until(lambda: not view.connector._active)
        assert (await view.exists(hashes(0))).prefix == 1

    run(work, one, Delayed)


def test_many_calls_at_once_come_back_right(one):
    async def work(view, store):
        content = one.random(8)
        one.write(range(8), content)
        await asyncio.gather(*(view.put([f"p{n}"], [n]) for n in range(8)))
        order = [3, 1, 4, 0, 5, 7, 2, 6]
        got = await asyncio.gather(
            *(view.get([f"p{n}"], [at]) for n, at in zip(range(8), order, strict=True))
        )
        assert all(outcome.ok.all() for outcome in got)
        assert same(one.read(order), content)

    run(work, one)


def test_closing_twice_ends_the_threads_and_refuses_calls(one):
    async def main():
        store = MemoryBackend()
        view = AsyncConnector(attach(one, store))
        await view.put(hashes(0), [0])
        await view.close()
        await view.close()
        assert store._registrations.regions == ()
        for call in (view.put(hashes(0), [0]), view.exists(hashes(0)), view.clear()):
            with pytest.raises(ClosedError):
                await call
        store.close()

    asyncio.run(main())
    wait_for(lambda: not any("kvconnect-aio" in t.name for t in threading.enumerate()))


def test_the_public_name_is_this_class():
    assert kvconnect.AsyncConnector is AsyncConnector
