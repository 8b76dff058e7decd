"""The one owner of a NIXL agent: plugins, registrations, transfers, and their end.

Why one owner: NIXL registers silently with some plugins and not with others unless each call
names them, takes what was never registered apart only when it is moved, and frees nothing that
is still moving. Everything of ours that speaks to NIXL does it through this class.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Closing, Op
from kvconnect.errors import ClosedError, RegistrationError, UnavailableError
from kvconnect_nixl.foreign import mapped
from kvconnect_nixl.held import Held, HeldSet
from kvconnect_nixl.library import Library, load
from kvconnect_nixl.plugins import why_not
from kvconnect_nixl.posted import Keeper, Posted
from kvconnect_nixl.rows import U64, check

Memory = Literal["DRAM", "VRAM", "FILE", "BLOCK", "OBJ"]
"""NIXL's words for what an address counts in."""

Side = tuple[Memory, U64]
"""Descriptors of one side of a transfer: the kind of memory and (n, 3) rows."""

Blocks = tuple[Held, NDArray[np.int32]]
"""A prepared list and (n,) indices into it."""

Verb = Literal["WRITE", "READ"]
"""NIXL's words for the way that bytes go."""

_VERB: dict[Op, Verb] = {Op.STORE: "WRITE", Op.LOAD: "READ"}

_numbers = itertools.count()

_SINGLE = {"GUSLI"}
"""Plugins that a process can have in one agent only."""
_taken: set[str] = set()
_taking = threading.Lock()


class Agent(Closing):
    """An agent with its plugins; every method may be called from any thread.

    Invariants: NIXL locks; each registration names exactly one plugin; a transfer's handle is
    released only after its end; the agent is dropped only when quiet.
    """

    def __init__(
        self,
        plugins: Mapping[str, Mapping[str, str]],
        *,
        library: Library | None = None,
        timeout: float = 60.0,
        name: str | None = None,
        parallel: bool = False,
    ) -> None:
        """Make the agent and its `plugins`, name to parameters.

        `timeout`: seconds that `close` waits for what still moves; `name`: as peers know it,
        which no two agents that ever meet may share; `parallel`: see `Library.agent`. Raises
        `UnavailableError` where the library or a plugin does not load, `BackendError` for wrong
        parameters.
        """
        library = library or load()
        self.name = name or f"kvconnect-{os.getpid()}-{next(_numbers)}"
        self.plugins = tuple(plugins)
        self._timeout = timeout
        self._keeper, self._held = Keeper(), HeldSet()
        self._agent: Any = None
        self._single = _take(_SINGLE.intersection(plugins))
        try:
            with mapped(f"make agent {self.name}"):
                agent = library.agent(self.name, parallel=parallel)
            for plugin, parameters in plugins.items():
                _create(library, agent, plugin, parameters)
        except BaseException:
            _give(self._single)
            raise
        self._agent = agent

    @property
    def under_way(self) -> int:
        """Transfers whose memory NIXL may still touch."""
        return len(self._keeper)

    @property
    def held(self) -> int:
        """Registrations and prepared lists that were not closed yet."""
        return len(self._held)

    def register(
        self, plugin: str, memory: Memory, rows: U64, names: Sequence[str] | None = None
    ) -> Held:
        """Register (n, 3) rows with one plugin.

        `names`, one a row: for files `rows.file_name`, for objects their keys, under ids from
        `rows.device_ids`. Raises `RegistrationError`, or `BackendError` where a file cannot
        be opened.
        """
        agent = self._get("register")
        described: Any = check(rows)
        if names is not None:
            # The one place with an object a row: NIXL takes names in no other form.
            described = [(*row, name) for row, name in zip(rows.tolist(), names, strict=True)]
        what = f"{len(rows)} x {memory} with {plugin}"
        with mapped(f"register {what}"):
            handle = agent.register_memory(described, memory, [plugin])

        def release(descs: Any) -> None:
            with mapped(f"deregister {what}"):
                agent.deregister_memory(descs, [plugin])

        return Held(what, handle, release, self._held)

    def prepare(self, plugin: str, where: Literal["local", "remote"], side: Side) -> Held:
        """Prepare one side of many transfers; an (n, 5) row counts as all of its blocks.

        Raises `RegistrationError` if a block lies outside what `plugin` has registered.
        """
        agent = self._get("prepare")
        memory, rows = side
        what = f"{len(rows)} rows of {memory} prepared for {plugin}"
        with mapped(what):
            owner = "" if where == "local" else self.name
            handle = agent.prep_xfer_dlist(owner, check(rows), memory, [plugin])

        def release(dlist: Any) -> None:
            with mapped(f"release {what}"):
                agent.release_dlist_handle(dlist)

        return Held(what, handle, release, self._held)

    def submit(self, plugin: str, op: Op, local: Side, remote: Side) -> Posted:
        """Start moving row i of `local` (memory) to or from row i of `remote`; returns at once.

        Raises `RegistrationError` if a row lies outside what `plugin` has registered.
        """
        self._get(op.value)
        check(local[1]), check(remote[1])
        if len(local[1]) != len(remote[1]):
            raise RegistrationError(
                f"nixl: {len(local[1])} descriptors of {local[0]}, {len(remote[1])} of {remote[0]}"
            )
        doing = f"{op.value} of {len(remote[1])} x {remote[0]} by {plugin}"
        return self._start(plugin, _VERB[op], (local, remote), self.name, doing)

    def _start(
        self, plugin: str, verb: Verb, sides: tuple[Side, Side], whose: str, doing: str
    ) -> Posted:
        """Start moving row i of the first side to or from row i of the second, at agent `whose`."""
        agent = self._get(doing)
        with mapped(doing):
            descriptors = [agent.get_xfer_descs(rows, memory) for memory, rows in sides]
            handle = agent.initialize_xfer(verb, *descriptors, whose, b"", [plugin])
        return Posted(agent, handle, doing, self._keeper)

    def submit_prepared(self, plugin: str, op: Op, local: Blocks, remote: Blocks) -> Posted:
        """Start moving block i of `local` to or from block i of `remote`; returns at once."""
        agent = self._get(op.value)
        doing = f"{op.value} of {len(remote[1])} prepared descriptors by {plugin}"
        with mapped(doing):
            handle = agent.make_prepped_xfer(
                _VERB[op], local[0].handle, local[1], remote[0].handle, remote[1], b"", [plugin]
            )
        return Posted(agent, handle, doing, self._keeper)

    def query(self, plugin: str, memory: Memory, names: Sequence[str]) -> list[bool]:
        """Tell for each path or object key whether the plugin finds it."""
        agent = self._get("query")
        if not names:
            return []
        if not all(names):
            # NIXL says yes to an empty key.
            raise RegistrationError(f"nixl: one of {len(names)} names to look for is empty")
        with mapped(f"look for {len(names)} x {memory} by {plugin}"):
            found = agent.query_memory([(0, 0, 0, name) for name in names], plugin, memory)
        return [one is not None for one in found]

    def close(self) -> None:
        """Wait until nothing moves, give back what is held, and drop the agent.

        Raises `TransferTimeoutError` while bytes still move; the agent then stays: close again.
        """
        if self._agent is None:
            return
        self._keeper.drain(self._timeout)
        self._held.close()
        self._agent = None
        _give(self._single)

    def _get(self, operation: str) -> Any:
        if self._agent is None:
            raise ClosedError(f"nixl: {operation} after close of agent {self.name}")
        return self._agent

    def __repr__(self) -> str:
        state = "closed" if self._agent is None else f"{self.held} held, {self.under_way} moving"
        return f"Agent({self.name}, {'+'.join(self.plugins)}, {state})"


def _create(library: Library, agent: Any, plugin: str, parameters: Mapping[str, str]) -> None:
    if plugin not in agent.plugin_list or not agent.get_plugin_mem_types(plugin):
        raise UnavailableError(f"nixl: plugin {plugin} {why_not(library, plugin)}")
    # The names only: among the values are credentials.
    with mapped(f"make plugin {plugin} with {sorted(parameters)}"):
        agent.create_backend(plugin, dict(parameters))


def _take(plugins: AbstractSet[str]) -> frozenset[str]:
    with _taking:
        if _taken & plugins:
            raise UnavailableError(
                f"nixl: this process has an agent with {', '.join(_taken & plugins)} already, and "
                f"can have no second one; close what uses it first"
            )
        _taken.update(plugins)
    return frozenset(plugins)


def _give(plugins: AbstractSet[str]) -> None:
    with _taking:
        _taken.difference_update(plugins)
