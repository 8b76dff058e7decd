"""The NVMe store against the conformance suite and the state machine."""

import itertools
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from kvconnect.testing.machine import backend_machine
from kvconnect.testing.suite import BackendSuite
from kvconnect_nvme import open_backend

OPTIONS = {"capacity": "64MiB"}


class TestNvme(BackendSuite):
    durable = True
    multi_process = True
    corruptible = True
    bounded = True
    locates = True
    rounds = 1000

    def open_store(self, path):
        return open_backend(str(path / "store"), OPTIONS)

    def open_small(self, path):
        return open_backend(str(path / "store"), {"capacity": "64KiB"})

    def peer(self, path):
        return "kvconnect_nvme:open_backend", str(path / "store"), OPTIONS

    def corrupt(self, store, path, name, data):
        """Find the object's bytes in the slab files and flip one in the middle."""
        found = 0
        for file in sorted(p for p in (path / "store").rglob("*") if p.is_file()):
            # A slab is large and sparse; objects begin at block boundaries at the finest.
            with file.open("r+b", buffering=0) as slab:
                at = slab.read().find(data)
                if at >= 0:
                    slab.seek(at + len(data) // 2)
                    slab.write(bytes([data[len(data) // 2] ^ 0x40]))
                    found += 1
        assert found == 1, f"the object's bytes were found in {found} files"


numbers = itertools.count()


@pytest.fixture(autouse=True, scope="module")
def machine_root():
    """One directory for all examples of the machine; each example opens a store of its own."""
    with tempfile.TemporaryDirectory(prefix="kvconnect-machine-") as root:
        open_machine_store.root = Path(root)
        yield


def open_machine_store():
    location = open_machine_store.root / str(next(numbers))
    return lambda: open_backend(str(location), OPTIONS)


TestMachine = backend_machine(open_machine_store, durable=True).TestCase
TestMachine.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
