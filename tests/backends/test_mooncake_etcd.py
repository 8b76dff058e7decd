"""Masters found through etcd: the leader dies, the store goes on in the same process."""

import logging
import threading
import time

import pytest

from kvconnect.errors import UnavailableError
from kvconnect.testing.suite import keys
from kvconnect.testing.suite.base import put, stored
from kvconnect_mooncake import open_backend
from kvconnect_mooncake.address import parse_address
from kvconnect_mooncake.admin import parse_admin

from .mooncake_ha import Candidate, Etcd
from .mooncake_master import LEASE, wait_for

SIZE = 64 << 10


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    with Etcd(tmp_path_factory.mktemp("etcd") / "one") as one:
        yield one


@pytest.fixture(scope="module")
def masters(tmp_path_factory, etcd):
    folder = tmp_path_factory.mktemp("masters")
    with Candidate(folder / "a", etcd) as one, Candidate(folder / "b", etcd) as other:
        yield one, other


def leader(masters):
    """Return the master that serves, None while none does."""
    return next((one for one in masters if one.state() == "serving"), None)


def opened(etcd, masters):
    """Open a store; the first etcd that it is told of is not there."""
    admin = ";".join(one.admin for one in masters)
    fixed = {"lease": str(LEASE), "breaker": "2", "rpc_timeout": "3", "close_timeout": "2"}
    location = f"etcd://127.0.0.1:1;127.0.0.1:{etcd.port}"
    return open_backend(location, {**fixed, "admin": admin})


class Pulse:
    """Notices how long no other thread of this process could run."""

    def __init__(self):
        self.longest, self._end = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def _beat(self):
        last = time.monotonic()
        while not self._end.wait(0.01):
            now = time.monotonic()
            self.longest, last = max(self.longest, now - last), now

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._end.set()
        self._thread.join()


def test_the_leader_dies(etcd, masters, caplog):
    first = wait_for(lambda: leader(masters), 30, "a leader")
    first.owner()
    store, names, sizes = opened(etcd, masters), keys(64), [SIZE] * 64
    assert put(store, names, sizes).prefix == 64
    assert store.list_keys() == sorted(names)
    first.kill()
    begin = time.monotonic()
    with pytest.raises(UnavailableError, match=f"{first.admin}.*; .*on standby"):
        store.list_keys()
    with pytest.raises(UnavailableError):
        store.exists(names, sizes)
    assert time.monotonic() - begin < 5, "the first call takes rpc_timeout"
    quick = time.monotonic()
    for _ in range(10):
        with pytest.raises(UnavailableError, match="did not answer"):
            store.exists(names, sizes)
    assert time.monotonic() - quick < 1, "later calls fail fast"
    wait_for(lambda: found(store, names, sizes), 30, "recovery")
    took = time.monotonic() - begin
    assert took < 30
    stored(store, names, sizes)
    assert store.list_keys() == sorted(names)
    more = keys(8, "later")
    wait_for(lambda: put(store, more, sizes[:8]).prefix == 8, 20, "stores")
    stored(store, more, sizes[:8])
    closes_in_time(store, caplog)
    print(f"recovered in {took:.1f} s")


def found(store, names, sizes):
    """Tell whether every object is there."""
    try:
        return store.exists(names, sizes).all()
    except UnavailableError:
        return False


def closes_in_time(store, caplog):
    """Close; the library itself takes up to 30 s, in which it would let no thread run."""
    with Pulse() as pulse, caplog.at_level(logging.WARNING, "kvconnect.mooncake"):
        begin = time.monotonic()
        store.close()
        assert time.monotonic() - begin < 6
        store.close()
    assert "still leaving the store" in caplog.text
    assert pulse.longest < 2


def test_who_lists_is_remembered():
    etcd = parse_address("etcd://a:1;b:2")
    assert parse_admin(None, etcd).places == ()
    assert parse_admin("a:1; b:2", etcd).places == (("a", 1), ("b", 2))
