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

BASE = Path("/var/tmp/kvconnect-clusters")  # noqa: S108 - made 0700 and owned by root
"""One folder per cluster. Not under /run: disk images need a file system with direct I/O."""

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

    def owner(self) -> Owner | None:
        """Read who made the cluster; None where the record is unreadable."""
        try:
            return msgspec.json.decode((self.folder / "owner").read_bytes(), type=Owner)
        except (OSError, msgspec.MsgspecError):
            return None


def claim() -> Names:
    """Make the folder of a new cluster, owned by this process.

    The record comes first and the folder's name last: a folder that others see has an owner.
    """
    try:
        BASE.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UnavailableError(f"cannot make {BASE} for clusters: {error}") from error
    names = Names(secrets.token_hex(4))
    new = BASE / f"{_NEW}{names.ident}"
    new.mkdir(mode=0o700)
    (new / "owner").write_bytes(msgspec.json.encode(Owner.this()))
    new.rename(names.folder)
    return names


def claimed() -> list[Names]:
    """List every cluster of this machine that has a folder, dead or alive."""
    if not BASE.is_dir():
        return []
    return [Names(p.name) for p in sorted(BASE.iterdir()) if not p.name.startswith(_NEW)]


def drop_unfinished(older_than: float) -> None:
    """Remove folders whose `claim` was killed before its end; `older_than` in Unix seconds."""
    for path in BASE.glob(f"{_NEW}*"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < older_than:
                shutil.rmtree(path)


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks from boot; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {"Z", "X"} else int(fields[19])
