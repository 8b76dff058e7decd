"""Mooncake Store on a cluster: masters, alone or elected through etcd, and owners of segments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvconnect.config import parse_options
from kvconnect.errors import ConfigError, UnavailableError
from kvconnect.testing.cluster.host import Host
from kvconnect.testing.cluster.process import Process
from kvconnect.testing.cluster.service import (
    Keeps,
    Service,
    Value,
    await_answers,
    refuse_of,
    url_of,
)

_START_SECONDS = 60.0
_BINARY = "from kvconnect_mooncake import library; print(library.master_binary())"

_PATIENCE: dict[str, Value] = {
    "timeout": 10,
    "rpc_timeout": 2,
    "breaker": 1,
    "space_wait": 0.3,
    "close_timeout": 5,
    "entries": 8,
}
"""Options of a worker that give up soon: what `exists` waits for has no other deadline.

A call of the library to an owner that was killed takes about 2 s an entry, and holds up all
stores of the process: with `entries` 256 a worker stores again 50 s after the kill, with 8 it
takes 12 to 15 s.
"""


class Etcd(Service):
    """One etcd, its data on the host's disk. What is opened is the Mooncake Store of its masters.

    It has no options.
    """

    kind = "etcd"

    def __init__(
        self, name: str, host: Host, of: Service | None, options: Mapping[str, Value]
    ) -> None:
        """Choose its ports."""
        super().__init__(name, host, of, options)
        refuse_of(self)
        parse_options(options, _NoOptions, name)
        self.port, self._peers = host.free_port(), host.free_port()
        self.masters: list[MooncakeMaster] = []

    @property
    def endpoint(self) -> str:
        """Where masters find it."""
        return f"http://{self.host.address}:{self.port}"

    def _launch(self) -> Process:
        peers = f"http://{self.host.address}:{self._peers}"
        argv = ["etcd", "--name", "default", "--data-dir", str(self.host.directory / self.name)]
        argv += ["--listen-client-urls", self.endpoint, "--advertise-client-urls", self.endpoint]
        argv += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        argv += ["--initial-cluster", f"default={peers}"]
        try:
            return self.host.spawn(argv, name=self.name)
        except (UnavailableError, FileNotFoundError) as error:
            raise UnavailableError(
                f"{self.name}: etcd cannot be started on {self.host.name} ({error}); install the "
                f"Debian package: apt-get install etcd-server"
            ) from error

    def _await(self, process: Process) -> None:
        urls = [f"{self.endpoint}/health"]
        await_answers(process, self.host, urls, lambda a: "true" in a[0], _START_SECONDS)

    def url(self, host: Host, **options: Value) -> str:  # noqa: ARG002 - the same on all hosts
        """Return the store of the masters that it elects from."""
        if not self.masters:
            raise ConfigError(f"{self.name}: no mooncake-master is of this etcd; add one")
        location = f"etcd://{self.host.address}:{self.port}"
        return _store(location, self.masters, options)


@dataclass(frozen=True, slots=True)
class _NoOptions:
    """What takes none."""


@dataclass(frozen=True, slots=True)
class _MasterOptions:
    """Seconds: `lease` of objects that were read, `client_ttl` after which an owner is dead."""

    lease: float = 5.0
    client_ttl: int = 3
    discard: int = 3


class MooncakeMaster(Service):
    """A master of its own, which keeps nothing, or one of those of an etcd, which keep all.

    The leader writes what it acknowledged to etcd a little later: of eight leaders that were
    killed within 10 ms of an acknowledgement three took pages with them, of eight that were
    killed 0.3 s after it none.
    """

    kind = "mooncake-master"

    def __init__(
        self, name: str, host: Host, of: Service | None, options: Mapping[str, Value]
    ) -> None:
        """Choose its ports."""
        super().__init__(name, host, of, options)
        self.options = parse_options(options, _MasterOptions, name)
        self.port, self._admin_port = host.free_port(), host.free_port()
        self._binary = ""
        self.keeps: Keeps = "nothing"
        if of is not None:
            refuse_of(self, Etcd)
        if isinstance(of, Etcd):
            self.keeps, self.settles = "all", 1.0
            of.masters.append(self)

    @property
    def admin(self) -> str:
        """Where it answers HTTP."""
        return f"{self.host.address}:{self._admin_port}"

    def _launch(self) -> Process:
        o = self.options
        argv = [self._program(), f"--rpc_address={self.host.address}", f"--rpc_port={self.port}"]
        argv += [f"--metrics_port={self._admin_port}", "--logtostderr"]
        argv += [f"--default_kv_lease_ttl={round(o.lease * 1000)}", f"--client_ttl={o.client_ttl}"]
        argv += [f"--put_start_discard_timeout_sec={o.discard}"]
        if isinstance(self.of, Etcd):
            argv += ["--enable_ha=true", "--ha_backend_type=etcd", "--enable_oplog=true"]
            argv += [f"--ha_backend_connstring={self.of.endpoint}"]
        return self.host.spawn(argv, name=self.name)

    def _program(self) -> str:
        """Ask the host where its program is, once: loading the library takes seconds."""
        if not self._binary:
            argv = [self.host.python, "-c", _BINARY]
            done = self.host.run(argv, timeout=_START_SECONDS)
            if done.returncode:
                raise UnavailableError(f"{self.name}: {done.stderr.strip()[-500:]}")
            self._binary = done.stdout.split()[-1]
        return self._binary

    def _await(self, process: Process) -> None:
        if not isinstance(self.of, Etcd):
            self.host.await_port(self.port, _START_SECONDS, process)
            return
        # Of several one serves and the others follow; `leader_warmup` still refuses calls.
        rest = [one for one in self.of.masters if one is not self]
        urls = [f"http://{one.admin}/ha_status" for one in (self, *rest)]
        await_answers(process, self.host, urls, _settled, _START_SECONDS)

    def url(self, host: Host, **options: Value) -> str:
        """Return its store, or that of all masters of its etcd."""
        if isinstance(self.of, Etcd):
            return self.of.url(host, **options)
        return _store(f"{self.host.address}:{self.port}", [self], options)


def _settled(answers: list[str]) -> bool:
    return answers[0] in {"serving", "standby"} and "serving" in answers


def _store(location: str, masters: list[MooncakeMaster], options: Mapping[str, Value]) -> str:
    admin = ";".join(one.admin for one in masters)
    lease = min(one.options.lease for one in masters)
    known: dict[str, Value] = {**_PATIENCE, "admin": admin, "lease": lease}
    return url_of("mooncake", location, {**known, **options})


@dataclass(frozen=True, slots=True)
class _OwnerOptions:
    """`mib`: what it gives to the store."""

    mib: int = 64


class MooncakeOwner(Service):
    """A process that gives memory to the store of a master or an etcd; what it held dies with it.

    It waits for the master, also for one that is restarted, and gives its memory again.
    """

    kind = "mooncake-owner"
    keeps: Keeps = "nothing"

    def __init__(
        self, name: str, host: Host, of: Service | None, options: Mapping[str, Value]
    ) -> None:
        """Take whose it is."""
        super().__init__(name, host, of, options)
        refuse_of(self, MooncakeMaster, Etcd)
        self.options = parse_options(options, _OwnerOptions, name)

    def _launch(self) -> Process:
        assert self.of is not None
        url = self.of.url(self.host, segment=f"{self.options.mib}MiB")
        argv = [self.host.python, "-m", "kvconnect.testing.cluster.mooncake_owner", url]
        return self.host.spawn(argv, name=self.name, ready="up", timeout=_START_SECONDS)

    def url(self, host: Host, **options: Value) -> str:
        """Return the store that it is a part of."""
        assert self.of is not None
        return self.of.url(host, **options)
