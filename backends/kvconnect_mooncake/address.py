"""The master's address, and the name under which this host is reached by the others."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

from kvconnect.errors import ConfigError, UnavailableError

PORT, ADMIN_PORT = 50051, 9003
CONNECT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where a master is: `text` as the library takes it; `etcd` where it finds out itself."""

    text: str
    host: str
    port: int
    etcd: bool

    def check(self) -> None:
        """Raise `UnavailableError` unless something listens there; the library tries for 4 s."""
        try:
            socket.create_connection((self.host, self.port), CONNECT_SECONDS).close()
        except OSError as error:
            what = "etcd" if self.etcd else "mooncake_master"
            raise UnavailableError(
                f"mooncake: nothing answers at {self.host}:{self.port}: {error}. Start {what} "
                f"there, or use mooncake+local:// for a master of this process's own"
            ) from error

    def own_host(self) -> str:
        """Return this host's address on the way to the master."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((self.host, self.port))
            except OSError as error:
                raise UnavailableError(
                    f"mooncake: no route to {self.host}: {error}; name this host with host="
                ) from error
            return str(probe.getsockname()[0])


def parse_address(location: str) -> Address:
    """Parse ``host``, ``host:port`` or ``etcd://host:port[;host:port]``; `ConfigError` if not.

    >>> parse_address("kv-master")
    Address(text='kv-master:50051', host='kv-master', port=50051, etcd=False)
    """
    etcd = location.startswith("etcd://")
    first = location.removeprefix("etcd://").split(";")[0]
    match = re.fullmatch(r"([^:/\s]+)(?::(\d{1,5}))?", first)
    if not match or not 0 < int(match[2] or PORT) < 1 << 16:
        raise ConfigError(
            f"mooncake: {location!r} is no master; write host:port, or etcd://host:port"
        )
    port = int(match[2] or (2379 if etcd else PORT))
    text = location if etcd else f"{match[1]}:{port}"
    return Address(text, match[1], port, etcd)
