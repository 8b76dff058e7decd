"""Mooncake's Transfer Engine between ranks: P2P handshake, no metadata server, no store.

The engine listens on every interface, whatever `host` says, and asks nobody who they are: over
TCP whoever reaches its ports (15000 to 17000) can read and write what is registered. Let only
the fleet reach them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from kvconnect.backend import Closing, Registration
from kvconnect.config import Bytes, parse_options
from kvconnect.disagg.grants import (
    Address,
    Generation,
    Grants,
    Host,
    Port,
    Token,
    decode,
    grants_of,
    table_of,
)
from kvconnect.disagg.network import NetworkTransport
from kvconnect.disagg.transport import Peer, PeerCapabilities, PeerTransport
from kvconnect.errors import ConfigError, RegistrationError, UnavailableError
from kvconnect.region import Region
from kvconnect.registering import Memory
from kvconnect_mooncake.library import PROGRESS_SECONDS, load, setting
from kvconnect_mooncake.peers_driver import Header, TransferDriver
from kvconnect_mooncake.transport import check_cards, check_in_use, in_use

CAPABILITIES = PeerCapabilities(
    max_entries=1024, max_bytes=256 << 20, run_seconds=57e-6, byte_seconds=6e-10
)
"""Measured over TCP on one host: an entry costs the same alone and in a batch."""

_OVERLAPS = -7


@dataclass(frozen=True, slots=True)
class MooncakePeerOptions:
    """Options of the transport.

    `host`: this rank's address, which peers use; `entries`: runs inside the library at once,
    per peer: more gain little, and each four of them hold memory two seconds longer once a peer
    has stopped; `settle`: seconds that a peer must have run after a failed push before its memory
    counts as quiet, by default a second more than the library waits for progress.
    """

    host: str = "127.0.0.1"
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = ""
    allow_fallback: bool = False
    entries: int = 16
    settle: float | None = None
    max_region_bytes: Bytes | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be; `ConfigError` names the option."""
        if not 1 <= self.entries <= 512:
            raise ConfigError(
                f"mooncake: entries={self.entries}; it must be 1 to 512: the library queues 1024 "
                f"for a peer, and fails what waits longer than a second"
            )
        if self.settle is not None and not 0 < self.settle <= 600:
            raise ConfigError(f"mooncake: settle={self.settle} s; it must be above 0, at most 600")


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="mooncake1"):
    """What `describe` gives: how to reach the engine, and the life server beside it."""

    generation: Generation
    token: Token
    host: Host
    port: Port
    life: Port
    header: Address
    grants: Grants


class MooncakeTransport(NetworkTransport):
    """One rank's engine.

    The engine tells nobody which start of a process it belongs to: a region of its own holds
    the generation, which peers read by the engine itself when they connect and after failures.
    """

    name = "mooncake"

    def __init__(self, options: MooncakePeerOptions | None = None) -> None:
        """Start an engine; `UnavailableError` where the library or the protocol is missing."""
        self.options = opts = options or MooncakePeerOptions()
        check_cards(opts.protocol, allow_fallback=opts.allow_fallback)
        module = load(opts.protocol, "mooncake.engine")
        progress = setting("MC_TCP_PROGRESS_TIMEOUT_SEC", PROGRESS_SECONDS)
        super().__init__(opts.host, progress + 1.0 if opts.settle is None else opts.settle)
        try:
            self._engine: Any = module.TransferEngine()
            self._start()
            self._header = Header(bytes.fromhex(self.generation))
            self._own = _Registered(self._engine, self._header.address, self._header.nbytes)
        except BaseException:
            self.life.close()
            raise
        limit = opts.max_region_bytes
        self._memory = Memory(self.name, self.table, self._hold, limit)
        self.capabilities = replace(CAPABILITIES, max_region_bytes=limit)

    def _start(self) -> None:
        opts = self.options
        code = self._engine.initialize(opts.host, "P2PHANDSHAKE", opts.protocol, opts.device)
        if code:
            raise UnavailableError(
                f"mooncake: the engine does not start on {opts.host} with {opts.protocol} "
                f"({code}); check host= and device="
            )
        check_in_use(opts.protocol, in_use(), allow_fallback=opts.allow_fallback)

    def register(self, regions: Sequence[Region]) -> Registration:
        """Register local memory, all or nothing; refcounted."""
        self.check_open()
        return self._memory.add(regions)

    def _hold(self, region: Region) -> _Registered:
        return _Registered(self._engine, region.address, region.nbytes)

    def describe(self) -> bytes:
        """Return what a peer needs. Keep it from those who may not connect."""
        self.check_open()
        grants = grants_of(self.regions, self.name)
        port = int(self._engine.get_rpc_port())
        return msgspec.msgpack.encode(
            Metadata(
                self.generation, self.token, self.host, port, self.life.port,
                self._header.address, grants,
            )
        )  # fmt: skip

    def connect(self, metadata: bytes, timeout: float) -> Peer:
        """Connect and read the peer's generation by the engine; see `PeerTransport.connect`."""
        self.check_open()
        data = decode(metadata, Metadata, self.name)
        generation = bytes.fromhex(data.generation)

        def driver() -> TransferDriver:
            session = f"{data.host}:{data.port}"
            target = (session, data.header, generation)
            return TransferDriver(self._engine, self._header, target, self.options.entries)

        return self._open(
            data.generation,
            (data.host, data.life, data.token),
            table_of(data.grants, self.name),
            driver,
            timeout,
        )

    def shut(self) -> None:
        """Unregister what is left and drop the engine."""
        self._memory.close()
        self._own.close()
        self._engine = None
        self._header.close()


class _Registered(Closing):
    """Memory registered with the engine."""

    def __init__(self, engine: Any, address: int, nbytes: int) -> None:
        self._engine, self._address = engine, address
        if code := engine.register_memory(address, nbytes):
            why = "it overlaps other memory" if code == _OVERLAPS else "refused"
            raise RegistrationError(f"mooncake: {nbytes} B at {address:#x}: {why} ({code})")

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None and (code := engine.unregister_memory(self._address)):
            raise RegistrationError(
                f"mooncake: memory at {self._address:#x} cannot be unregistered ({code})"
            )


def open_transport(options: Mapping[str, object]) -> MooncakeTransport:
    """Open from text options; `ConfigError` names what is wrong, with close matches."""
    return MooncakeTransport(parse_options(options, MooncakePeerOptions, "mooncake"))


_: type[PeerTransport] = MooncakeTransport
