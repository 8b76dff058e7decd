"""Opening a store: location, superblock, limits, and what a power cut left behind."""

from __future__ import annotations

import secrets
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from kvconnect.errors import ConfigError, UnavailableError
from kvconnect_nvme.failures import translated
from kvconnect_nvme.index import Index
from kvconnect_nvme.options import NvmeOptions
from kvconnect_nvme.slabs import claim_device, device_bytes
from kvconnect_nvme.state import (
    ALIGN,
    FORMAT,
    Superblock,
    read_superblock,
    write_superblock,
)

DEFAULT_SLAB = 1 << 30
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a store is: the folder of index, owners and marks, and the payload location."""

    folder: Path
    location: Path
    device: bool


def find_place(location: str, options: NvmeOptions) -> Place:
    """Make or check the folder, or claim the block device. Raises `ConfigError`."""
    if not location:
        raise ConfigError("nvme: the URL names no folder; write nvme:///mnt/kv?capacity=200GiB")
    path = Path(location)
    with translated(f"nvme store {path}"):
        device = path.exists() and stat.S_ISBLK(path.stat().st_mode)
        if not device and path.exists() and not path.is_dir():
            raise ConfigError(f"nvme: {path} is neither a folder nor a block device")
        if device and options.index is None:
            raise ConfigError(f"nvme: {path} is a block device: give a folder for index=")
        if not device and options.index is not None:
            raise ConfigError("nvme: index= is for block devices; a folder keeps its own index")
        folder = Path(options.index) if device and options.index else path
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if device:
        claim_device(path, overwrite=options.format)
    return Place(folder, path, device)


def open_index(place: Place, options: NvmeOptions) -> Index:
    """Open the index, emptied first where nothing in it can be believed."""
    folder = place.folder / "index"
    _drop_after_power_cut(place, options.durability)
    return Index.shared(
        folder, sync=options.durability != "none", metasync=options.durability == "index"
    )


def _drop_after_power_cut(place: Place, durability: str) -> None:
    """Without syncs the index may be torn by a power cut; then it must not be read at all.

    The boot id tells: a store written without syncs under another boot starts empty.
    """
    mark = place.folder / "unsynced"
    with translated(f"nvme store {place.folder}"):
        boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else "unknown"
        if mark.exists() and mark.read_text() != boot:
            shutil.rmtree(place.folder / "index", ignore_errors=True)
            mark.unlink()
        if durability == "none":
            mark.write_text(boot)


def superblock(index: Index, place: Place, options: NvmeOptions) -> tuple[Superblock, int]:
    """Return the superblock (made now in a new store) and the capacity in bytes."""
    with index.read() as txn:
        block = read_superblock(txn, index.db.meta)
    if place.device:
        room = device_bytes(place.location) // ALIGN * ALIGN
        capacity = min(options.capacity or room, room)
        slab = room
    else:
        capacity = _capacity(index, place, options, block)
        slab = min(options.slab or DEFAULT_SLAB, capacity)
    if block is None:
        return _make(index, max(slab // ALIGN * ALIGN, ALIGN)), capacity
    if options.slab is not None and options.slab // ALIGN * ALIGN != block.slab_bytes:
        raise ConfigError(
            f"nvme: slab={options.slab}, but the store at {place.folder} was made with slabs of "
            f"{block.slab_bytes} B; leave slab out"
        )
    return block, capacity


def _capacity(index: Index, place: Place, options: NvmeOptions, block: Superblock | None) -> int:
    if options.capacity is not None:
        index.update(
            lambda txn: txn.put(b"capacity", str(options.capacity).encode(), db=index.db.meta)
        )
        return options.capacity
    with index.read() as txn:
        kept = txn.get(b"capacity", db=index.db.meta)
    if block is None or kept is None:
        raise ConfigError(f"nvme: a new store at {place.folder} needs capacity=, as in 200GiB")
    return int(kept)


def _make(index: Index, slab: int) -> Superblock:
    def change(txn: object) -> Superblock:
        # Two processes may open a new store at once: the first one makes it.
        found = read_superblock(txn, index.db.meta)
        block = found or Superblock(FORMAT, slab, secrets.token_hex(8))
        if found is None:
            write_superblock(txn, index.db.meta, block)
        return block

    return index.update(change)


def check_free(place: Place, capacity: int, used: int) -> str | None:
    """Return a warning where the file system cannot hold the capacity that is asked."""
    with translated(f"nvme store {place.folder}"):
        free = shutil.disk_usage(place.folder).free
    if not place.device and capacity - used > free:
        return f"capacity {capacity} B, but only {free} B are free on the disk beside {used} B"
    return None


def require_folder(path: Path) -> None:
    """Raise `UnavailableError` if the store's folder is gone."""
    if not path.is_dir():
        raise UnavailableError(f"nvme: the store's folder {path} is gone")
