"""The presence table of a store: what `exists` says, against a dict and against the entries."""

import random
import time
from pathlib import Path

import pytest

from kvconnect.backend import Op
from kvconnect.testing.peer import Peer
from kvconnect.testing.suite.base import filled, keys, move, put
from kvconnect_nvme import open_backend, presence_file
from kvconnect_nvme.entry import rows
from kvconnect_nvme.keys import pack_all
from tests.backends.presence_checks import (
    OPTIONS,
    SIZES,
    agree,
    files,
    settle,
    state,
    table,
    words_of,
)


@pytest.fixture
def location(tmp_path):
    return str(tmp_path / "store")


@pytest.fixture
def small_tables(monkeypatch):
    monkeypatch.setattr(presence_file, "SMALLEST", 1)


@pytest.mark.parametrize("seed", range(4))
def test_random_histories(location, small_tables, seed):
    rng, there = random.Random(seed), {}
    own, odd = keys(150), [f"name {n}" for n in range(30)]
    names = own + odd
    options = OPTIONS | {"capacity": "32MiB"}
    with open_backend(location, options) as store, open_backend(location, options) as other:
        for _ in range(60):
            at = rng.choice([store, other])
            some = rng.sample(names, rng.randint(1, 40))
            what = rng.choice(["put", "put", "put", "pin", "ttl", "remove", "clear", "nothing"])
            size = rng.choice(SIZES)
            if what in {"put", "pin", "ttl"}:
                how = {"pin": {"pin": True}, "ttl": {"ttl": 1000.0}}.get(what, {})
                held = filled([[size]] * len(some), some)
                with at.register([held.region]):
                    assert move(at, held.batch(Op.STORE, some, **how)).prefix == len(some)
                there.update(dict.fromkeys(some, size))
            elif what == "remove":
                assert at.remove(some).tolist() == [name in there for name in some]
                for name in some:
                    there.pop(name, None)
            elif what == "clear" and rng.random() < 0.3:
                prefix = rng.choice(["name", own[0][:16]])
                gone = [name for name in there if name.startswith(prefix)]
                assert at.clear(prefix) == len(gone)
                for name in gone:
                    del there[name]
            agree(rng.choice([store, other]), names, there)
        assert state(store) == "complete"
        assert store.verify().unlisted == 0
        assert sorted(store.list_keys()) == sorted(there)
    with open_backend(location, options) as store:
        agree(store, names, there)


def test_eviction_is_seen(location):
    with open_backend(location, {"capacity": "512KiB", "durability": "none"}) as store:
        for n in range(40):
            names = keys(10, str(n))
            put(store, names, [4096] * 10)
        assert store.stats()["evicted"] > 200
        every = [name for n in range(40) for name in keys(10, str(n))]
        alive = set(store.list_keys())
        assert store.exists(every, [4096] * 400).tolist() == [name in alive for name in every]


def test_an_expiry_passes_and_is_prolonged(location):
    with open_backend(location, OPTIONS) as store:
        names = keys(4)
        held = filled([[100]] * 4, names)
        with store.register([held.region]):
            move(store, held.batch(Op.STORE, names, ttl=0.2))
            assert store.exists(names, [100] * 4).all()
            settle(store)
            assert store.exists(names, [100] * 4).all()
        assert put(store, names[:1], [100]).prefix == 1  # the same bytes, for ever
        time.sleep(0.25)
        assert store.exists(names, [100] * 4).tolist() == [True, False, False, False]
        settle(store)
        assert store.exists(names, [100] * 4).tolist() == [True, False, False, False]


def test_an_aborted_transaction_leaves_no_trace(location):
    with open_backend(location, OPTIONS) as store:
        names = keys(20)
        put(store, names, [100] * 20)

        def fail(session):
            for packed in pack_all(names):
                assert store.core.index(session).delete(packed)
            raise KeyError

        for _ in range(2):
            with pytest.raises(KeyError):
                store.core.env.write(fail)
            agree(store, names, dict.fromkeys(names, 100))
        settle(store)
        agree(store, names, dict.fromkeys(names, 100))


def test_two_changes_in_one_transaction(location):
    with open_backend(location, OPTIONS) as store:
        one, two = keys(2)
        put(store, [one, two], [100, 100])

        def change(session):
            index = store.core.index(session)
            (first, second), entry = pack_all([one, two]), index.find(pack_all([one])[0])
            index.delete(first)
            index.hold(1, index.take(index.fit(4096), 4096))
            index.publish([first], rows([entry]))
            index.delete(first)
            index.publish([first], rows([entry]))
            index.publish([second], rows([entry]))
            index.delete(second)

        store.core.env.write(change)
        for _ in range(2):
            assert store.exists([one, two], [100, 100]).tolist() == [True, False]
            settle(store)


def test_a_kill_half_way_through_applying(location):
    with open_backend(location, OPTIONS) as store:
        old, new = keys(30, "old"), keys(30, "new")
        put(store, old, [100] * 30)
        settle(store)
        there, gone = words_of(store, new, 100), words_of(store, old, 100)

        def replace(session):
            index = store.core.index(session)
            for before, after in zip(pack_all(old), pack_all(new), strict=True):
                entry = index.find(before)
                index.delete(before)
                index.publish([after], rows([entry]))

        store.core.env.write(replace)
        expected = dict.fromkeys(new, 100)
        agree(store, old + new, expected)
        # What a killed writer may have done of it: some of the words, in any order.
        table(store).remove(gone[5:15])
        assert table(store).add(there[10:12])
        agree(store, old + new, expected)
        settle(store)
        agree(store, old + new, expected)
        assert table(store).count() == 30


def test_growth_while_another_process_reads(location, small_tables):
    peer_of = ("kvconnect_nvme:open_backend", location, OPTIONS)
    with open_backend(location, OPTIONS) as store, Peer(*peer_of) as peer:
        done, sizes = [], []
        for n in range(40):
            names = keys(30, str(n))
            absent = keys(30, f"no {n}")
            peer.send("exists", keys=done + absent, sizes=sizes + [100] * 30)
            put(store, names, [100] * 30)
            assert peer.receive()["found"] == [True] * len(done) + [False] * 30
            done, sizes = done + names, sizes + [100] * 30
        assert table(store).rows.size >= 1200
        assert len(files(location)) == 1
        assert state(store) == "complete"


def test_nothing_leaks(location, small_tables):
    def open_things():
        maps = Path("/proc/self/maps").read_text().count("presence-")
        return len(list(Path("/proc/self/fd").iterdir())), maps

    with open_backend(location, OPTIONS) as store:
        put(store, keys(1, "warm"), [100])
    before = open_things()
    for turn in range(3):
        with open_backend(location, OPTIONS) as store:
            for n in range(10):
                put(store, keys(100, f"{turn} {n}"), [100] * 100)
                store.exists(keys(5), [100] * 5)
            assert open_things()[1] == 1, "one map, however often it grew"
    assert open_things() == before
