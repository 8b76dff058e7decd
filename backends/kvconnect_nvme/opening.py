"""Opening a store: its directory, its fixed sizes, and what a crash left behind."""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvconnect.boot import boot_id
from kvconnect.errors import ConfigError, CorruptionError, KVConnectError
from kvconnect_nvme import device
from kvconnect_nvme.arena import Arena
from kvconnect_nvme.bounce import BouncePool
from kvconnect_nvme.builder import Builder
from kvconnect_nvme.core import Core
from kvconnect_nvme.engines import open_engine
from kvconnect_nvme.env import attach
from kvconnect_nvme.foreign import mapped
from kvconnect_nvme.options import BLOCK, NvmeOptions, default_slab, down
from kvconnect_nvme.owners import (
    Owner,
    exclusive,
    others_alive,
    refuse_other_machines,
    sweep,
)
from kvconnect_nvme.slabs import Slabs
from kvconnect_nvme.space import Space
from kvconnect_nvme.tables import ONE, Session
from kvconnect_nvme.visited import Visited

log = logging.getLogger("kvconnect.nvme")

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Home:
    """Where things lie: `data` is the directory or device, `folder` holds the rest."""

    data: Path
    folder: Path
    device: bool

    @property
    def lock(self) -> Path:
        """Held while a store is opened, closed or swept."""
        return self.folder / "lock"

    @property
    def owners(self) -> Path:
        """One locked file per open store."""
        return self.folder / "owners"

    @property
    def unsafe(self) -> Path:
        """Names the boot during which the store was opened with durability=none."""
        return self.folder / "unsafe"


def find_home(location: str, options: NvmeOptions) -> Home:
    """Check location and index= against each other, and create the directories."""
    if not location:
        raise ConfigError("nvme: no path; write nvme:///mnt/kv?capacity=200GiB")
    data = Path(location)
    block = device.is_device(data)
    if block and options.index is None:
        raise ConfigError(f"nvme: {data} is a block device; name a directory with index=")
    if not block and options.index is not None:
        raise ConfigError(f"nvme: index= is for block devices; {data} keeps its index inside")
    if not block and data.exists() and not data.is_dir():
        raise ConfigError(f"nvme: {data} is neither a directory nor a block device")
    folder = Path(options.index) if options.index is not None else data
    home = Home(data, folder, block)
    with mapped(f"create {folder}"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for inner in (home.owners, folder / "index"):
            inner.mkdir(mode=0o700, exist_ok=True)
    return home


def open_core(home: Home, options: NvmeOptions) -> Core:
    """Open everything; on failure whatever was opened is closed again, last first."""
    with ExitStack() as undo, mapped(f"open {home.data}"):
        with exclusive(home.lock, options.timeout):
            refuse_other_machines(home.owners)
            _drop_after_power_cut(home)
            if options.durability == "none":
                _mark_unsafe(home)
            env = undo.enter_context(
                attach(home.folder / "index", options.durability, options.timeout)
            )
            capacity, slab = env.write(lambda session: _sizes(session, home, options))
            slabs = undo.enter_context(Slabs(home.data, slab, options.direct, device=home.device))
            visited = undo.enter_context(Visited(home.folder / "visited.map", capacity))
            owner = undo.enter_context(Owner(home.owners))
            sweep(home.owners, env, slab)
            if home.device:
                env.write(lambda session: _adopt_device(session, capacity))
            builder = undo.enter_context(Builder(env))
        engine = undo.enter_context(open_engine(options, slabs))
        space = Space(
            capacity, slab, down(int(capacity * options.high)), down(int(capacity * options.low)),
            options.eviction, slabs, visited,
        )  # fmt: skip
        core = Core(
            options, env, slabs, visited, space, Arena(space, env, owner, home.lock),
            engine, BouncePool(options.bounce, options.timeout, partial(engine.register, own=True)),
            owner, builder,
        )  # fmt: skip
        undo.pop_all()
        return core


def _sizes(session: Session, home: Home, options: NvmeOptions) -> tuple[int, int]:
    """Return (capacity, slab bytes), fixed now for a new store or checked against its own."""
    made = session.meta_number("format")
    if made is not None and made != FORMAT:
        raise CorruptionError(
            f"nvme: {home.folder}/index has format {made}, this version reads {FORMAT}; remove "
            f"it to start empty"
        )
    capacity, slab = _capacity(session, home, options), session.meta_number("slab")
    if slab is None:
        slab = capacity if home.device else down(options.slab or default_slab(capacity))
    elif options.slab is not None and down(options.slab) != slab:
        raise ConfigError(f"nvme: slab={options.slab} B, but {home.data} was made with {slab} B")
    if home.device:
        session.set_meta(
            "device", device.claim(home.data, session.meta("device"), force=options.format)
        )
    for name, value in (("format", FORMAT), ("slab", slab), ("capacity", capacity)):
        session.set_meta(name, ONE.pack(value))
    return capacity, slab


def _capacity(session: Session, home: Home, options: NvmeOptions) -> int:
    stored = session.meta_number("capacity")
    capacity = options.capacity or stored
    if home.device:
        room = device.usable_bytes(home.data)
        capacity = min(capacity or room, room)
    if capacity is None:
        raise ConfigError(f"nvme: {home.data} is a new store; give it capacity=, as in 200GiB")
    if capacity < BLOCK:
        raise ConfigError(f"nvme: {home.data} has room for {capacity} B; it needs {BLOCK} B")
    return down(capacity)


def _adopt_device(session: Session, capacity: int) -> None:
    # The one slab of a device exists from the start; nothing is allocated when it grows.
    from kvconnect_nvme.extents import Extents  # noqa: PLC0415

    have = dict(session.slabs()).get(0, 0)
    slab = session.meta_number("slab") or capacity
    if have < slab:
        session.set_slab(0, slab)
        Extents(session, slab).free(have, slab - have)


def _mark_unsafe(home: Home) -> None:
    fd = os.open(home.unsafe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, boot_id().encode())
        os.fsync(fd)
    finally:
        os.close(fd)


def _drop_after_power_cut(home: Home) -> None:
    """Empty a store whose last writer did not sync and whose machine went down since."""
    if not home.unsafe.exists() or home.unsafe.read_text(encoding="ascii") == boot_id():
        return
    shutil.rmtree(home.folder / "index")
    (home.folder / "index").mkdir(mode=0o700)
    if not home.device:
        for slab in home.data.glob("slab-*.dat"):
            slab.unlink()
    home.unsafe.unlink()


def close_core(core: Core, home: Home) -> None:
    """Give back what is held and close everything; transfers have ended."""
    core.builder.close()
    with ExitStack() as rest:
        for part in (core.owner_file, core.env, core.slabs, core.visited, core.engine):
            rest.callback(part.close)
        with exclusive(home.lock, core.options.timeout):
            try:
                core.arena.drain()
            except KVConnectError as error:
                # A full disk, say. The next sweep finds that this owner is gone.
                log.warning("nvme: reserved space is returned later: %s", error)
            try:
                if core.options.durability == "none":
                    _sync_unsafe(core)
            finally:
                core.owner_file.close()
            if core.options.durability == "none" and not others_alive(home.owners):
                home.unsafe.unlink(missing_ok=True)


def _sync_unsafe(core: Core) -> None:
    with core.env.read() as session:
        numbers = [number for number, _ in session.slabs()]
    core.slabs.sync(numbers)
    core.env.sync()


def reclaim(core: Core, home: Home) -> int:
    """Return the space of processes that have died since this store was opened, in bytes."""
    with exclusive(home.lock, core.options.timeout):
        return sweep(home.owners, core.env, core.slabs.slab_bytes)


__all__ = ["Home", "close_core", "find_home", "open_core", "reclaim"]
