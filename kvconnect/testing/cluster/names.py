"""Names of everything a local cluster makes, derived from one short identifier.

Who reads an identifier can find and remove all of it, and two clusters on one machine never
meet: the links of a cluster live in its own network namespaces alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvconnect.boot import boot_id
from kvconnect.errors import UnavailableError
from kvconnect.testing.procstat import stat_fields

BASE = Path("/var/tmp/kvconnect-clusters")  # noqa: S108 - made 0700 and owned by root
"""One folder per cluster. Not under /run: disk images need a file system with direct I/O."""

SSH_BASE = Path(f"/var/tmp/kvconnect-ssh-{os.geteuid()}")  # noqa: S108 - checked to be ours
"""One folder per cluster over ssh. A short path, because sockets lie in it."""

DEVICE = "eth0"
"""The network device inside a host."""

BRIDGE = "bridge0"

_SUBNET = "10.73.0"

_NEW = ".new-"


class Owner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process that owns a cluster: its id alone would come to mean another process."""

    pid: int
    start: int  # clock ticks from boot, field 22 of /proc/PID/stat
    boot: str

    @classmethod
    def this(cls) -> Owner:
        """Describe the calling process."""
        return cls(os.getpid(), start_ticks(os.getpid()) or 0, boot_id())

    def alive(self) -> bool:
        """Tell whether that very process still runs."""
        return self.boot == boot_id() and start_ticks(self.pid) == self.start


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one cluster; `ident` is eight hexadecimal digits."""

    ident: str

    @property
    def folder(self) -> Path:
        """Where its images, mount points and records lie."""
        return BASE / self.ident

    @property
    def switch(self) -> str:
        """Return the network namespace of the bridge."""
        return f"{self.prefix}switch"

    @property
    def prefix(self) -> str:
        """What all its network namespaces begin with."""
        return f"kvc-{self.ident}-"

    @property
    def chain(self) -> str:
        """Return the iptables chain that holds its faults."""
        return f"KVC-{self.ident}"

    def host(self, index: int) -> str:
        """Return the network namespace of a host."""
        return f"{self.prefix}{index}"

    def port(self, index: int) -> str:
        """Return the device at the switch's end of a host's cable."""
        return f"port{index}"

    def address(self, index: int) -> str:
        """Return the IPv4 address of a host."""
        return f"{_SUBNET}.{index + 1}"

    def orphaned(self) -> bool:
        """Tell whether who made the cluster is gone, or unknown."""
        return orphaned(self.folder)


def claim() -> Names:
    """Make the folder of a new cluster, owned by this process."""
    return Names(claim_folder(BASE).name)


def claim_folder(base: Path) -> Path:
    """Make a folder below `base` that is owned by this process.

    The record comes first and the folder's name last: a folder that others see has an owner.
    """
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        if base.is_symlink() or base.stat().st_uid != os.geteuid():
            raise PermissionError("it is not this user's own")
    except OSError as error:
        raise UnavailableError(f"cannot make {base} for clusters: {error}") from error
    ident = secrets.token_hex(4)
    new = base / f"{_NEW}{ident}"
    new.mkdir(mode=0o700)
    (new / "owner").write_bytes(msgspec.json.encode(Owner.this()))
    return new.rename(base / ident)


def claimed() -> list[Names]:
    """List every cluster of this machine that has a folder, dead or alive."""
    return [Names(folder.name) for folder in claimed_folders(BASE)]


def claimed_folders(base: Path) -> list[Path]:
    """List the folders below `base` that somebody claimed."""
    if not base.is_dir():
        return []
    return [path for path in sorted(base.iterdir()) if not path.name.startswith(_NEW)]


def orphaned(folder: Path) -> bool:
    """Tell whether the owner of a claimed folder is gone, or unknown."""
    try:
        owner = msgspec.json.decode((folder / "owner").read_bytes(), type=Owner)
    except (OSError, msgspec.MsgspecError):
        return True
    return not owner.alive()


def drop_unfinished(older_than: float, base: Path = BASE) -> None:
    """Remove folders whose `claim` was killed before its end; `older_than` in Unix seconds."""
    for path in base.glob(f"{_NEW}*"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < older_than:
                shutil.rmtree(path)


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks from boot; None if it is gone or a zombie."""
    fields = stat_fields(Path(f"/proc/{pid}"))
    return None if fields is None or fields[0] in {"Z", "X"} else int(fields[19])
