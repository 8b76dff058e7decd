"""Tiered stores against the conformance suite and the state machine, in both write modes."""

import itertools
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from kvconnect.memory import open_backend as open_memory
from kvconnect.testing.machine import backend_machine
from kvconnect.testing.suite import BackendSuite
from kvconnect.tiered import TieredBackend, TieredOptions
from kvconnect_nvme import open_backend as open_nvme

SMALL = {"promote_bytes": 1 << 20, "copy_bytes": 2 << 20, "timeout": 20.0}
NVME = {"capacity": "64MiB", "durability": "none"}


def tiered(first, second, **options):
    return TieredBackend([first, second], TieredOptions(**SMALL | options))


class OverMemory(BackendSuite):
    durable = True  # memory://NAME lives as long as the process
    bounded = True
    rounds = 200
    many = 2000
    write = "through"

    def open_store(self, path):
        stores = [open_memory(f"{path}/{name}", {}) for name in "ab"]
        return tiered(*stores, write=self.write)

    def open_small(self, path):
        stores = [open_memory(f"{path}/{name}", {"capacity": "64KiB"}) for name in "ab"]
        return tiered(*stores, write=self.write)

    def pass_time(self, store, seconds):
        assert store.flush(10)
        for tier in store.core.tiers:
            objects = tier.backend.objects
            now = objects._clock() + seconds
            objects._clock = lambda now=now: now


class TestMemoryThrough(OverMemory):
    pass


class TestMemoryBack(OverMemory):
    write = "back"


class OverNvme(BackendSuite):
    durable = True
    bounded = True
    rounds = 100
    many = 2000
    write = "through"

    def open_store(self, path):
        nvme = open_nvme(str(path / "store"), NVME)
        return tiered(nvme, open_memory(f"{path}/remote", {}), write=self.write)

    def open_small(self, path):
        nvme = open_nvme(str(path / "store"), {"capacity": "64KiB", "durability": "none"})
        remote = open_memory(f"{path}/remote", {"capacity": "64KiB"})
        return tiered(nvme, remote, write=self.write)


class TestNvmeThrough(OverNvme):
    pass


class TestNvmeBack(OverNvme):
    write = "back"


numbers = itertools.count()


@pytest.fixture(autouse=True, scope="module")
def machine_root():
    with tempfile.TemporaryDirectory(prefix="kvconnect-tiered-") as root:
        machine_root.path = Path(root)
        yield


def over_memory(write):
    def opener():
        number = next(numbers)
        names = [f"tiered-machine{number}{name}" for name in "ab"]
        return lambda: tiered(*(open_memory(name, {}) for name in names), write=write)

    return opener


def over_nvme(write):
    def opener():
        number = next(numbers)
        path, name = str(machine_root.path / str(number)), f"tiered-remote{number}"
        return lambda: tiered(open_nvme(path, NVME), open_memory(name, {}), write=write)

    return opener


def machine(opener, examples):
    case = backend_machine(opener, durable=True).TestCase
    case.settings = settings(max_examples=examples, stateful_step_count=20, deadline=None)
    return case


TestMachineMemoryThrough = machine(over_memory("through"), 12)
TestMachineMemoryBack = machine(over_memory("back"), 12)
TestMachineNvmeThrough = machine(over_nvme("through"), 5)
TestMachineNvmeBack = machine(over_nvme("back"), 5)
