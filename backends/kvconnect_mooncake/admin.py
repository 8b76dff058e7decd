"""The masters' HTTP service: the only way to list keys, and to learn what a master does.

Of several masters one serves; the others answer that they do not. Which one it is changes.
"""

from __future__ import annotations

import http.client
import re
import time
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import quote

from kvconnect.errors import ConfigError, UnavailableError
from kvconnect_mooncake.address import ADMIN_PORT, CONNECT_SECONDS, Address

TIMEOUT_SECONDS = 10.0
"""For all masters together."""


class Answer(NamedTuple):
    """What a master said, and which (``http://host:port``)."""

    status: int
    body: bytes
    where: str


@dataclass(slots=True)
class Admin:
    """Where the masters listen, (host, port) each; none where that is not known."""

    places: tuple[tuple[str, int], ...]
    _served: int = field(default=0, init=False)
    """The one that answered last, which is asked first."""

    def keys(self) -> list[str]:
        """Return every key of the store, complete or not.

        Raises `UnavailableError`, with what each master said, where none serves.
        """
        answer = self._ask("/get_all_keys")
        if answer.status != http.client.OK:
            raise UnavailableError(
                f"mooncake: {answer.where}/get_all_keys answered {answer.status}; is admin= the "
                f"master's --metrics_port?"
            )
        return [line for line in answer.body.decode(errors="replace").split("\n") if line]

    def check_tenant(self, tenant: str) -> None:
        """Raise `ConfigError` unless the master keeps this tenant's objects apart.

        One that does not know of tenants would store them, where everybody sees them.
        """
        answer = self._ask(f"/api/v1/tenant_quotas?tenant_id={quote(tenant, safe='')}")
        if answer.status == http.client.NOT_FOUND:
            raise ConfigError(
                f"mooncake: tenant={tenant!r} is not known to the master; PUT "
                f'{{"requested_quota_bytes": N}} to {answer.where}/api/v1/tenant_quotas'
                f"?tenant_id={quote(tenant, safe='')}"
            )
        if answer.status != http.client.OK:
            raise ConfigError(
                f"mooncake: tenant={tenant!r} means nothing to the master, which runs without "
                f"--enable_multi_tenants=true ({answer.where} answered {answer.status})"
            )

    def _ask(self, path: str) -> Answer:
        """Return what the master that serves says; `UnavailableError` where none does."""
        if not self.places:
            raise UnavailableError(
                "mooncake: this is asked of the master's HTTP service, which etcd does not name; "
                "give admin=host:port, or all of them as host:port;host:port (the masters' "
                "--metrics_port)"
            )
        until, said = time.monotonic() + TIMEOUT_SECONDS, []
        for step in range(len(self.places)):
            at = (self._served + step) % len(self.places)
            host, port = self.places[at]
            where = f"http://{host}:{port}"
            try:
                answer = Answer(*_get(host, port, path, until), where)
            except (OSError, http.client.HTTPException) as error:
                said.append(f"{where}: {error!r}")
                continue
            if answer.status != http.client.SERVICE_UNAVAILABLE:
                self._served = at
                return answer
            said.append(f"{where} is on standby")
        question = path.partition("?")[0]
        raise UnavailableError(
            f"mooncake: no master answers {question}: {'; '.join(said)}. admin= names the "
            f"--metrics_port of every master, host:port;host:port"
        )


def _get(host: str, port: int, path: str, until: float) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS)
    try:
        connection.connect()
        connection.sock.settimeout(max(until - time.monotonic(), 0.1))
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def parse_admin(text: str | None, address: Address) -> Admin:
    """Parse ``host:port[;host:port]``; without it the master's host with the default port."""
    if text is None:
        return Admin(() if address.etcd else ((address.host, ADMIN_PORT),))
    places = []
    for one in text.split(";"):
        match = re.fullmatch(r"([^/\s]+):(\d{1,5})", one.strip())
        if not match or not 0 < int(match[2]) < 1 << 16:
            raise ConfigError(f"mooncake: admin={text!r}: {one!r} is no host:port")
        places.append((match[1], int(match[2])))
    return Admin(tuple(places))
