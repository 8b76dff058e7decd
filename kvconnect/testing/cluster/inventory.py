"""The hosts of an existing cluster, as a TOML file says: how to reach them and what they allow."""

from __future__ import annotations

import ipaddress
import tomllib
from pathlib import Path
from typing import Annotated, Self

import msgspec
from msgspec import Meta

from kvconnect.config import parse_bytes
from kvconnect.errors import ConfigError

Seconds = Annotated[float, Meta(gt=0, le=3600)]


class HostEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ``[[host]]``.

    `address` is its IPv4 address on the cluster's network, `directory` an existing folder on the
    disk to be used, of which a subfolder is ours; `python` has kvconnect. With `faults` links may
    be cut and slowed, for which the user is root or has ``sudo -n``; `fill` is the size of the
    largest file that `fill_disk` may make. The rest is as in ssh's own configuration, which is
    read too.
    """

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
    ssh: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_\[:.][^\s]*$")]
    address: str
    directory: Annotated[str, Meta(pattern=r"^/")]
    python: str = "python3"
    faults: bool = False
    fill: str | int = 0
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    identity: str | None = None
    known_hosts: str | None = None
    proxy_command: str | None = None

    @property
    def fill_bytes(self) -> int:
        """Return the largest file of `fill_disk`; 0 for none."""
        return parse_bytes(self.fill, "fill")


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[options]``, all in seconds."""

    connect_timeout: Seconds = 10.0
    lease: Seconds = 30.0
    """A host that hears nothing of the runner for so long undoes everything by itself."""


class Inventory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file holds. Names and addresses are unique."""

    host: Annotated[tuple[HostEntry, ...], Meta(min_length=1, max_length=64)]
    options: Options = Options()

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a file; `ConfigError` names the file, the field and what is wrong.

        Files it names are relative to its own folder; ``~`` is the user's home.
        """
        path = Path(path)
        try:
            inventory = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), cls)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        except (ValueError, msgspec.ValidationError) as error:
            raise ConfigError(f"{path}: {error}") from error
        hosts = tuple(_located(host, path.resolve().parent) for host in inventory.host)
        made = msgspec.structs.replace(inventory, host=hosts)
        made.check(str(path))
        return made

    def check(self, where: str) -> None:
        """Raise `ConfigError` for what the types do not say."""
        for field in ("name", "address"):
            values = [getattr(host, field) for host in self.host]
            twice = sorted({v for v in values if values.count(v) > 1})
            if twice:
                raise ConfigError(f"{where}: {field} of two hosts is {', '.join(twice)}")
        for host in self.host:
            try:
                ipaddress.IPv4Address(host.address)
                host.fill_bytes  # noqa: B018 - parses it
            except ValueError as error:
                raise ConfigError(f"{where}: host {host.name}: {error}") from error

    def first(self, count: int) -> Inventory:
        """Return the same with only the first hosts; `ConfigError` where there are fewer."""
        if not 1 <= count <= len(self.host):
            raise ConfigError(f"hosts={count}, the inventory has {len(self.host)}")
        return msgspec.structs.replace(self, host=self.host[:count])


def _located(host: HostEntry, folder: Path) -> HostEntry:
    """Make the paths on the runner's side absolute."""
    fields = {
        name: str(folder / Path(value).expanduser())
        for name in ("identity", "known_hosts")
        if (value := getattr(host, name)) is not None
    }
    return msgspec.structs.replace(host, **fields)
