"""The nvme store on every NIXL engine that runs here: the suite, the machine, a killed writer."""

import fcntl
import itertools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvconnect.errors import UnavailableError
from kvconnect.testing.machine import backend_machine
from kvconnect.testing.suite.base import keys, put, stored
from kvconnect_nixl.library import load
from kvconnect_nvme import gusli, open_backend
from tests.backends import test_nvme_suite as nvme

try:
    load()
except UnavailableError as error:
    pytest.skip(f"NIXL is not installed: {error}", allow_module_level=True)

AIO = {"io": "nixl-posix", "nixl_api": "aio"}
URING = {"io": "nixl-posix", "nixl_api": "uring"}
GUSLI = {"io": "nixl-gusli", "bounce": "16MiB"}


class OnNixl(nvme.TestNvme):
    """The suite of the nvme store with one more option, and without help from system calls."""

    __test__ = False
    extra: ClassVar[dict[str, str]] = {}
    rounds = 100
    many = 2000

    def open_store(self, path):
        return open_backend(str(path / "store"), nvme.OPTIONS | self.extra)

    def open_small(self, path):
        return open_backend(str(path / "store"), {"capacity": "64KiB"} | self.extra)

    def peer(self, path):
        return "kvconnect_nvme:open_backend", str(path / "store"), nvme.OPTIONS | self.extra

    @pytest.fixture
    def store(self, tmp_path):
        with self.open_store(tmp_path) as store:
            yield store
        assert store.core.engine.stats()["io_fallbacks"] == 0


class TestPosixAio(OnNixl):
    __test__ = True
    extra = AIO


class TestPosixUring(OnNixl):
    __test__ = True
    extra = URING


loops = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/loop-control").exists() or not shutil.which("losetup"),
    reason="hardware: needs root and loop devices",
)


def losetup(*arguments):
    done = subprocess.run(
        ["losetup", *arguments], check=True, capture_output=True, text=True, timeout=60
    )
    return done.stdout.strip()


@loops
def shared_buffers():
    """Return GUSLI's shared memory; other processes have theirs there too."""
    return set(Path("/dev/shm").glob("gs_*"))


class TestGusli(OnNixl):
    __test__ = True
    extra = GUSLI

    @pytest.fixture(autouse=True)
    def disk(self, tmp_path):
        image = tmp_path / "disk.img"
        with image.open("wb") as file:
            file.truncate(80 << 20)
        before = shared_buffers()
        self.device = losetup("--find", "--show", str(image))
        yield
        losetup("--detach", self.device)
        assert shared_buffers() <= before, "GUSLI left shared memory behind"

    def open_store(self, path):
        return open_backend(self.device, self.options(path))

    def open_small(self, path):
        return open_backend(self.device, self.options(path) | {"capacity": "64KiB"})

    def peer(self, path):
        # On another engine, which reads and writes the same device around GUSLI's page cache.
        options = self.options(path) | {"io": "threads"}
        return "kvconnect_nvme:open_backend", self.device, options

    def options(self, path):
        return nvme.OPTIONS | self.extra | {"index": str(path / "index")}

    def corrupt(self, store, path, name, data):
        with Path(self.device).open("r+b", buffering=0) as disk:
            at = disk.read().find(data) + len(data) // 2
            disk.seek(at)
            disk.write(bytes([data[len(data) // 2] ^ 0x40]))
            os.fsync(disk.fileno())

    def test_a_process_has_one_of_it(self, store, tmp_path):
        with pytest.raises(UnavailableError, match="close what uses it first"):
            self.open_store(tmp_path)
        with open_backend(self.device, self.options(tmp_path) | {"io": "nixl-posix"}) as other:
            stored(other, keys(0), [])

    def test_its_shared_memory_is_made_alone_and_is_private(self, tmp_path):
        # Made by two processes at once it may be one and the same, as its name is.
        options = self.options(tmp_path) | {"timeout": "0.5"}
        with open_backend(self.device, options) as store:
            with gusli.lock().open("w") as other:
                fcntl.flock(other, fcntl.LOCK_EX)
                outcome = put(store, keys(1), [100])
                assert outcome.prefix == 0
                assert "locked by another process" in outcome.causes[0]
            put(store, keys(1), [100])
            stored(store, keys(1), [100])
            assert {path.stat().st_mode & 0o777 for path in shared_buffers()} == {0o600}


numbers = itertools.count()


@pytest.fixture(autouse=True, scope="module")
def machine_root():
    """One directory for all examples of the machines; each example opens a store of its own."""
    with tempfile.TemporaryDirectory(prefix="kvconnect-machine-") as root:
        open_on_files.root = Path(root)
        yield


def open_on_files(extra):
    def make():
        location = str(open_on_files.root / str(next(numbers)))
        return lambda: open_backend(location, nvme.OPTIONS | extra)

    return make


few = settings(max_examples=5, stateful_step_count=20, deadline=None)

TestMachineAio = backend_machine(open_on_files(AIO), durable=True).TestCase
TestMachineUring = backend_machine(open_on_files(URING), durable=True).TestCase
TestMachineAio.settings = TestMachineUring.settings = few


@loops
def test_the_machine_on_gusli(tmp_path):
    image = tmp_path / "disk.img"
    with image.open("wb") as file:
        file.truncate(80 << 20)
    device = losetup("--find", "--show", str(image))

    def make():
        index = str(tmp_path / f"index{next(numbers)}")
        # Each example takes the device over from the one before.
        options = nvme.OPTIONS | GUSLI | {"index": index, "format": "true"}
        return lambda: open_backend(device, options)

    try:
        run_state_machine_as_test(backend_machine(make, durable=True), settings=few)
    finally:
        losetup("--detach", device)
