"""A NIXL agent whose calls go one at a time, so that none waits inside of NIXL.

In its mode STRICT the calls wait for each other as well, but most bindings keep the GIL while
they wait: whatever one thread does in `transfer` would stop every thread of the process.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any


class InTurn:
    """Everything of an agent, and one lock around each call; it is waited for without the GIL."""

    def __init__(self, agent: Any) -> None:
        """Nobody else may use `agent` from here on."""
        self._agent, self._lock = agent, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        """Return the agent's attribute; of a method, one that takes its turn."""
        found = getattr(self._agent, name)
        return partial(self._call, found) if callable(found) else found

    def _call(self, method: Any, *arguments: Any) -> Any:
        with self._lock:
            return method(*arguments)
