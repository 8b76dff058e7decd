"""A transfer under way, and the keeper of those that nobody waits for any more.

NIXL cannot cancel: releasing a handle early raises nothing and stops nothing, and bytes go on
landing. So a handle lives until NIXL calls its transfer finished, whoever has given up on it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from kvconnect.backend import Closing
from kvconnect.errors import KVConnectError, TransferTimeoutError
from kvconnect_nixl.foreign import translate

log = logging.getLogger("kvconnect.nixl")

POLL_SECONDS = 1e-4
"""Between two looks. POSIX submits and reaps only while it is being looked at."""


class Posted(Closing):
    """One transfer, from post to the release of its handle.

    Invariants: `done` turns true once, when NIXL will touch the memory no more; the handle is
    released only after that. `error` says then what went wrong; NIXL has one status for all
    descriptors of a transfer, so any of them may have moved.
    """

    def __init__(self, agent: Any, handle: Any, doing: str, keeper: Keeper) -> None:
        """Post `handle`, which is this object's from here on."""
        self.doing = doing
        self.error: KVConnectError | None = None
        self.done = False
        self._agent, self._handle, self._keeper = agent, handle, keeper
        self._lock = threading.Lock()
        keeper.begun(self)
        self._look(agent.transfer)

    def poll(self) -> bool:
        """Let NIXL make progress; tell whether the transfer has ended. Does not wait."""
        if not self.done:
            self._look(self._agent.check_xfer_state)
        return self.done

    def _look(self, call: Callable[[Any], str]) -> None:
        with self._lock:
            if self.done:
                return
            try:
                state = call(self._handle)
            except Exception as error:  # noqa: BLE001 - `wait` raises it
                self.error = translate(error, self.doing)
            else:
                if state == "PROC":
                    return
                if state != "DONE":
                    self.error = translate(RuntimeError(state), self.doing)
            self._release()
            self.done = True
            self._keeper.ended(self)

    def _release(self) -> None:
        try:
            self._agent.release_xfer_handle(self._handle)
        except Exception as error:  # noqa: BLE001 - it has ended: only its handle is left over
            log.warning("nixl: %s: its handle was not released: %s", self.doing, error)

    def wait(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for the end and raise what went wrong.

        Raises `TransferTimeoutError` while it is still under way: the memory stays leased
        until `done`; wait again, or `close` and leave it to the agent.
        """
        until = time.monotonic() + timeout
        while not self.poll():
            if time.monotonic() >= until:
                raise TransferTimeoutError(
                    f"nixl: {self.doing}: not finished after {timeout} s; its memory is leased "
                    f"until it is"
                )
            time.sleep(POLL_SECONDS)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Let go. What is still under way is polled to its end by the agent; see `done`."""
        if not self.poll():
            self._keeper.keep()

    def __repr__(self) -> str:
        state = "under way" if not self.done else "done" if self.error is None else "failed"
        return f"Posted({self.doing}, {state})"


class Keeper:
    """Every transfer that has not ended; polls them on a thread once one was abandoned."""

    def __init__(self) -> None:
        """Nothing is under way."""
        self._live: set[Posted] = set()
        self._changed = threading.Condition()
        self._running = False

    def __len__(self) -> int:
        return len(self._live)

    def begun(self, posted: Posted) -> None:
        """Hold on to a transfer: collected before its end, it would free what is moving."""
        with self._changed:
            self._live.add(posted)

    def ended(self, posted: Posted) -> None:
        """Forget a transfer that has ended."""
        with self._changed:
            self._live.discard(posted)
            self._changed.notify_all()

    def keep(self) -> None:
        """See to it that what is under way is polled to its end."""
        with self._changed:
            if not self._running:
                self._running = True
                name = "kvconnect-nixl-keeper"
                threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                live = list(self._live)
                if not live:
                    self._running = False
                    return
            for posted in live:
                posted.poll()
            # Abandoned for having been slow: no need to hurry.
            time.sleep(10 * POLL_SECONDS)

    def drain(self, timeout: float) -> None:
        """Wait until nothing is under way; `TransferTimeoutError` names what still is."""
        if self._live:
            self.keep()
        with self._changed:
            if not self._changed.wait_for(lambda: not self._live, timeout):
                raise TransferTimeoutError(
                    f"nixl: {len(self._live)} transfers still move bytes after {timeout} s, "
                    f"among them {next(iter(self._live))!r}; close again later"
                )
