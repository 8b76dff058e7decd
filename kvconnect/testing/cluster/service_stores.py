"""Stores that need nobody else: a folder on a host's disk, and an S3 server."""

from __future__ import annotations

from collections.abc import Mapping

from kvconnect.errors import ConfigError, UnavailableError
from kvconnect.testing.cluster.host import Host
from kvconnect.testing.cluster.process import Process
from kvconnect.testing.cluster.service import Keeps, Service, Value, refuse_of, url_of

_START_SECONDS = 60.0
_BUCKET = "kvconnect"

_MAKE_BUCKET = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], method="PUT", headers={"Authorization": sys.argv[2]})
urllib.request.urlopen(request, timeout=10).close()
"""


class Nvme(Service):
    """A folder on the host's disk, for workers of that host. It has no process.

    Its options are those of `nvme://`. What a power cut may cost is what `durability` says: the
    newest pages, unless it is ``index``.
    """

    kind = "nvme"
    evicts = True

    def __init__(
        self, name: str, host: Host, of: Service | None, options: Mapping[str, Value]
    ) -> None:
        """Name the folder."""
        super().__init__(name, host, of, options)
        refuse_of(self)

    def _launch(self) -> None:
        return None

    def url(self, host: Host, **options: Value) -> str:
        """Return the folder's store; `ConfigError` for a worker of another host."""
        if host is not self.host:
            raise ConfigError(
                f"{self.name}: a folder on {self.host.name} cannot be opened on {host.name}; "
                f"give that host an nvme of its own"
            )
        known: dict[str, Value] = {"capacity": "64MiB", "bounce": "16MiB", "timeout": 2}
        given = {**known, **self.given, **options}
        return url_of("nvme", str(self.host.directory / self.name), given)


class S3(Service):
    """An S3 server (moto) with one bucket, in memory: what it held dies with it.

    Its options are those of `nixl+s3://`, as defaults for its workers.
    """

    kind = "s3"
    keeps: Keeps = "nothing"

    def __init__(
        self, name: str, host: Host, of: Service | None, options: Mapping[str, Value]
    ) -> None:
        """Choose its port."""
        super().__init__(name, host, of, options)
        refuse_of(self)
        self.port = host.free_port()

    @property
    def endpoint(self) -> str:
        """Where it answers."""
        return f"http://{self.host.address}:{self.port}"

    def _launch(self) -> Process:
        argv = [self.host.python, "-m", "moto.server", "-H", self.host.address]
        return self.host.spawn([*argv, "-p", str(self.port)], name=self.name)

    def _await(self, process: Process) -> None:
        self.host.await_port(self.port, _START_SECONDS, process)
        # moto picks the service by what a request is signed for; it checks no signature.
        signed = "AWS4-HMAC-SHA256 Credential=kvconnect/20260101/us-east-1/s3/aws4_request"
        argv = [self.host.python, "-I", "-S", "-c", _MAKE_BUCKET]
        argv += [f"{self.endpoint}/{_BUCKET}", signed]
        done = self.host.run(argv, timeout=_START_SECONDS)
        if done.returncode:
            raise UnavailableError(f"{self.name}: no bucket: {done.stderr.strip()[-500:]}")

    def url(self, host: Host, **options: Value) -> str:  # noqa: ARG002 - the same on all hosts
        """Return the bucket's store."""
        known: dict[str, Value] = {
            "endpoint": self.endpoint,
            "access_key": "kvconnect",
            "secret_key": "kvconnect",
            "bounce": "32MiB",
            "timeout": 10,
            "request_timeout": 1,
            "cooldown": 1,
            "retries": 1,
        }
        return url_of("nixl+s3", _BUCKET, {**known, **self.given, **options})
