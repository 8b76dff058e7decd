"""How each ``io=nixl-...`` is set up: plugin, parameters, limits; and how it names a slab."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from kvconnect.errors import ConfigError
from kvconnect.region import Region
from kvconnect_nixl.agent import Agent, Memory
from kvconnect_nixl.rows import device_ids, file_name, plain
from kvconnect_nvme import gusli
from kvconnect_nvme.engine import Group
from kvconnect_nvme.options import NvmeOptions
from kvconnect_nvme.slabs import Slabs

GUSLI_ID = 11
"""The block device's id, which GUSLI wants in its configuration and on memory alike."""


@dataclass(frozen=True, slots=True)
class Plan:
    """An engine before it is made.

    `remote`: what slabs are to the plugin; `device`: the id under which it wants memory.
    `chunk`: descriptors of one transfer, `depth`: of all under way, at most. `piece`: bytes of
    one descriptor at most; `group`: of objects that are moved together (each group is polled:
    with 4 MiB that took half of the CPU time). `in_place`: whether callers' memory may be
    registered. `guard`: what the registration of a region goes on inside of, in so many seconds.
    """

    io: str
    plugin: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    remote: Memory = "FILE"
    device: int = 0
    chunk: int = 1024
    depth: int = 32 << 10
    piece: int = 8 << 20
    group: int = 16 << 20
    in_place: bool = True
    guard: Callable[[Region, float], AbstractContextManager[None]] = lambda *_: nullcontext()

    @property
    def label(self) -> str:
        """What messages call it: the plugin's interface to the kernel included."""
        words = [name.removeprefix("use_") for name in self.parameters if name.startswith("use_")]
        return " ".join([self.io, *words])


def _posix(options: NvmeOptions, _: Slabs) -> Plan:
    return Plan("nixl-posix", "POSIX", {f"use_{options.nixl_api}": "true"})


def _gds(_: NvmeOptions, slabs: Slabs) -> Plan:
    _need_direct("nixl-gds", slabs)
    # A batch of cuFile takes 128 requests; NIXL has 16 batches of them.
    return Plan("nixl-gds", "GDS", chunk=128, depth=2048)


def _gds_mt(options: NvmeOptions, slabs: Slabs) -> Plan:
    _need_direct("nixl-gds-mt", slabs)
    return Plan("nixl-gds-mt", "GDS_MT", {"thread_count": str(options.io_threads)})


def _need_direct(io: str, slabs: Slabs) -> None:
    if not slabs.direct:
        raise ConfigError(f"nvme: io={io} needs O_DIRECT, which {slabs.path} does not take")


def _gusli(_: NvmeOptions, slabs: Slabs) -> Plan:
    if not slabs.device:
        raise ConfigError(
            f"nvme: io=nixl-gusli is for block devices, {slabs.path} is a directory; use "
            f"io=nixl-posix"
        )
    # The text stands for a file: version, then id, kind (K: kernel block device), mode, path.
    text = f"# Config file\nversion=1\n{GUSLI_ID} K W N {slabs.path} sec=0x3\n"
    most = 256
    parameters = {"config_file": text, "max_num_simultaneous_requests": str(most)}
    # GUSLI maps shared memory of its own over what is registered: the contents are gone, and
    # memory that does not begin at a page boundary aborts the process. So it gets ours alone.
    return Plan(
        "nixl-gusli", "GUSLI", parameters, "BLOCK", GUSLI_ID, chunk=most, depth=most,
        in_place=False, guard=gusli.alone,
    )  # fmt: skip


_PLANS: dict[str, Callable[[NvmeOptions, Slabs], Plan]] = {
    "nixl-posix": _posix,
    "nixl-gds": _gds,
    "nixl-gds-mt": _gds_mt,
    "nixl-gusli": _gusli,
}


def plan(options: NvmeOptions, slabs: Slabs) -> Plan:
    """Return the plan for the `io=` of a store; `ConfigError` where it does not fit."""
    return _PLANS[options.io](options, slabs)


class SlabIds:
    """The id under which NIXL knows each slab, registered when first used and then kept."""

    def __init__(self, agent: Agent, plan: Plan, slabs: Slabs) -> None:
        """Nothing is registered yet. The agent closes what is."""
        self._agent, self._plan, self._slabs = agent, plan, slabs
        self._ids: dict[int, int] = {}
        self._lock = threading.Lock()

    def of(self, group: Group) -> int:
        """Return the id of the group's slab."""
        # A device is one file whatever the slab; see `Slabs.locate`.
        number = 0 if self._slabs.device else group.slab
        with self._lock:
            found = self._ids.get(number)
            if found is None:
                found = self._ids[number] = self._register(number, group.fd)
            return found

    def _register(self, number: int, fd: int) -> int:
        size = os.lseek(fd, 0, os.SEEK_END) if self._slabs.device else self._slabs.slab_bytes
        if self._plan.remote == "BLOCK":
            rows, names = plain(0, size, self._plan.device), None
        else:
            rows = plain(0, size, device_ids(1))
            names = [file_name(self._slabs.file(number), direct=self._slabs.direct)]
        self._agent.register(self._plan.plugin, self._plan.remote, rows, names)
        return int(rows[0, 2])
