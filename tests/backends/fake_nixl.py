"""A NIXL made here: it moves bytes between registered memory and files, when it is told to.

It refuses what was not registered, one plugin a registration, and dies (by assertion) of what
must never happen: a handle released or memory deregistered while bytes move.
"""

import ctypes
import os
from types import SimpleNamespace

from kvconnect_nixl.library import Library

MODES = ("rw:", "rw,direct:")


class nixlBackendError(Exception):  # noqa: N801 - NIXL's own name
    """As NIXL raises it."""


class FakeAgent:
    """`auto`: transfers end at the first look. `fails`: tells which of them do."""

    plugin_list = ("POSIX", "GDS", "GDS_MT", "GUSLI")

    def __init__(self, auto=True):
        self.auto, self.fails = auto, lambda number: False
        self.plugins, self.memory, self.files = {}, {}, {}
        self.posted, self.most, self.count, self.largest = {}, 0, 0, 0

    def get_plugin_mem_types(self, plugin):
        return ["DRAM_SEG", "FILE_SEG"]

    def create_backend(self, plugin, parameters):
        self.plugins[plugin] = parameters

    def register_memory(self, rows, kind, plugins):
        (plugin,) = plugins
        assert plugin in self.plugins
        for row in list(rows):
            address, nbytes, device = (int(value) for value in row[:3])
            if kind == "DRAM":
                self.memory[address] = nbytes
            else:
                assert row[3].startswith(MODES)
                assert device not in self.files
                assert device > 1 << 32
                self.files[device] = row[3].partition(":")[2]
        return kind, rows

    def deregister_memory(self, descs, plugins):
        kind, rows = descs
        for row in list(rows):
            assert not self.moves(kind, *(int(value) for value in row[:3])), (
                "deregistered while bytes move"
            )
            if kind == "DRAM":
                del self.memory[int(row[0])]
            else:
                del self.files[int(row[2])]

    def moves(self, kind, address, nbytes, device):
        """Tell whether a transfer under way touches what was registered by this row."""
        under_way = list(self.posted.values())
        if kind == "DRAM":
            places = [at for _, local, _ in under_way for at, _, _ in local]
            return any(address <= at < address + nbytes for at in places)
        return any(file == device for _, _, remote in under_way for _, _, file in remote)

    def get_xfer_descs(self, rows, kind):
        return rows.tolist()

    def initialize_xfer(self, verb, local, remote, name, message, plugins):
        for address, nbytes, _ in local:
            assert any(a <= address and address + nbytes <= a + n for a, n in self.memory.items())
        self.count += 1
        self.posted[self.count] = (verb, local, remote)
        under_way = sum(len(rows) for _, rows, _ in self.posted.values())
        self.most, self.largest = max(self.most, under_way), max(self.largest, len(local))
        return self.count

    def transfer(self, number):
        return "PROC"

    def check_xfer_state(self, number):
        if self.fails(number):
            self.posted.pop(number, None)
            raise nixlBackendError("NIXL_ERR_BACKEND")
        if self.auto:
            self.end(number)
        return "PROC" if number in self.posted else "DONE"

    def end(self, number):
        """Move the bytes of one transfer now."""
        verb, local, remote = self.posted.pop(number)
        for (address, nbytes, _), (offset, size, device) in zip(local, remote, strict=True):
            assert nbytes == size
            fd = os.open(self.files[device], os.O_RDWR)
            try:
                if verb == "WRITE":
                    os.pwrite(fd, ctypes.string_at(address, nbytes), offset)
                else:
                    ctypes.memmove(address, os.pread(fd, nbytes, offset), nbytes)
            finally:
                os.close(fd)

    def release_xfer_handle(self, number):
        assert number not in self.posted, "released while bytes move"


def install(monkeypatch, agent):
    """Make `agent` what kvconnect finds when it loads NIXL."""
    api = SimpleNamespace(
        nixl_agent=lambda name, config: agent,
        nixl_agent_config=lambda **options: options,
        nixl_thread_sync_t=SimpleNamespace(NIXL_THREAD_SYNC_STRICT="strict"),
    )
    monkeypatch.setattr("kvconnect_nixl.agent.load", lambda: Library("fake", api))
