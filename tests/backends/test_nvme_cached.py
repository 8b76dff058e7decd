"""Loads through the page cache: what is in memory is copied at once, the rest read as ever."""

import errno
import os

import pytest

from kvconnect.testing.suite.base import keys, put, stored
from kvconnect_nvme import open_backend

MIB = 1 << 20
NAMES, SIZES = keys(24), [MIB] * 24


class Calls:
    """Every preadv: its flags, and how it ended."""

    def __init__(self):
        self.ended, self.refused = [], False
        self._call = os.preadv

    def __call__(self, fd, buffers, offset, flags=0):
        if flags and self.refused:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        try:
            count = self._call(fd, buffers, offset, flags)
        except BlockingIOError:
            self.ended.append((flags, None))
            raise
        self.ended.append((flags, count))
        return count

    def of(self, flags):
        return [count for given, count in self.ended if given == flags]


@pytest.fixture
def calls(monkeypatch):
    calls = Calls()
    monkeypatch.setattr(os, "preadv", calls)
    return calls


@pytest.fixture
def store(tmp_path):
    options = {"capacity": "32MiB", "direct": "off"}
    with open_backend(str(tmp_path / "store"), options) as store:
        assert put(store, NAMES, SIZES).prefix == len(NAMES)
        yield store


def forget(folder, offset, nbytes):
    """Have the kernel drop a range of the only slab from the page cache."""
    fd = os.open(folder / "store" / "slab-0000.dat", os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def test_what_is_cached_is_read_in_one_pass(store, calls):
    stored(store, NAMES, SIZES)
    assert calls.of(0) == []
    assert sum(calls.of(os.RWF_NOWAIT)) == sum(SIZES)


def test_what_was_dropped_is_read_from_disk_and_only_that(store, calls, tmp_path):
    forget(tmp_path, 0, 8 * MIB)
    stored(store, NAMES, SIZES)
    assert None in calls.of(os.RWF_NOWAIT), "the kernel still had it in memory"
    # Below 8 MiB where the kernel's read-ahead was there before a busy machine asked.
    assert 0 < sum(calls.of(0)) <= 16 * MIB
    forget(tmp_path, 0, 0)
    stored(store, NAMES, SIZES)


def test_a_file_that_cannot_say_is_read_as_ever(store, calls):
    calls.refused = True
    stored(store, NAMES, SIZES)
    assert sum(calls.of(0)) == sum(SIZES)


def test_the_engine_is_chosen_without_a_probe(store):
    stats = store.stats()
    assert (stats["io"], stats["io_reason"]) == ("threads", "the page cache is in between")
