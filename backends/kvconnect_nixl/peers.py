"""NIXL with UCX between ranks: RDMA, shared memory or TCP, whichever UCX finds to be best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
import numpy as np

from kvconnect.backend import Registration
from kvconnect.config import Bytes, parse_options
from kvconnect.disagg.grants import (
    Generation,
    Grants,
    Host,
    Port,
    Token,
    decode,
    grants_of,
    table_of,
)
from kvconnect.disagg.lane import cut
from kvconnect.disagg.network import NetworkTransport
from kvconnect.disagg.transport import Peer, PeerCapabilities, PeerTransport, Runs, Way
from kvconnect.errors import BackendError, ConfigError
from kvconnect.region import Region
from kvconnect.registering import Memory
from kvconnect_nixl.agent import Verb
from kvconnect_nixl.held import Held
from kvconnect_nixl.peers_agent import UCX, PeerAgent
from kvconnect_nixl.posted import Posted
from kvconnect_nixl.rows import U64, plain

CAPABILITIES = PeerCapabilities(
    max_entries=1 << 16, max_bytes=256 << 20, run_seconds=1e-5, byte_seconds=8e-10
)
"""Measured between two processes of one host (6 to 25 us a run of 256 B, about 1 GB/s)."""

POST_RUNS, POST_BYTES = 4096, 16 << 20
"""Of one transfer: bounded, because on one host it is copied in the call that starts it."""
DEPTH = 4
_VERB: dict[Way, Verb] = {Way.PUSH: "WRITE", Way.PULL: "READ"}
_CLOSE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class NixlPeerOptions:
    """Options of the transport.

    `host`: this rank's address; while it is loopback, UCX too listens to this host only, else
    on all its devices (see also UCX_NET_DEVICES); `devices`: of UCX,
    comma-separated, all by default; `workers`: of UCX: peers are served at the same time where
    they are not of the same worker, and each worker has connections of its own to each peer;
    `settle`: seconds that a peer must have run after a failed push before its memory counts as
    quiet.
    """

    host: str = "127.0.0.1"
    devices: str = ""
    workers: int = 4
    settle: float = 3.0
    max_region_bytes: Bytes | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be; `ConfigError` names the option."""
        if not 1 <= self.workers <= 64:
            raise ConfigError(f"nixl: workers={self.workers}; it must be between 1 and 64")
        if not 0 < self.settle <= 600:
            raise ConfigError(f"nixl: settle={self.settle} s; it must be above 0, at most 600")


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="nixl1"):
    """What `describe` gives: the agent's own metadata, and the life server beside it."""

    generation: Generation
    token: Token
    host: Host
    life: Port
    agent: Annotated[bytes, msgspec.Meta(min_length=1, max_length=256 << 10)]
    grants: Grants


class NixlTransport(NetworkTransport):
    """One rank's agent. Its name is the generation, so that no restart is taken for it."""

    name = "nixl"

    def __init__(self, options: NixlPeerOptions | None = None) -> None:
        """Make the agent; `UnavailableError` where the library or UCX does not load."""
        self.options = opts = options or NixlPeerOptions()
        super().__init__(opts.host, opts.settle)
        try:
            parameters = {"num_workers": str(opts.workers)}
            if opts.devices:
                parameters["ucx_devices"] = opts.devices
            self._agent = PeerAgent(
                agent_name(self.generation),
                parameters,
                _CLOSE_SECONDS,
                loopback=opts.host in {"127.0.0.1", "localhost"},
            )
        except BaseException:
            self.life.close()
            raise
        self._memory = Memory(self.name, self.table, self._hold, opts.max_region_bytes)
        self.capabilities = replace(CAPABILITIES, max_region_bytes=opts.max_region_bytes)

    def register(self, regions: Sequence[Region]) -> Registration:
        """Register local memory, all or nothing; refcounted."""
        self.check_open()
        return self._memory.add(regions)

    def _hold(self, region: Region) -> Held:
        return self._agent.register(UCX, "DRAM", plain(region.address, region.nbytes))

    def describe(self) -> bytes:
        """Return what a peer needs. Keep it from those who may not connect."""
        self.check_open()
        grants = grants_of(self.regions, self.name)
        return msgspec.msgpack.encode(
            Metadata(
                self.generation, self.token, self.host, self.life.port,
                self._agent.metadata(), grants,
            )
        )  # fmt: skip

    def connect(self, metadata: bytes, timeout: float) -> Peer:
        """Connect and take the peer's agent in; see `PeerTransport.connect`."""
        self.check_open()
        data = decode(metadata, Metadata, self.name)
        return self._open(
            data.generation,
            (data.host, data.life, data.token),
            table_of(data.grants, self.name),
            lambda: UcxDriver(self._agent, agent_name(data.generation), data.agent),
            timeout,
        )

    def shut(self) -> None:
        """Drop the agent with all that it holds."""
        self._agent.close()


class UcxDriver:
    """The `Driver` of one peer."""

    name = "nixl"
    depth = DEPTH

    def __init__(self, agent: PeerAgent, peer: str, metadata: bytes) -> None:
        """`peer`: the other agent's name."""
        self._agent, self._peer, self._metadata = agent, peer, metadata
        self._met = False

    def verify(self) -> None:
        """Meet the other agent, anew after a failure: a connection that broke stays broken."""
        self._part()
        self._agent.meet(self._peer, self._metadata)
        self._met = True

    def pieces(self, way: Way, runs: Runs) -> Iterator[tuple[Way, U64, U64]]:
        """Cut a batch into transfers of bounded size."""
        short = cut(runs, POST_BYTES)
        local, remote = _rows(short.local, short.nbytes), _rows(short.remote, short.nbytes)
        ends = np.cumsum(short.nbytes)
        start = 0
        while start < len(short):
            done = int(ends[start - 1]) if start else 0
            stop = int(np.searchsorted(ends, np.uint64(done + POST_BYTES), side="right"))
            stop = min(stop, start + POST_RUNS)
            yield way, local[start:stop], remote[start:stop]
            start = stop

    def post(self, piece: tuple[Way, U64, U64]) -> Posted:
        """Start one transfer."""
        way, local, remote = piece
        if not self._met:
            raise BackendError(f"nixl: agent {self._peer} is not known")
        return self._agent.move(_VERB[way], self._peer, local, remote)

    def poll(self, ticket: Posted) -> str | None:
        """Ask NIXL how it stands."""
        if not ticket.poll():
            return None
        return "" if ticket.error is None else str(ticket.error)

    def close(self, *, gone: bool) -> None:  # noqa: ARG002 - it is forgotten in both cases
        """Forget the other agent."""
        self._part()

    def _part(self) -> None:
        if self._met:
            self._met = False
            self._agent.part(self._peer)


def agent_name(generation: str) -> str:
    """Return the agent's name of a generation."""
    return f"kvconnect-{generation}"


def _rows(address: U64, nbytes: U64) -> U64:
    return np.stack([address, nbytes, np.zeros_like(nbytes)], axis=1)


def open_transport(options: Mapping[str, object]) -> NixlTransport:
    """Open from text options; `ConfigError` names what is wrong, with close matches."""
    return NixlTransport(parse_options(options, NixlPeerOptions, "nixl"))


_: type[PeerTransport] = NixlTransport
