"""The shared-memory transport: ranks of one host, by copying between mapped memory.

The embedded default, with nothing to start, and the oracle for the others. Within a process any
memory will do; between processes it must be a memfd (`HostPool.allocate(shared=True)`), whose
descriptor is handed over a Unix socket to a process of the same user that knows the token. The
socket stays open: its end is how either side learns that the other is gone.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Closing, Registration
from kvconnect.disagg.shm_link import Link, Listener, Mapped, dial
from kvconnect.disagg.shm_move import Move, Mover
from kvconnect.disagg.transport import (
    Peer,
    PeerCapabilities,
    PeerTransfer,
    PeerTransport,
    Runs,
    SupportsReach,
    Way,
)
from kvconnect.errors import ClosedError, ConfigError, RegistrationError, UnavailableError
from kvconnect.hostmem import HostMemory, allocate
from kvconnect.hostpool import HostPool
from kvconnect.region import Region, RegionTable
from kvconnect.registrations import Registrations

CAPABILITIES = PeerCapabilities(max_bytes=256 << 20, run_seconds=8e-7, byte_seconds=1e-10)
MAX_GRANTS = 200
"""A message takes at most 253 descriptors (SCM_MAX_FD)."""

_here: dict[str, ShmTransport] = {}
_here_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Shared:
    """Memory that other processes can map: `nbytes` at `address` are byte 0 on of `fd`."""

    address: int
    nbytes: int
    fd: int


class Grant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One region a peer may touch; byte 0 of it is `offset` of the descriptor `memory`."""

    name: Annotated[str, msgspec.Meta(max_length=200)]
    address: Annotated[int, msgspec.Meta(ge=1, lt=(1 << 63) - 1)]
    nbytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    memory: Annotated[int, msgspec.Meta(ge=-1, lt=MAX_GRANTS)]
    offset: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="shm1"):
    """What `describe` gives."""

    generation: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    token: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    grants: Annotated[tuple[Grant, ...], msgspec.Meta(max_length=MAX_GRANTS)]


class ShmTransport(Closing):
    """One rank's end; `pools` are the shared pools whose memory other processes may map."""

    name = "shm"
    capabilities = CAPABILITIES

    def __init__(self, pools: Sequence[HostPool] = (), *, threads: int = 2) -> None:
        """Start listening. `threads` copy at the same time."""
        self.generation = secrets.token_hex(16)
        self._token = secrets.token_bytes(32)
        self._shared = [_shared(pool) for pool in pools if pool.fd is not None]
        self._mover = Mover(threads)
        self._registrations = Registrations(self.name, self._mover.under_way, 30.0)
        self._listener = Listener(
            self.generation, self._token, [memory.fd for memory in self._shared]
        )
        with _here_lock:
            _here[self.generation] = self

    def register(self, regions: Sequence[Region]) -> Registration:
        """Register local memory; `RegistrationError` where it overlaps what is there."""
        self._check_open()
        return self._registrations.add(regions)

    def allocate(self, nbytes: int, label: str) -> HostMemory:
        """Allocate a memfd; peers that connect from now on get it."""
        self._check_open()
        memory = allocate(nbytes, label, shared=True, pin=False)
        if memory.fd is not None:
            self._shared.append(Shared(memory.address, memory.nbytes, memory.fd))
            self._listener.offer(memory.fd)
        return memory

    @property
    def regions(self) -> tuple[Region, ...]:
        """Everything registered now."""
        return self._registrations.regions

    def describe(self) -> bytes:
        """Return generation, token and grants. Keep it from those who may not connect."""
        self._check_open()
        grants = tuple(self._grant(region) for region in self.regions)
        return msgspec.msgpack.encode(Metadata(self.generation, self._token, grants))

    def _grant(self, region: Region) -> Grant:
        for number, memory in enumerate(self._shared):
            offset = region.address - memory.address
            if 0 <= offset <= memory.nbytes - region.nbytes:
                return Grant(region.name, region.address, region.nbytes, number, offset)
        return Grant(region.name, region.address, region.nbytes, -1, 0)

    def connect(self, metadata: bytes, timeout: float) -> Peer:
        """Connect to another transport of this process, or map another process's memory."""
        self._check_open()
        data = decode(metadata)
        with _here_lock:
            local = _here.get(data.generation)
        if local is not None and secrets.compare_digest(local._token, data.token):  # noqa: SLF001
            return _Inside(local, data)
        return _Outside(data, timeout)

    def submit(self, peer: Peer, way: Way, runs: Runs, timeout: float) -> PeerTransfer:
        """Start copying; see `PeerTransport.submit`."""
        self._check_open()
        if not isinstance(peer, _ShmPeer):
            raise ConfigError(f"shm: {peer!r} was connected by another transport")
        with self._registrations.lock:
            self._registrations.locate(runs.local, runs.nbytes)
            placed = peer.place(runs).filled()
            move = Move(way, runs, placed, peer.alive, timeout, keep=peer.keep)
            self._mover.start(move, self.regions, peer.mapped)
        return move

    def reach(self, peer: Peer, address: int, nbytes: int) -> NDArray[np.uint8]:
        """Return granted memory of a peer; see `SupportsReach.reach`."""
        if not isinstance(peer, _ShmPeer):
            raise ConfigError(f"shm: {peer!r} was connected by another transport")
        # In this order: see `_Outside.close`.
        keep = peer.keep
        if not peer.alive():
            raise UnavailableError("shm: the peer has closed or died")
        here, size = (np.array([n], dtype=np.uint64) for n in (address, nbytes))
        at = peer.place(Runs(here, here, size)).remote
        memory: Any = (ctypes.c_uint8 * nbytes).from_address(int(at[0]))
        memory.keep = keep
        found: NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
        return found

    def _check_open(self) -> None:
        if self._listener.closed:
            raise ClosedError("the shm transport is closed")

    def close(self) -> None:
        """Stop listening and copying; raises `TransferTimeoutError` while a copy is under way."""
        with _here_lock:
            _here.pop(self.generation, None)
        self._listener.close()
        self._mover.close()
        self._registrations.drain()


def _shared(pool: HostPool) -> Shared:
    fd = pool.fd
    if fd is None:
        raise ConfigError(f"pool {pool.label!r} is not shared; allocate it with shared=True")
    return Shared(pool.memory.address, pool.memory.nbytes, fd)


def decode(metadata: bytes) -> Metadata:
    """Decode what a peer sent; `ConfigError` if it is not shm metadata."""
    try:
        return msgspec.msgpack.decode(metadata, type=Metadata)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"shm: the peer's metadata cannot be read: {error}") from None


class _ShmPeer(Closing):
    """What both kinds of peer share: grants, and where they lie in this process."""

    def __init__(self, data: Metadata, mapped: Sequence[Region]) -> None:
        self.generation = data.generation
        # One order for both, that of the addresses at the peer.
        order = sorted(range(len(mapped)), key=lambda at: data.grants[at].address)
        self.grants = RegionTable(
            Region(g.name, g.address, g.nbytes) for g in (data.grants[at] for at in order)
        )
        self.mapped = tuple(mapped[at] for at in order)

    @property
    def keep(self) -> object:
        """What must live as long as a copy: a peer may be closed while one is under way."""
        return None

    def place(self, runs: Runs) -> Runs:
        """Return the runs with remote addresses as they are in this process, checked."""
        at = self.grants.locate(runs.remote, runs.nbytes)
        theirs = np.array([r.address for r in self.grants.regions], dtype=np.uint64)
        ours = np.array([r.address for r in self.mapped], dtype=np.uint64)
        if not len(at):
            return runs
        return Runs(runs.local, runs.remote - theirs[at] + ours[at], runs.nbytes)

    def alive(self) -> bool:
        raise NotImplementedError


class _Inside(_ShmPeer):
    """A transport of this very process."""

    def __init__(self, other: ShmTransport, data: Metadata) -> None:
        super().__init__(data, [Region(g.name, g.address, g.nbytes) for g in data.grants])
        self._other = other
        self._open = True

    def alive(self) -> bool:
        return self._open and not self._other._listener.closed  # noqa: SLF001

    def close(self) -> None:
        self._open = False


class _Outside(_ShmPeer):
    """Another process: its memory mapped here, and the link that tells when it ends."""

    def __init__(self, data: Metadata, timeout: float) -> None:
        self._link: Link = dial(data.generation, data.token, timeout)
        try:
            self._maps = [Mapped(fd) for fd in self._link.fds]
            super().__init__(data, [self._region(grant) for grant in data.grants])
        except BaseException:
            self._link.close()
            raise

    def _region(self, grant: Grant) -> Region:
        if grant.memory < 0:
            raise RegistrationError(
                f"shm: the peer's region {grant.name!r} is private to its process; allocate the "
                f"pool with shared=True and give it to ShmTransport(pools=...)"
            )
        if grant.memory >= len(self._maps):
            raise UnavailableError(
                f"shm: the peer names memory {grant.memory}, it handed over {len(self._maps)}"
            )
        memory = self._maps[grant.memory]
        if grant.offset + grant.nbytes > memory.nbytes:
            raise RegistrationError(
                f"shm: the peer grants {grant.name!r} up to byte {grant.offset + grant.nbytes} "
                f"of a memory of {memory.nbytes} B"
            )
        return Region(grant.name, memory.address + grant.offset, grant.nbytes)

    @property
    def keep(self) -> object:
        return self._maps

    def alive(self) -> bool:
        return self._link.alive()

    def close(self) -> None:
        # In this order: who still gets the mappings to keep may use them, later ones see that
        # the link is down. The memory is unmapped with the last copy that keeps it.
        self._link.close()
        self._maps = []


_peer: type[Peer] = _Outside
_transport: type[PeerTransport] = ShmTransport
_reaching: type[SupportsReach] = ShmTransport
