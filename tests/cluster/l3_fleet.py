"""Workers on stores as processes on the hosts of a cluster, driven by the test."""

import time

import msgspec

from kvconnect.testing.cluster.l3_messages import WorkerConfig
from kvconnect.testing.cluster.pd_rank_driver import Driven

GEOMETRY = {
    "layers": 4, "heads": 4, "head_dim": 64, "v_head_dim": 32, "dtype": "int16", "page_size": 16,
    "layout": "page_head", "tp_sizes": (1, 2), "pages": 24, "seed": 7, "universe": 40,
    "roles": ("write", "read"), "batch": 8, "deadline": 3.0, "grace": 1.5,
}  # fmt: skip
PAGE = 16 * 4 * 4 * 96 * 2  # bytes: 16 slots, 4 layers, 4 heads of 64 + 32 elements of 2 B


def config(name, url, **settings):
    return WorkerConfig(**GEOMETRY | {"name": name, "group": name, "url": url} | settings)


def begin(host, told, env=None):
    """Start a worker and do not wait for its store; `answer(0)` does."""
    argv = [host.python, "-m", "kvconnect.testing.cluster.l3_worker"]
    worker = Driven(host.spawn(argv, name=told.name, env=env))
    worker.process.send(msgspec.json.encode(told).decode())
    return worker


def start(host, told, timeout=60.0, env=None):
    """Start a worker and wait until its store is open."""
    worker = begin(host, told, env)
    assert worker.answer(0, timeout) == {"ready": told.name}
    return worker


def group(host, name, url, size, **settings):
    """Start all ranks of a group."""
    shared = {"group": name, "tp_size": size} | settings
    ranks = [
        begin(host, config(f"{name}-{rank}", url, tp_rank=rank, **shared)) for rank in range(size)
    ]
    for rank in ranks:
        rank.answer(0, 60.0)
    return ranks


def make(worker, op, ids, timeout=15.0):
    """Make one call and return its event."""
    worker.ask(op, timeout, ids=list(ids))
    return worker.calls[-1]


def until(worker, op, ids, good, seconds, every=0.2):
    """Make the call until it is `good`; returns all its events, the good one last."""
    end, calls = time.monotonic() + seconds, []
    while True:
        calls.append(make(worker, op, ids))
        if good(calls[-1]):
            return calls
        assert time.monotonic() < end, f"not in {seconds} s: {calls[-1]}"
        time.sleep(every)


def lawful(call, grace=1.5):
    """Whether a call broke none of the rules that hold whatever the store does."""
    in_time = call.seconds <= call.deadline + grace
    return in_time and (call.wrong, call.reused, call.error) == ((), (), "")
