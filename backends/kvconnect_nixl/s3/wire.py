"""The wire: objects between slots and server, by NIXL's OBJ plugin.

One transfer per object, because NIXL has one status per transfer and a miss must not fail its
neighbours. A transfer that nobody waits for any more keeps its slot until NIXL calls it ended.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvconnect.backend import Closing, Op
from kvconnect.errors import TransferTimeoutError
from kvconnect_nixl.agent import Agent
from kvconnect_nixl.held import Held
from kvconnect_nixl.posted import Posted
from kvconnect_nixl.rows import device_ids, plain
from kvconnect_nixl.s3.options import Place, S3Options
from kvconnect_nixl.s3.slots import Slot, SlotPool

PLUGIN = "OBJ"

POLL_SECONDS = 5e-4
"""Between two looks at what is under way: a server takes milliseconds."""

_environment = threading.Lock()


class Flight:
    """One object under way, with the slot that NIXL reads or writes."""

    __slots__ = ("name", "op", "posted", "registered", "slot")

    def __init__(self, op: Op, name: str, slot: Slot, registered: Held, posted: Posted) -> None:
        """Made by `Wire.start`."""
        self.op, self.name, self.slot = op, name, slot
        self.registered, self.posted = registered, posted


class Wire(Closing):
    """At most `threads` objects under way at once, those that were given up among them."""

    def __init__(self, options: S3Options, place: Place, region: str) -> None:
        """Make agent and slots; `UnavailableError` where NIXL or its plugin does not load."""
        self._threads, self._timeout = options.threads, options.timeout
        self.slots = SlotPool(options.bounce)
        with _one_attempt():
            self._agent = Agent(
                {PLUGIN: _parameters(options, place, region)}, timeout=options.timeout
            )
        # Not kept: what is registered for good goes with the agent.
        self._agent.register(PLUGIN, "DRAM", plain(self.slots.address, self.slots.nbytes))
        self.last_end = 0.0
        """Time at which anything last ended: a sign of life of the server."""
        self._late: list[Flight] = []
        self._active = 0
        self._lock = threading.Lock()
        # A store that was dropped without close must not free memory beneath a transfer.
        self._end = weakref.finalize(self, _end, self._agent, self.slots, os.getpid())

    def start(self, op: Op, name: str, slot: Slot, nbytes: int) -> Flight | None:
        """Start moving the first `nbytes` of a slot; None while there are enough under way."""
        self.sweep()
        with self._lock:
            if self._active >= self._threads:
                return None
            self._active += 1
        registered = None
        try:
            device = device_ids(1)
            registered = self._agent.register(PLUGIN, "OBJ", plain(0, nbytes, device), [name])
            posted = self._agent.submit(
                PLUGIN,
                op,
                ("DRAM", plain(slot.address, nbytes)),
                ("OBJ", plain(0, nbytes, device)),
            )
        except BaseException:
            if registered is not None:
                registered.close()
            self._count(-1)
            raise
        return Flight(op, name, slot, registered, posted)

    def ended(self, flight: Flight) -> bool:
        """Tell whether a flight has ended; its slot is then the caller's again."""
        if not flight.posted.poll():
            return False
        self.last_end = time.monotonic()
        flight.registered.close()
        self._count(-1)
        return True

    def give_up(self, flight: Flight) -> None:
        """Wait no longer for a flight; its slot returns by itself once it has ended."""
        with self._lock:
            self._late.append(flight)

    def sweep(self) -> int:
        """Take back the slots of given-up flights that have ended; return how many have not."""
        if not self._late:
            return 0
        with self._lock:
            for flight in [one for one in self._late if one.posted.poll()]:
                self._late.remove(flight)
                self.slots.give(flight.slot)
                self._active -= 1
                flight.registered.close()
            return len(self._late)

    def storing_late(self, concerns: Callable[[str], bool]) -> bool:
        """Tell whether a given-up store of an object that `concerns` us may still land."""
        if not self.sweep():
            return False
        with self._lock:
            return any(one.op is Op.STORE and concerns(one.name) for one in self._late)

    def stores_ended(self, concerns: Callable[[str], bool], until: float) -> bool:
        """Wait for given-up stores of objects that `concerns` us; False if one goes on."""
        while self.storing_late(concerns):
            if time.monotonic() >= until:
                return False
            time.sleep(20 * POLL_SECONDS)
        return True

    @property
    def active(self) -> int:
        """Objects under way, given up or not."""
        return self._active

    def _count(self, step: int) -> None:
        with self._lock:
            self._active += step

    def close(self) -> None:
        """Wait for what is under way, then drop the agent; the second call does nothing.

        Raises `TransferTimeoutError` while bytes still move: close again later.
        """
        if not self._end.alive:
            return
        until = time.monotonic() + self._timeout
        while late := self.sweep():
            if time.monotonic() >= until:
                raise TransferTimeoutError(
                    f"nixl+s3: {late} objects are still under way {self._timeout} s after they "
                    f"were given up; their buffers stay: close again later"
                )
            time.sleep(POLL_SECONDS)
        _end(self._agent, self.slots, os.getpid())
        self._end.detach()


def _end(agent: Agent, slots: SlotPool, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child that ends: what moves is its parent's
    # In this order: the slots live until nothing moves any more.
    agent.close()
    slots.close()


def _parameters(options: S3Options, place: Place, region: str) -> dict[str, str]:
    wanted = {
        "bucket": place.bucket,
        "region": region,
        "scheme": options.scheme,
        "endpoint_override": options.endpoint,
        "use_virtual_addressing": "true" if options.addressing == "virtual" else "false",
        "access_key": options.access_key,
        "secret_key": options.secret_key,
        "session_token": options.session_token,
        "ca_bundle": options.ca_bundle,
        "num_threads": str(options.threads),
        # Only what the server demands: the trailer proves more, and old servers know no other.
        "req_checksum": "required",
        "resp_checksum": "required",
    }
    return {name: value for name, value in wanted.items() if value is not None}


@contextmanager
def _one_attempt() -> Iterator[None]:
    """Have the plugin's client try each request once; it would take a minute over a dead server.

    It reads this from the environment, when it is made, and from nowhere else. Retries are ours,
    within the deadline.
    """
    wanted = {"AWS_MAX_ATTEMPTS": "1", "AWS_RETRY_MODE": "standard"}
    with _environment:
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
