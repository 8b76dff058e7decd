"""Counters by reason; a failed transfer has no bytes, no time and so no rate (case 27)."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.backend import Outcome, Status
from kvconnect.metrics import Metrics


def outcome(*statuses, each=100):
    status = np.array(statuses, dtype=np.uint8)
    return Outcome(status, each * int((status == Status.OK).sum()))


def test_pages_are_counted_by_reason():
    metrics = Metrics()
    metrics.observe("get", outcome(0, 0, 1, 3, 5, 10), 2.0)
    assert metrics.snapshot() == {
        "get.calls": 1,
        "get.ok": 2,
        "get.absent": 1,
        "get.checksum": 1,
        "get.timeout": 1,
        "get.partial": 1,
        "get.bytes": 200,
        "get.seconds": 2.0,
        "get.rate": 100.0,
    }


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.OK])
def test_a_failed_call_has_no_bytes_no_seconds_and_no_rate(status):
    metrics = Metrics()
    metrics.observe("put", outcome(status, status), 3.0)
    assert metrics.snapshot() == {"put.calls": 1, f"put.{status.name.lower()}": 2}


def test_failed_calls_do_not_slow_the_rate_of_good_ones():
    metrics = Metrics()
    metrics.observe("get", outcome(0), 0.5)
    metrics.observe("get", outcome(5), 100.0)
    assert metrics.snapshot()["get.rate"] == 200.0


def test_no_time_is_no_rate():
    metrics = Metrics()
    metrics.observe("get", outcome(0), 0.0)
    assert "get.rate" not in metrics.snapshot()


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "get"]),
            st.lists(st.sampled_from(list(Status)), max_size=4),
            st.floats(0.001, 10),
        ),
        max_size=6,
    )
)
def test_sums_add_up(calls):
    metrics = Metrics()
    for op, statuses, seconds in calls:
        metrics.observe(op, outcome(*statuses), seconds)
    values = metrics.snapshot()
    for op in ("put", "get"):
        mine = [(statuses, seconds) for name, statuses, seconds in calls if name == op]
        moved = [(s.count(Status.OK) * 100, t) for s, t in mine if Status.OK in s]
        assert values.get(f"{op}.calls", 0) == len(mine)
        assert values.get(f"{op}.bytes", 0) == sum(n for n, _ in moved)
        for status in Status:
            count = sum(s.count(status) for s, _ in mine)
            assert values.get(f"{op}.{status.name.lower()}", 0) == count
        if moved:
            rate = sum(n for n, _ in moved) / sum(t for _, t in moved)
            assert values[f"{op}.rate"] == pytest.approx(rate)


def test_a_snapshot_is_a_copy():
    metrics = Metrics()
    metrics.add("x", 2)
    metrics.snapshot()["x"] = 9
    assert metrics.snapshot() == {"x": 2}


def test_threads_lose_no_count():
    metrics = Metrics()
    threads = [
        threading.Thread(target=lambda: [metrics.add("n") for _ in range(2000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert metrics.snapshot() == {"n": 8000}
