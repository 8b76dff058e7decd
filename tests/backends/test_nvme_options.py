"""Keys of any shape, and options: what is wrong says what would be right."""

import threading
import time

import pytest

from kvconnect.errors import ConfigError, TransferTimeoutError
from kvconnect.testing.suite.base import put, stored
from kvconnect_nvme import maintenance, open_backend
from kvconnect_nvme.slabs import DEVICE_BASE, Slabs


@pytest.fixture
def location(tmp_path):
    return str(tmp_path / "store")


@pytest.fixture
def store(location):
    with open_backend(location, {"capacity": "8MiB"}) as store:
        yield store


@pytest.mark.parametrize("name", ["a", "AB", "abc", "ab cd", "ключ", "x" * 256, "0" * 255])
def test_any_key_works(store, name):
    put(store, [name, "other"], [100, 50])
    assert store.exists([name, name], [100, 99]).tolist() == [True, False]
    assert store.list_keys(name[:1]) == [name]
    stored(store, [name], [100])
    assert store.clear(name) == 1
    assert store.list_keys() == ["other"]


def test_keys_that_only_differ_in_case_are_two(store):
    put(store, ["ab", "AB", "aB"], [10, 11, 12])
    assert store.list_keys() == ["AB", "aB", "ab"]
    assert store.list_keys("a") == ["aB", "ab"]
    assert store.exists(["ab", "AB", "aB"], [10, 11, 12]).all()


@pytest.mark.parametrize("name", ["", "x" * 257, "й" * 256, "\ud800"])
def test_impossible_keys_are_refused(store, name):
    with pytest.raises(ConfigError, match="key"):
        store.exists([name], [1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "capacity="),
        ({"capacity": "8MiB", "capcity": "1"}, "did you mean capacity"),
        ({"capacity": "1"}, "4096"),
        ({"capacity": "8MiB", "direct": "False"}, "auto, on, off"),
        ({"capacity": "8MiB", "high": "0.5", "low": "0.6"}, "low=0.6"),
        ({"capacity": "8MiB", "index": "/tmp/x"}, "block device"),
        ({"capacity": "8MiB", "io_threads": "0"}, "io_threads=0"),
        ({"capacity": "8MiB", "timeout": "inf"}, "timeout"),
    ],
)
def test_wrong_options_say_what_is_right(location, options, words):
    with pytest.raises(ConfigError, match=words):
        open_backend(location, options)


def test_a_device_is_one_range_whatever_the_slab(tmp_path):
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(8192))
    with Slabs(disk, 4096, "off", device=True) as slabs:
        places = [slabs.locate(address) for address in (0, 4096, 8192)]
        assert [offset - DEVICE_BASE for _, offset in places] == [0, 4096, 8192]
        assert len({fd for fd, _ in places}) == 1


def test_close_does_not_take_the_files_from_verify(location, monkeypatch):
    entered, leave = threading.Event(), threading.Event()

    def slow(_core, _home):
        entered.set()
        leave.wait(10)

    monkeypatch.setattr(maintenance, "verify", slow)
    store = open_backend(location, {"capacity": "8MiB", "timeout": "0.1"})
    thread = threading.Thread(target=store.verify)
    thread.start()
    assert entered.wait(10)
    begin = time.monotonic()
    with pytest.raises(TransferTimeoutError, match="verify or compact"):
        store.close()
    assert time.monotonic() - begin < 5
    leave.set()
    thread.join(10)
    store.close()


def test_a_capacity_that_the_disk_cannot_hold_is_said_at_open(tmp_path, caplog):
    caplog.set_level("INFO", logger="kvconnect.nvme")
    with open_backend(str(tmp_path / "small"), {"capacity": "1MiB"}):
        assert "0 of 1048576 B" in caplog.text
        assert not [r for r in caplog.records if r.levelname == "WARNING"]
    with open_backend(str(tmp_path / "large"), {"capacity": "1024TiB"}):
        (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "capacity=1125899906842624 B needs" in warning
    assert "puts will evict" in warning
