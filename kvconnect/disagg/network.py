"""What transports over a network have in common: registrations, lanes, and the order of ends.

A subclass brings the library: how memory is registered, what a peer needs to know, and the
driver that moves pieces. Everything else is here, so that all of them keep the same promises.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kvconnect.backend import Closing, Registration
from kvconnect.disagg.flight import Flight
from kvconnect.disagg.lane import Driver, Lane
from kvconnect.disagg.lifeline import TOKEN_BYTES, Lifeline, LifeServer, dial
from kvconnect.disagg.transport import (
    Peer,
    PeerCapabilities,
    PeerOutcome,
    PeerStatus,
    PeerTransfer,
    Runs,
    Way,
)
from kvconnect.errors import (
    ClosedError,
    ConfigError,
    KVConnectError,
    TransferTimeoutError,
    UnavailableError,
)
from kvconnect.hostmem import HostMemory, allocate
from kvconnect.region import Region, RegionTable
from kvconnect.registrations import Registrations

DRAIN_SECONDS = 30.0


class NetworkPeer(Closing):
    """A connected rank: one generation of it, its grants, and the lane to it."""

    def __init__(self, generation: str, grants: RegionTable, lane: Lane, owner: object) -> None:
        """`owner`: the transport that connected it."""
        self.generation, self.grants, self.lane, self.owner = generation, grants, lane, owner

    def alive(self) -> bool:
        """Tell, without blocking, whether the peer may still touch anything."""
        return self.lane.alive()

    def close(self) -> None:
        """Let go of it; what is under way is cancelled and seen to its end."""
        self.lane.close()

    def __repr__(self) -> str:
        return f"Peer({self.generation[:8]}, {len(self.grants.regions)} regions)"


class NetworkTransport(Closing):
    """The common half of a `PeerTransport`. Subclasses call `_start` when the library is up."""

    name = ""
    capabilities: PeerCapabilities

    def __init__(self, host: str, settle: float) -> None:
        """`host`: own address; `settle`: see `kvconnect.disagg.lane`."""
        self.generation = secrets.token_hex(16)
        self.host, self._settle = host, settle
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.table = Registrations(self.name, self._under_way, DRAIN_SECONDS)
        self._lanes: list[Lane] = []
        self._lanes_lock = threading.Lock()
        self._closed = False
        self.life = LifeServer(host, self.generation, self.token)

    def allocate(self, nbytes: int, label: str) -> HostMemory:
        """Allocate host memory; any is reached once it is registered."""
        return allocate(nbytes, label, pin=False)

    def register(self, regions: Sequence[Region]) -> Registration:
        """Register local memory; see `PeerTransport.register`."""
        raise NotImplementedError

    def shut(self) -> None:
        """Give the library back; nothing is under way any more."""
        raise NotImplementedError

    def _open(
        self,
        generation: str,
        address: tuple[str, int, bytes],
        grants: RegionTable,
        driver: Callable[[], Driver],
        timeout: float,
    ) -> Peer:
        """Dial `address` (host, port, token), start the lane and wait until it is verified."""
        until = time.monotonic() + timeout
        lifeline = dial(address[0], address[1], generation, address[2], timeout)
        try:
            lane = self._lane(driver(), lifeline)
        except BaseException:
            lifeline.close()
            raise
        try:
            self._await(lane.ready, generation, until, timeout)
        except BaseException:
            lane.close()
            raise
        return NetworkPeer(generation, grants, lane, self)

    def _lane(self, driver: Driver, lifeline: Lifeline) -> Lane:
        with self._lanes_lock:
            self.check_open()
            self._lanes = [lane for lane in self._lanes if not lane.join(0)]
            lane = Lane(driver, lifeline, self._settle)
            self._lanes.append(lane)
        return lane

    def _await(self, ready: Future[None], generation: str, until: float, timeout: float) -> None:
        try:
            ready.result(max(until - time.monotonic(), 0))
        except TimeoutError:
            raise UnavailableError(
                f"{self.name}: peer {generation} did not answer within {timeout:g} s"
            ) from None
        except KVConnectError as error:
            raise UnavailableError(f"{self.name}: peer {generation}: {error}") from error

    def submit(self, peer: Peer, way: Way, runs: Runs, timeout: float) -> PeerTransfer:
        """Start moving; see `PeerTransport.submit`."""
        self.check_open()
        if not isinstance(peer, NetworkPeer) or peer.owner is not self:
            raise ConfigError(f"{self.name}: {peer!r} was connected by another transport")
        with self.table.lock:
            # The library over TCP takes whatever it is given, here and there.
            self.table.locate(runs.local, runs.nbytes)
            peer.grants.locate(runs.remote, runs.nbytes)
            flight = Flight(way, runs, timeout)
            if peer.alive():
                peer.lane.submit(flight)
            else:
                flight.rest(PeerOutcome(PeerStatus.PEER_GONE, 0, f"{self.name}: the peer has gone"))
        return flight

    @property
    def regions(self) -> tuple[Region, ...]:
        """Everything registered now."""
        return self.table.regions

    def _under_way(self) -> list[Flight]:
        with self._lanes_lock:
            return [flight for lane in self._lanes for flight in lane.under_way()]

    def check_open(self) -> None:
        """Raise `ClosedError` after `close`."""
        if self._closed:
            raise ClosedError(f"the {self.name} transport is closed")

    def close(self) -> None:
        """Cancel, wait until all is quiet, give the library back, and let peers know.

        Raises `TransferTimeoutError` while bytes still move or a call hangs; call it again.
        """
        if self.life.closed:
            return
        with self._lanes_lock:
            self._closed = True
            lanes = list(self._lanes)
        for lane in lanes:
            lane.close()
        self.table.drain()
        until = time.monotonic() + DRAIN_SECONDS
        if not all(lane.join(until - time.monotonic()) for lane in lanes):
            raise TransferTimeoutError(
                f"{self.name}: a call into the library has not returned after {DRAIN_SECONDS:g} "
                f"s; close again"
            )
        self.shut()
        # Last: as long as the line stands, peers expect that this rank may touch their memory.
        self.life.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self.regions)} regions"
        return f"{type(self).__name__}({self.generation[:8]}, {state})"


_peer: type[Peer] = NetworkPeer
