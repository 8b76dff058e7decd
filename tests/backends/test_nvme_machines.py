"""A volume that two machines have mounted: the second one is refused, whatever the first does."""

import fcntl
import os

import pytest

from kvconnect.errors import ConfigError
from kvconnect.testing.suite.base import keys, put, stored
from kvconnect_nvme import open_backend

ELSEWHERE = "00000000-1111-2222-3333-444444444444"
OPTIONS = {"capacity": "1MiB", "io": "threads"}


@pytest.fixture
def other(tmp_path):
    """Hold the store as a process on another machine does; call what is yielded to end it."""
    with open_backend(str(tmp_path), OPTIONS) as store:
        put(store, keys(2), [4096] * 2)
    path = tmp_path / "owners" / "0123456789abcdef"
    path.write_text(ELSEWHERE)
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    yield lambda: fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


@pytest.mark.parametrize("durability", ["data", "none"])
def test_a_store_that_is_open_on_another_machine_is_refused(tmp_path, other, durability):
    # With durability=none it would even be emptied: the mark of another boot is there.
    (tmp_path / "unsafe").write_text(ELSEWHERE)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=f"another machine.*{ELSEWHERE}"):
        open_backend(str(tmp_path), OPTIONS | {"durability": durability})
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "unsafe").unlink()
    other()
    with open_backend(str(tmp_path), OPTIONS) as store:
        stored(store, keys(2), [4096] * 2)


def test_a_machine_that_does_not_say_which_it_is_may_use_it(tmp_path, other, monkeypatch):
    monkeypatch.setattr("kvconnect.boot._BOOT_ID", tmp_path / "none")
    with open_backend(str(tmp_path), OPTIONS) as store:
        stored(store, keys(2), [4096] * 2)
        assert store.exists(keys(3), [4096] * 3).tolist() == [True, True, False]
