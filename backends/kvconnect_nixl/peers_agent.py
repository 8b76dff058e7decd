"""An agent with UCX that moves memory to and from other agents."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from kvconnect.errors import BackendError
from kvconnect_nixl.agent import Agent, Verb
from kvconnect_nixl.foreign import mapped
from kvconnect_nixl.posted import Posted
from kvconnect_nixl.rows import U64, check

UCX = "UCX"
UCX_DEFAULTS = {
    # Without it a transfer over a link that is cut never ends.
    "UCX_TCP_USER_TIMEOUT": "3s",
    # Its default is a spinlock, held while memory is copied: NIXL's progress thread would spend
    # a core on waiting for it.
    "UCX_USE_MT_MUTEX": "y",
    # Its warnings are about transports that this host does not have.
    "UCX_LOG_LEVEL": "error",
}
"""Read by UCX when an agent is made; what the caller has set stays."""
_DEVICES = "UCX_NET_DEVICES"
_making = threading.Lock()


class PeerAgent(Agent):
    """The owner of an agent that others reach; also counts who uses which other agent."""

    def __init__(
        self, name: str, parameters: Mapping[str, str], timeout: float, *, loopback: bool
    ) -> None:
        """Make the agent with UCX; with `loopback` it listens to this host only. See `Agent`."""
        for variable, value in UCX_DEFAULTS.items():
            os.environ.setdefault(variable, value)
        self._users: Counter[str] = Counter()
        self._meeting = threading.Lock()
        with _listening(loopback=loopback):
            super().__init__({UCX: parameters}, timeout=timeout, name=name, parallel=True)

    def metadata(self) -> bytes:
        """Return how others reach this agent and what is registered now."""
        with mapped("describe this agent"):
            return bytes(self._get("describe").get_agent_metadata())

    def meet(self, name: str, metadata: bytes) -> None:
        """Learn of another agent; `BackendError` unless the metadata is that of `name`."""
        agent = self._get("meet")
        with self._meeting:
            with mapped(f"take the metadata of agent {name}"):
                said = agent.add_remote_agent(metadata)
            found = said.decode() if isinstance(said, bytes) else str(said)
            if found != name:
                with mapped(f"forget agent {found}"):
                    agent.remove_remote_agent(found)
                raise BackendError(f"nixl: the metadata is that of agent {found}, not of {name}")
            self._users[name] += 1

    def part(self, name: str) -> None:
        """Forget another agent, once as many have parted as have met."""
        agent = self._get("part")
        with self._meeting:
            self._users[name] -= 1
            if self._users[name] <= 0:
                del self._users[name]
                with mapped(f"forget agent {name}"):
                    agent.remove_remote_agent(name)

    def move(self, verb: Verb, name: str, local: U64, remote: U64) -> Posted:
        """Start moving row i of `local` to or from row i of `remote` at agent `name`.

        May block while it copies: UCX moves memory of the same host in the call itself.
        """
        self._get("move")
        doing = f"{verb} of {len(local)} runs, agent {name}"
        # No prepared lists: giving one back waits for all transfers, and keeps the GIL.
        return self._start(
            UCX, verb, (("DRAM", check(local)), ("DRAM", check(remote))), name, doing
        )


@contextmanager
def _listening(*, loopback: bool) -> Iterator[None]:
    """Restrict UCX to loopback while an agent is made, unless the caller has named devices.

    The plugin's own parameter does not: UCX would listen on every interface nevertheless.
    """
    with _making:
        if not loopback or _DEVICES in os.environ:
            yield
            return
        os.environ[_DEVICES] = "lo"
        try:
            yield
        finally:
            del os.environ[_DEVICES]
