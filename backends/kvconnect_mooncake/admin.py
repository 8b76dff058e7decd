"""The master's HTTP service: the only way to list keys."""

from __future__ import annotations

import http.client
from dataclasses import dataclass

from kvconnect.errors import ConfigError, UnavailableError
from kvconnect_mooncake.address import ADMIN_PORT, Address

TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Admin:
    """Where it listens; `host` None where it is not known."""

    host: str | None
    port: int

    def keys(self) -> list[str]:
        """Return every key of the store, complete or not.

        Raises `UnavailableError` where the service cannot be asked.
        """
        if self.host is None:
            raise UnavailableError(
                "mooncake: keys are listed through the master's HTTP service, which etcd does "
                "not name; give admin=host:port (the master's --metrics_port)"
            )
        connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_SECONDS)
        try:
            connection.request("GET", "/get_all_keys")
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(
                f"mooncake: http://{self.host}:{self.port}/get_all_keys: {error!r}; give "
                f"admin=host:port (the master's --metrics_port)"
            ) from error
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise UnavailableError(
                f"mooncake: http://{self.host}:{self.port}/get_all_keys answered "
                f"{answer.status}; is admin= the master's --metrics_port?"
            )
        return [line for line in body.decode(errors="replace").split("\n") if line]


def parse_admin(text: str | None, address: Address) -> Admin:
    """Parse ``host:port``; without it the master's host with the default port."""
    if text is None:
        return Admin(None if address.etcd else address.host, ADMIN_PORT)
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"mooncake: admin={text!r} is no host:port")
    return Admin(host, int(port))
