"""Options of the nvme store, as they stand in its URL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvconnect.config import Bytes
from kvconnect.errors import ConfigError

DURABILITY = {
    "data": "payloads are on disk before their key appears; a power cut may lose the newest keys",
    "index": "payload and key are on disk before put returns",
    "none": "survives a killed process only; after a power cut the store starts empty",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeOptions:
    """What ``nvme:///folder?...`` accepts; sizes in bytes, times in seconds."""

    capacity: Bytes | None = None
    """Most bytes of payload, counting what is there. A block device defaults to its size."""
    slab: Bytes | None = None
    """Bytes of a slab file and so of the largest object; fixed when the store is made."""
    io: Literal["threads"] = "threads"
    io_threads: int = 4
    durability: Literal["data", "index", "none"] = "data"
    checksum: bool = True
    direct: Literal["auto", "on", "off"] = "auto"
    bounce: Bytes = 256 << 20
    high: float = 0.95
    low: float = 0.90
    evict: bool = True
    """False: a full store refuses with NO_SPACE instead of evicting."""
    timeout: float = 60.0
    """Deadline of a transfer whose caller gives none."""
    index: str | None = None
    """Folder of the index, where the location is a block device."""
    format: bool = False
    """Take over a block device that holds something else."""

    def __post_init__(self) -> None:
        """Check ranges; `ConfigError` names the option."""
        for name, least in (("capacity", 1 << 16), ("slab", 1 << 16), ("bounce", 8 << 20)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"nvme: {name}={value} is too small; it must be >= {least} B")
        if not 1 <= self.io_threads <= 256:
            raise ConfigError(f"nvme: io_threads={self.io_threads} must be between 1 and 256")
        if not 0 < self.low < self.high <= 1:
            raise ConfigError(
                f"nvme: watermarks need 0 < low < high <= 1, not {self.low}, {self.high}"
            )
        if not self.timeout > 0:
            raise ConfigError(f"nvme: timeout={self.timeout} must be greater than 0")
