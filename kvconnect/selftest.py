"""The self-test at attach: put, exists, get, compare through one real page of the pool.

It finds what only running finds: memory the transport cannot reach, a store that is full or
read-only, a layout read wrongly. The page's bytes are put back afterwards, and what was stored
is under an identity of its own and removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import secrets
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Op, SupportsDelete
from kvconnect.errors import BackendError, ConfigError
from kvconnect.explain import size
from kvconnect.identity import KeyMaker
from kvconnect.pool import engine_rows

if TYPE_CHECKING:
    from kvconnect.connector import Connector
    from kvconnect.pool import U64, Pool


def self_test(connector: Connector) -> str:
    """Run the test and return one line; `BackendError` says which step failed and how."""
    pool = connector.pool
    page = connector.options.self_test_page
    page = pool.pages - 1 if page is None else page
    if not 0 <= page < pool.pages:
        raise ConfigError(f"self_test_page={page} is outside the pool of {pool.pages} pages")
    ids = np.array([page], dtype=np.uint64)
    identity = dataclasses.replace(connector.identity, pool=f"self-test/{secrets.token_hex(8)}")
    keys = KeyMaker(identity, connector.plan.cells).keys([b"self-test"])
    before = read_page(pool, ids)
    try:
        _round_trip(connector, keys, ids)
    finally:
        if not connector.quarantined():
            write_page(pool, ids, before)
        if isinstance(connector.backend, SupportsDelete):
            # What failed is said already, and what is left behind expires.
            with contextlib.suppress(BackendError):
                connector.backend.remove(keys)
    return f"self-test ok ({size(connector.plan.page_nbytes)} there and back)"


def _round_trip(connector: Connector, keys: list[str], ids: U64) -> None:
    pool, mover, limit = connector.pool, connector._mover, connector.options.timeout  # noqa: SLF001
    sent = np.frombuffer(secrets.token_bytes(pool.page_nbytes), dtype=np.uint8)
    write_page(pool, ids, sent)
    stored = mover.move(Op.STORE, keys, ids, limit, ttl=limit * 4)
    if not stored.ok.all():
        raise BackendError(f"self-test: put failed on {connector.backend.name}: {_words(stored)}")
    if not connector.backend.exists(keys, connector.plan.object_nbytes()).all():
        raise BackendError(f"self-test: {connector.backend.name} does not find what it stored")
    write_page(pool, ids, ~sent)
    if mover.staging is not None:
        # Its slot still holds what was sent: a load that delivers nothing would look right.
        slots = mover.staging.acquire(1, limit)
        mover.staging.gather(ids, slots)
        mover.staging.release(slots)
    loaded = mover.move(Op.LOAD, keys, ids, limit)
    if not loaded.ok.all():
        raise BackendError(f"self-test: get failed on {connector.backend.name}: {_words(loaded)}")
    got = read_page(pool, ids)
    if not np.array_equal(got, sent):
        wrong = int((got != sent).sum())
        raise BackendError(
            f"self-test: {wrong} of {len(sent)} bytes came back wrong from "
            f"{connector.backend.name}; the pool's layout or registration is not what it says"
        )


def _words(outcome: object) -> str:
    causes = getattr(outcome, "causes", {})
    return f"{outcome}" + (f" ({next(iter(causes.values()))})" if causes else "")


Bytes = NDArray[np.uint8]


def read_page(pool: Pool, ids: U64) -> Bytes:
    """Return the bytes of one page in engine order."""
    return np.concatenate([run.copy() for run in _page_runs(pool, ids)])


def write_page(pool: Pool, ids: U64, data: Bytes) -> None:
    """Write bytes in engine order into one page."""
    at = 0
    for run in _page_runs(pool, ids):
        run[:] = data[at : at + len(run)]
        at += len(run)


def _page_runs(pool: Pool, ids: U64) -> list[Bytes]:
    address, nbytes = engine_rows(pool, None).expand(ids)
    return [
        np.ctypeslib.as_array((ctypes.c_uint8 * int(n)).from_address(int(a)))
        for a, n in zip(address, nbytes, strict=True)
    ]
