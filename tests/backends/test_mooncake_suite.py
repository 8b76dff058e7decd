"""Mooncake against the conformance suite and the state machine, with real processes.

A master and one owner of a segment serve all tests; each store has a prefix of its own.
"""

import hashlib
import itertools
from pathlib import Path

import pytest
from hypothesis import settings

from kvconnect.testing.machine import backend_machine
from kvconnect.testing.memory import GuardedBuffer
from kvconnect.testing.suite import BackendSuite
from kvconnect_mooncake import library, open_backend

from .mooncake_master import Master

SMALL = 384 << 10
# The allocator finds no place for small objects in a smaller rest.
REST = 1 << 20
SEGMENT_MIB = 16


@pytest.fixture(scope="module", autouse=True)
def master(tmp_path_factory):
    with Master(tmp_path_factory.mktemp("master")) as one:
        one.owner(192)
        TestMooncake.master = open_machine_store.master = one
        yield one


def options_of(master, path, **more):
    prefix = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    fixed = {
        "admin": master.admin,
        "prefix": prefix,
        "lease": str(master.lease),
        "space_wait": "0.3",
    }
    return {**fixed, **more}


class TestMooncake(BackendSuite):
    durable = True
    multi_process = True
    corruptible = True
    bounded = True
    evicts_in_vain = True
    small_bytes = SMALL
    rounds = 300

    def open_store(self, path):
        return open_backend(self.master.address, options_of(self.master, path))

    def peer(self, path):
        return (
            "kvconnect_mooncake:open_backend",
            self.master.address,
            options_of(self.master, path),
        )

    @pytest.fixture(autouse=True)
    def small_masters(self, tmp_path):
        """End what `open_small` started."""
        self.started = []
        yield
        for one in self.started:
            one.__exit__()

    def open_small(self, path):
        # The smallest segment is 16 MiB: a pinned object fills it but for what the test needs.
        # What was read is evicted once its lease is over, which the test waits for.
        small = Master(path / "small", "--eviction_high_watermark_ratio=1.0", lease=2.0)
        self.started.append(small)
        small.owner(SEGMENT_MIB)
        fill(small.address, (SEGMENT_MIB << 20) - REST)
        return open_backend(small.address, options_of(small, path))

    def corrupt(self, store, path, name, data):
        """Flip a byte in the middle of the object, in the memory of the process that owns it."""
        stored = store.core.names.name(name)
        replica = store.core.client._store.get_replica_desc(stored)[0]
        place = replica.get_memory_descriptor().buffer_descriptor
        owner = next(o for o in self.master.owners if o.nbytes > (100 << 20))
        at = place.buffer_address + len(data) // 2
        with Path(f"/proc/{owner.pid}/mem").open("r+b", buffering=0) as memory:
            memory.seek(at)
            byte = memory.read(1)[0]
            assert byte == data[len(data) // 2], "this is not where the object lies"
            memory.seek(at)
            memory.write(bytes([byte ^ 0x40]))


def fill(address, nbytes):
    """Take `nbytes` of a store with an object that is never evicted."""
    module = library.load("tcp")
    store = module.MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 4 << 20, "tcp", "", address) == 0
    buffer, config = GuardedBuffer(nbytes), module.ReplicateConfig()
    config.with_hard_pin = True
    assert store.register_buffer(buffer.region.address, nbytes) == 0
    assert store.put_from("filler", buffer.region.address, nbytes, config) == 0
    store.close()


numbers = itertools.count()


def open_machine_store():
    options = options_of(open_machine_store.master, f"machine {next(numbers)}")
    return lambda: open_backend(open_machine_store.master.address, options)


TestMachine = backend_machine(open_machine_store, durable=True).TestCase
TestMachine.settings = settings(max_examples=6, stateful_step_count=12, deadline=None)
