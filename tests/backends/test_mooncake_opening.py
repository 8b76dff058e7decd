"""Opening Mooncake: options, addresses, transport truth, a missing library, an own master."""

import datetime as dt
import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import kvconnect
from kvconnect.errors import ConfigError, TransferTimeoutError, UnavailableError
from kvconnect.testing.suite import keys
from kvconnect.testing.suite.base import put, stored
from kvconnect_mooncake import library, open_backend, transport
from kvconnect_mooncake.address import parse_address
from kvconnect_mooncake.leaving import leave, without_lock
from kvconnect_mooncake.master import MasterProcess
from kvconnect_mooncake.options import MIN_SEGMENT, parse, parse_local

from .mooncake_master import Master, opened, wait_for


@pytest.fixture(scope="module")
def master(tmp_path_factory):
    with Master(tmp_path_factory.mktemp("master")) as one:
        yield one


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"protocol": "bogus"}, "tcp, rdma"),
        ({"replica": "2"}, "did you mean replicas"),
        ({"segment": "1MiB"}, str(MIN_SEGMENT)),
        ({"entries": "2000"}, "8 to 1024"),
        ({"lease": "0"}, "lease=0"),
        ({"prefix": "a/b"}, "prefix"),
        ({"checksum": "maybe"}, "true or false"),
        ({"ssd": "here"}, "absolute"),
        ({"ssd": "/here"}, "segment=0"),
        ({"close_timeout": "0"}, "close_timeout=0"),
        ({"admin": "a:1;b"}, "'b' is no host:port"),
        ({"side": "1"}, "side=1"),
        ({"space_wait": "inf"}, "space_wait"),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        open_backend("127.0.0.1:1", options)


@pytest.mark.parametrize("location", ["", "host:0", "host:99999", "a b", "http://x", "host:port"])
def test_wrong_addresses(location):
    with pytest.raises(ConfigError, match="is no master"):
        open_backend(location, {})


def test_addresses():
    assert parse_address("etcd://a:1;b:2").text == "etcd://a:1;b:2"
    assert parse_address("etcd://a:1;b:2").host == "a"
    with pytest.raises(ConfigError, match="host:port"):
        open_backend("h", {"admin": "x"})
    with pytest.raises(ConfigError, match="admin"):
        parse_local({"admin": "a:1"})
    assert parse_local({}).segment > 0
    assert parse({}).segment == 0


def test_no_master_is_found_out_at_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    begin = time.monotonic()
    for location in (f"127.0.0.1:{port}", f"etcd://127.0.0.1:{port}"):
        with pytest.raises(UnavailableError, match="nothing answers"):
            open_backend(location, {})
    assert time.monotonic() - begin < 2


def test_listing_needs_the_http_service(master):
    with (
        opened(master, admin="127.0.0.1:1") as store,
        pytest.raises(UnavailableError, match="admin="),
    ):
        store.list_keys()


def test_rdma_without_a_card_is_an_error(master, tmp_path):
    if transport.cards():
        pytest.skip("hardware: this host has an RDMA card")
    with pytest.raises(UnavailableError, match="allow_fallback=true"):
        opened(master, protocol="rdma")
    with opened(master, protocol="rdma", allow_fallback="true") as store:
        assert store.stats()["transport_asked"] == "rdma"
        assert store.stats()["transport_in_use"] == "tcp"
        assert "tcp" in repr(store)


def test_what_is_in_use_is_seen_from_open_devices(tmp_path):
    (tmp_path / "3").symlink_to("/dev/null")
    assert transport.in_use(tmp_path) == "tcp"
    (tmp_path / "4").symlink_to("/dev/infiniband/uverbs0")
    assert transport.in_use(tmp_path) == "rdma"
    for asked, used in (("tcp", "rdma"), ("rdma", "tcp")):
        with pytest.raises(UnavailableError, match=used):
            transport.check_in_use(asked, used, allow_fallback=False)
        transport.check_in_use(asked, used, allow_fallback=True)
    transport.check_in_use("tcp", "tcp", allow_fallback=False)
    (tmp_path / "cards" / "mlx5_0").mkdir(parents=True)
    transport.check_cards("rdma", allow_fallback=False, folder=tmp_path / "cards")


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("libcuda.so.1: cannot open shared object file", "kvconnect[mooncake-cpu]"),
        ("libcudart.so.12: cannot open shared object file", "without CUDA"),
        ("libibverbs.so.1: cannot open", "apt-get install libibverbs1"),
        ("libcurl.so.4: cannot open", "apt-get install libcurl4"),
        ("No module named 'mooncake'", "pip install 'kvconnect[mooncake-cpu]'"),
    ],
)
def test_a_library_that_does_not_load(text, fix, monkeypatch):
    def fail(name):
        raise ImportError(text)

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(UnavailableError, match=re.escape(fix)):
        open_backend("127.0.0.1:1", {})


def test_importing_needs_no_library():
    code = (
        "import sys, kvconnect, kvconnect_mooncake; sys.modules['mooncake'] = None\n"
        "try: kvconnect.open('mooncake://127.0.0.1:1')\n"
        "except kvconnect.errors.UnavailableError as error: print(error)"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": path},
        timeout=60, check=True,
    )  # fmt: skip
    assert "pip install 'kvconnect[mooncake-cpu]'" in done.stdout


def test_a_master_of_its_own(tmp_path):
    begin = time.monotonic()
    with kvconnect.open(f"mooncake+local://{tmp_path}/log?segment=16MiB&lease=1") as store:
        pid = store._master.pid
        put(store, keys(3), [2304] * 3)
        stored(store, keys(3), [2304] * 3)
        assert store.list_keys() == sorted(keys(3))
        assert "mooncake_master" in Path(f"/proc/{pid}/cmdline").read_text()
    assert not Path(f"/proc/{pid}").exists()
    assert (tmp_path / "log" / "mooncake_master.log").stat().st_size > 0
    assert time.monotonic() - begin < 20


def test_its_own_master_dies_with_the_process(tmp_path):
    code = (
        "import sys; from kvconnect_mooncake.master import MasterProcess\n"
        f"m = MasterProcess({str(tmp_path)!r}, lease=1.0); print(m.pid, flush=True)\n"
        "sys.stdin.read()"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path}, text=True,
    ) as process:  # fmt: skip
        pid = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), 10, "its end")


def test_a_master_that_cannot_start(tmp_path):
    with pytest.raises(UnavailableError, match="did not answer"):
        MasterProcess(str(tmp_path), lease=1.0, flags=("--no_such_flag",))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="log"):
        MasterProcess(str(tmp_path / "file"), lease=1.0)


def test_a_library_that_is_not_known_is_left_by_its_own_close():
    class Store:
        closed = 0

        def close(self):
            self.closed += 1

    class Other(Store):
        def _get_pyclient_capsule(self):
            return dt.datetime_CAPI  # a capsule of another name

    class Nothing(Store):
        def _get_pyclient_capsule(self):
            return None

    module = library.load("tcp")
    for store in (Store(), Other(), Nothing()):
        assert without_lock(module, store) is None
        leave(module, store)
        assert store.closed == 1


def test_a_close_that_came_too_early_is_done_the_second_time(master):
    store, gate = opened(master, timeout="0.3"), threading.Event()
    hung = store.core.movers.call(lambda: gate.wait(30))
    with pytest.raises(TransferTimeoutError, match="did not return in"):
        store.close()
    assert not store.core.client._closed
    gate.set()
    assert hung.result(10)
    store.close()
    assert store.core.client._closed
    store.close()
