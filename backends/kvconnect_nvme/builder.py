"""Filling a presence table from the entries, beside readers and writers, in short steps.

A table has to be made where there is none to be believed: after a boot, in a store from before
there were tables, where the file was lost. Changes that are committed meanwhile go into the
unfinished table as into any other, so the scan may take its time and be taken over by any process.
"""

from __future__ import annotations

import logging
import threading
import time
from itertools import islice

import numpy as np

from kvconnect.backend import Closing
from kvconnect.errors import KVConnectError
from kvconnect_nvme import entry as codec
from kvconnect_nvme.env import IndexEnv
from kvconnect_nvme.tables import Session
from kvconnect_nvme.words import EXPIRES

log = logging.getLogger("kvconnect.nvme")

STEP = 10_000
"""Entries per transaction: some 30 ms in which other writers wait."""
AT_ONCE = 50_000
"""Entries up to which opening a store waits for the table."""
_PAUSE_SECONDS = 0.005


class Builder(Closing):
    """Sees to it that the table becomes complete: at once, or by a thread until `close`."""

    def __init__(self, env: IndexEnv) -> None:
        """`env`: the index, whose store is being opened."""
        self._env, self._stop = env, threading.Event()
        self._thread: threading.Thread | None = None
        with env.read() as session:
            if env.presence.view(session) is not None:
                return
            entries = session.txn.stat(session.tables.entries)["entries"]
        if entries <= AT_ONCE:
            build(env)
            return
        self._thread = threading.Thread(
            target=_run, args=(env, self._stop), name="kvconnect-nvme-presence", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop; what is done stays done."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(self._env.timeout)


def _run(env: IndexEnv, stop: threading.Event) -> None:
    # Not a method: a thread that holds the builder would keep a dropped store alive.
    pause = 0.0
    try:
        while not stop.wait(pause):
            started = time.monotonic()
            if env.write(lambda session: step(env, session)):
                return
            # As long a pause as a turn, or other processes would hardly get the lock.
            pause = time.monotonic() - started + _PAUSE_SECONDS
    except KVConnectError as error:
        log.warning("nvme: presence table is not complete, exists is slower: %s", error)


def build(env: IndexEnv, *, afresh: bool = False) -> None:
    """Make the table complete now; `afresh`: by a new one."""
    if afresh and not env.write(env.presence.start):
        return
    while not env.write(lambda session: step(env, session)):
        pass


def step(env: IndexEnv, session: Session) -> bool:
    """Add the next entries in a transaction that changes none; tell whether that is all."""
    presence = env.presence
    file = presence.current()
    if file is None:
        if not presence.start(session):
            return True
        file = presence.current()
    if file is None or file.complete:
        return True
    keys, values = _entries(session, file.built_to, STEP)
    table = np.frombuffer(b"".join(values), dtype=codec.DTYPE)
    words = presence.words(keys, table["nbytes"].astype(np.uint64))
    grown = presence.extend(session, words | (table["expiry"] > 0) * EXPIRES)
    if grown is None:
        return True
    grown.advance(keys[-1] if keys else b"", complete=len(keys) < STEP)
    return grown.complete


def _entries(session: Session, after: bytes, number: int) -> tuple[list[bytes], list[bytes]]:
    """Return the whole entries that follow a key, as keys and values."""
    cursor = session.cursor(session.tables.entries)
    if not cursor.set_range(after + b"\0" if after else b""):
        return [], []
    whole = ((key, value) for key, value in cursor if len(value) == codec.NBYTES)
    found = list(islice(whole, number))
    return [bytes(key) for key, _ in found], [bytes(value) for _, value in found]
