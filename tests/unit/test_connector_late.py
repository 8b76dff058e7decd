"""Transfers that come late: their pages are held, and they never count."""

import time

import pytest

from kvconnect.errors import TransferTimeoutError
from kvconnect.memory import MemoryBackend
from kvconnect.wrappers import Delayed
from tests.unit.attached import attach, filled, hashes, same, wait_for


@pytest.fixture
def delayed():
    with Delayed(MemoryBackend(), obeys_cancel=False) as delayed:
        yield delayed


def test_a_load_that_completes_after_its_time_never_counts_and_its_pages_are_held(one, delayed):
    with attach(one, delayed) as connector:
        content = filled(one, connector, 4)
        with delayed.held():
            got = connector.get(hashes(0, 1), [4, 5], timeout=0.02)
            assert got.counts() == {"TIMEOUT": 2}
            assert got.nbytes == 0
            assert got.dirty.all()
            assert connector.quarantined() == [4, 5]
            assert connector.stats()["quarantined.pages"] == 2
            for call in (connector.put, connector.get):
                with pytest.raises(TransferTimeoutError, match=r"\[5\] are still held"):
                    call(hashes(7), [5])
        wait_for(lambda: not connector.quarantined())
        # The late bytes did land: exactly why the pages were not to be used before.
        assert same(one.read([4, 5]), {n: v[:2] for n, v in content.items()})
        assert connector.stats().get("get.ok", 0) == 0
        assert connector.get(hashes(0, 1), [4, 5]).ok.all()


def test_a_late_staged_load_touches_no_page_and_holds_none(one, delayed):
    with attach(one, delayed, want="staged") as connector:
        content = filled(one, connector, 4)
        before = one.snapshot()
        with delayed.held():
            got = connector.get(hashes(0, 1), [4, 5], timeout=0.02)
            assert got.counts() == {"TIMEOUT": 2}
            assert not got.dirty.any()
            assert connector.quarantined() == []
        wait_for(lambda: connector._mover.drain(0))
        assert one.untouched_outside([], before)
        assert connector.get(hashes(0, 1), [4, 5]).ok.all()
        assert same(one.read([4, 5]), {n: v[:2] for n, v in content.items()})


def test_a_store_that_hangs_holds_the_pages_it_reads(one, delayed):
    with attach(one, delayed) as connector:
        with delayed.held():
            put = connector.put(hashes(0), [3], timeout=0.02)
            assert put.counts() == {"TIMEOUT": 1}
            assert connector.quarantined() == [3]
        wait_for(lambda: not connector.quarantined())
        assert connector.put(hashes(0), [3]).ok.all()


def test_a_call_takes_no_longer_than_its_time(one, delayed):
    with attach(one, delayed, batch_bytes=384) as connector:
        with delayed.held():
            started = time.monotonic()
            connector.get(hashes(*range(8)), range(8), timeout=0.1)
            assert time.monotonic() - started < 5
        wait_for(lambda: not connector.quarantined())


# Data that is damaged or lies.
