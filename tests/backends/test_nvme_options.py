"""Keys of any shape, and options: what is wrong says what would be right."""

import pytest

from kvconnect.errors import ConfigError
from kvconnect.testing.suite.base import put, stored
from kvconnect_nvme import open_backend


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
