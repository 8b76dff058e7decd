"""Keys and records: removing, listing and clearing, one namespace at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvconnect import backend as protocols
from kvconnect.backend import (
    Backend,
    SupportsClear,
    SupportsDelete,
    SupportsListing,
    SupportsLocate,
    SupportsRecords,
    SupportsStats,
)
from kvconnect.errors import ClosedError
from kvconnect.testing.suite.base import SuiteBase, content, get, key, keys, needs, put, stored


class Namespaces(SuiteBase):
    """The optional protocols; each flag says that the backend has one."""

    deletes = True
    lists = True
    clears = True
    keeps_records = True
    has_stats = True
    locates = False
    """Objects are ranges of files that anybody may read."""

    def test_abilities_are_as_declared(self, store: Backend) -> None:
        declared = {
            SupportsDelete: self.deletes,
            SupportsListing: self.lists,
            SupportsClear: self.clears,
            SupportsRecords: self.keeps_records,
            SupportsStats: self.has_stats,
            SupportsLocate: self.locates,
        }
        known = {v for name, v in vars(protocols).items() if name.startswith("Supports")}
        assert known == set(declared), "a protocol that the suite does not know"
        for protocol, has in declared.items():
            assert isinstance(store, protocol) == has, protocol.__name__

    @needs("deletes")
    def test_remove(self, store: Backend) -> None:
        assert isinstance(store, SupportsDelete)
        names, sizes = keys(3), [2304] * 3
        put(store, names, sizes)
        assert store.remove([names[1], key("never")]).tolist() == [True, False]
        assert store.exists(names, sizes).tolist() == [True, False, True]
        assert store.remove([names[1]]).tolist() == [False]
        assert store.remove([]).shape == (0,)
        outcome, _ = get(store, names, sizes)
        assert outcome.prefix == 1
        put(store, names, sizes, "again")
        stored(store, names[1:2], [2304], "again")

    @needs("lists")
    def test_list(self, store: Backend) -> None:
        assert isinstance(store, SupportsListing)
        assert store.list_keys() == []
        ours, theirs = keys(5, "llama"), keys(3, "llama-2")
        put(store, ours + theirs, [64] * 8)
        assert store.list_keys() == sorted(ours + theirs)
        assert store.list_keys(ours[0][:16]) == sorted(ours)
        assert store.list_keys(theirs[0][:16]) == sorted(theirs)
        assert store.list_keys(theirs[1]) == [theirs[1]]
        assert store.list_keys("~") == []

    @needs("clears")
    def test_clear_touches_one_namespace(self, store: Backend, tmp_path: Path) -> None:
        assert isinstance(store, SupportsClear)
        readme = tmp_path / "README"  # case 21: a stray file is nobody's object
        readme.write_text("not yours", encoding="utf-8")
        ours, theirs = keys(20, "llama"), keys(20, "llama-2")
        put(store, ours + theirs, [512] * 40)
        assert store.clear(ours[0][:16]) == 20
        assert not store.exists(ours, [512] * 20).any()
        stored(store, theirs, [512] * 20)
        assert store.clear(ours[0][:16]) == 0
        assert readme.read_text(encoding="utf-8") == "not yours"
        put(store, ours, [512] * 20, "again")
        stored(store, ours, [512] * 20, "again")

    @needs("clears")
    def test_clear_of_neighbouring_prefixes(self, store: Backend) -> None:
        # Range ends computed by bytes go wrong at the largest one.
        assert isinstance(store, SupportsClear)
        names = [head + "0" * (64 - len(head)) for head in ("ab", "abf", "ac", "b", "f" * 16, "a")]
        put(store, names, [64] * 6)
        assert store.clear("ab") == 2
        assert store.exists(names, [64] * 6).tolist() == [False, False, True, True, True, True]
        assert store.clear("f" * 16) == 1
        assert store.exists(names, [64] * 6).tolist() == [False, False, True, True, False, True]

    @needs("clears")
    def test_clear_of_everything_is_refused(self, store: Backend) -> None:
        assert isinstance(store, SupportsClear)
        put(store, keys(1), [64])
        with pytest.raises(ValueError, match="prefix"):
            store.clear("")
        stored(store, keys(1), [64])

    @needs("keeps_records")
    def test_records(self, store: Backend) -> None:
        assert isinstance(store, SupportsRecords)
        assert store.records() == {}
        store.put_record("one", b"first")
        store.put_record("two", b"")
        store.put_record("one", bytes(range(256)) * 256)
        assert store.records() == {"one": bytes(range(256)) * 256, "two": b""}
        with pytest.raises(ValueError, match="65537"):
            store.put_record("three", bytes((64 << 10) + 1))
        assert set(store.records()) == {"one", "two"}

    @needs("keeps_records")
    def test_records_are_no_keys(self, store: Backend) -> None:
        assert isinstance(store, SupportsRecords)
        name = key("both")
        store.put_record(name, b"record")
        assert not store.exists([name], [6]).any()
        put(store, [name], [64])
        assert store.records() == {name: b"record"}
        if isinstance(store, SupportsListing):
            assert store.list_keys() == [name]

    @needs("has_stats")
    def test_stats(self, store: Backend) -> None:
        assert isinstance(store, SupportsStats)
        put(store, keys(3), [2304] * 3)
        numbers = store.stats()
        assert numbers
        assert all(type(v) in {int, float, str} for v in numbers.values())
        assert all(isinstance(name, str) for name in numbers)

    @needs("locates")
    def test_locate(self, store: Backend) -> None:
        assert isinstance(store, SupportsLocate)
        names, sizes = keys(3), [2304, 4096, 70_000]
        put(store, names, sizes)
        found = store.locate([names[2], key("never"), names[0], names[1]])
        assert found[1] is None
        for name, nbytes, place in zip(
            (names[2], names[0], names[1]),
            (sizes[2], sizes[0], sizes[1]),
            (found[0], found[2], found[3]),
            strict=True,
        ):
            assert place is not None
            assert place.intact is not False
            assert (place.nbytes, place.pinned, place.expires) == (nbytes, False, None)
            with Path(place.path).open("rb") as file:
                file.seek(place.offset)
                assert file.read(nbytes) == content(name, nbytes)
        assert store.locate([]) == []

    def test_abilities_end_with_close(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as store:
            pass
        calls: list[Callable[[], object]] = []
        if isinstance(store, SupportsDelete):
            calls.append(partial(store.remove, keys(1)))
        if isinstance(store, SupportsListing):
            calls.append(partial(store.list_keys, ""))
        if isinstance(store, SupportsClear):
            calls.append(partial(store.clear, "ab"))
        if isinstance(store, SupportsRecords):
            calls += [partial(store.put_record, "a", b""), store.records]
        if isinstance(store, SupportsLocate):
            calls.append(partial(store.locate, keys(1)))
        for call in calls:
            with pytest.raises(ClosedError):
                call()
