"""CURVE keys of the control channel: who may take part in transfers.

One key pair per fleet, in a file that only its owner can read. Every rank is server and client
with the same pair, and lets in exactly those who hold it. Without keys the channel is bound to
loopback and reaches no network.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvconnect.errors import ConfigError

_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}\Z")


@dataclass(frozen=True, slots=True)
class Keys:
    """A CURVE key pair, Z85 text of 40 characters each; the secret is not in `repr`."""

    public: str
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        """Check the form of both."""
        for name in ("public", "secret"):
            if not _Z85.match(getattr(self, name)):
                raise ConfigError(f"{name} key is not 40 characters of Z85; run `kvconnect keys`")


def generate() -> Keys:
    """Make a new pair; `UnavailableError` without pyzmq."""
    from kvconnect.disagg.channel import zmq_module  # noqa: PLC0415 - channel imports this module

    zmq = zmq_module()
    public, secret = zmq.curve_keypair()
    return Keys(public.decode(), secret.decode())


def save(keys: Keys, path: Path) -> None:
    """Write a pair to a new file of mode 0600; `ConfigError` if it exists or cannot be made."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path} exists; keys are never overwritten, remove it first") from None
    except OSError as error:
        raise ConfigError(f"keys file {path} cannot be made: {error}") from None
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode({"public": keys.public, "secret": keys.secret}))


def load(path: Path) -> Keys:
    """Read a pair; `ConfigError` if others can read the file, or if it holds no pair."""
    data = check_private(path, "keys file", "make one with `kvconnect keys`")
    try:
        return Keys(**msgspec.json.decode(data, type=dict[str, str]))
    except (msgspec.MsgspecError, TypeError) as error:
        raise ConfigError(f"keys file {path} holds no key pair: {error}") from None


def check_private(path: Path, what: str, fix: str) -> str:
    """Return the text of a small file that its owner alone can read; `ConfigError` otherwise."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(4096)
    except OSError as error:
        raise ConfigError(f"{what} {path}: {error}; {fix}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            f"{what} {path} has mode {stat.S_IMODE(mode):04o}: others can read the secret; "
            f"chmod 600 it"
        )
    return data.decode("utf-8", "replace")


def check_address(address: str, keys: Keys | None) -> None:
    """Refuse what would reach a network without keys, or is no address at all.

    Addresses are ``tcp://HOST:PORT`` or ``ipc://PATH``.
    """
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        return
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not (port.isdigit() or port == "*"):
        raise ConfigError(f"control address {address!r}: write tcp://HOST:PORT or ipc://PATH")
    if keys is None and not _loopback(host):
        raise ConfigError(
            f"control address {address!r} is not loopback: it needs keys (make them with "
            f"`kvconnect keys` and give them to both sides)"
        )


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
