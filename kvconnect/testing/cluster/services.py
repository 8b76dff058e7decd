"""The services that a scenario can name, by the name of their kind."""

from __future__ import annotations

from collections.abc import Mapping

from kvconnect.errors import ConfigError
from kvconnect.testing.cluster.host import Host
from kvconnect.testing.cluster.service import Service, Value
from kvconnect.testing.cluster.service_mooncake import Etcd, MooncakeMaster, MooncakeOwner
from kvconnect.testing.cluster.service_stores import S3, Nvme

__all__ = ["KINDS", "S3", "Etcd", "MooncakeMaster", "MooncakeOwner", "Nvme", "Service", "make"]

KINDS: dict[str, type[Service]] = {
    kind.kind: kind for kind in (Nvme, S3, Etcd, MooncakeMaster, MooncakeOwner)
}
"""Every kind of service by its name."""


def make(
    kind: str, name: str, host: Host, of: Service | None, options: Mapping[str, Value]
) -> Service:
    """Return a service by the name of its kind; `ConfigError` lists them.

    nvme: a folder on the host's disk, no process. s3: an S3 server with a bucket. etcd: finds
    out which master leads. mooncake-master: alone, or `of` an etcd. mooncake-owner: gives `mib`
    MiB of memory to the store of the master or etcd that it is `of`.
    """
    if kind not in KINDS:
        raise ConfigError(f"service {name}: kind is {kind!r}; it must be one of {sorted(KINDS)}")
    return KINDS[kind](name, host, of, options)
