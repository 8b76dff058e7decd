"""The master's address, and the name under which this host is reached by the others."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

from kvconnect.errors import ConfigError, UnavailableError

PORT, ADMIN_PORT, ETCD_PORT = 50051, 9003, 2379
CONNECT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where a master is: `text` as the library takes it; `etcd` where it finds out itself.

    `places`: (host, port) of the master, or of every etcd.
    """

    text: str
    places: tuple[tuple[str, int], ...]
    etcd: bool

    @property
    def host(self) -> str:
        """The first of them."""
        return self.places[0][0]

    def check(self) -> None:
        """Raise `UnavailableError` unless something listens there; the library tries for 4 s."""
        said = []
        for place in self.places:
            try:
                socket.create_connection(place, CONNECT_SECONDS).close()
            except OSError as error:
                said.append(f"{place[0]}:{place[1]}: {error}")
            else:
                return
        what = "etcd" if self.etcd else "mooncake_master"
        raise UnavailableError(
            f"mooncake: nothing answers at {'; '.join(said)}. Start {what} there, or use "
            f"mooncake+local:// for a master of this process's own"
        )

    def own_host(self) -> str:
        """Return this host's address on the way to the master."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(self.places[0])
            except OSError as error:
                raise UnavailableError(
                    f"mooncake: no route to {self.host}: {error}; name this host with host="
                ) from error
            return str(probe.getsockname()[0])


def parse_address(location: str) -> Address:
    """Parse ``host``, ``host:port`` or ``etcd://host:port[;host:port]``; `ConfigError` if not.

    >>> parse_address("kv-master")
    Address(text='kv-master:50051', places=(('kv-master', 50051),), etcd=False)
    """
    etcd = location.startswith("etcd://")
    several = location.removeprefix("etcd://").split(";") if etcd else [location]
    places = []
    for one in several:
        match = re.fullmatch(r"([^:;/\s]+)(?::(\d{1,5}))?", one)
        if not match or not 0 < int(match[2] or PORT) < 1 << 16:
            raise ConfigError(
                f"mooncake: {location!r} is no master; write host:port, or "
                f"etcd://host:port;host:port"
            )
        places.append((match[1], int(match[2] or (ETCD_PORT if etcd else PORT))))
    text = ";".join(f"{host}:{port}" for host, port in places)
    return Address(f"etcd://{text}" if etcd else text, tuple(places), etcd)
