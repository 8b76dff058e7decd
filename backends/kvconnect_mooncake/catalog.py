"""What is asked of the master: presence, removal, listing, records. Nothing moves in bulk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvconnect.errors import BackendError, CapabilityError, CapacityError, ConfigError
from kvconnect_mooncake import trailer
from kvconnect_mooncake.core import Core
from kvconnect_mooncake.foreign import Code, words
from kvconnect_mooncake.tails import read_trailers
from kvconnect_mooncake.trailer import Trailer

MAX_RECORD_BYTES = 64 << 10
RECORD_MAGIC = b"kvr1"
"""Before every record: the library stores nothing empty."""
PAUSE = 0.05

_CONTENDED: tuple[int, ...] = (
    Code.REFUSED, Code.NOT_OURS, Code.NOT_READY, Code.ABSENT, Code.EXISTS, Code.LEASED,
)  # fmt: skip
"""What one of two is told who put the same record at once, as all ranks of a fleet do that start
together."""


def exists(core: Core, keys: Sequence[str], nbytes: Sequence[int]) -> NDArray[np.bool_]:
    """Tell which keys are there with these sizes, on an owner that answers: (keys,) bool."""
    if len(keys) != len(nbytes):
        raise ConfigError(f"mooncake: exists got {len(keys)} keys and {len(nbytes)} sizes")
    names = core.names.names(keys)
    if not names:
        return np.zeros(0, dtype=np.bool_)
    found = core.ask(lambda: core.client.find(list(dict.fromkeys(names))))
    plain = trailer.PLAIN if core.options.checksum else 0
    out = np.zeros(len(keys), dtype=np.bool_)
    expiring = []
    for at, (name, want) in enumerate(zip(names, nbytes, strict=True)):
        one = found.get(name)
        if one is None or (one.owners and core.breakers.tripped(one.owners)):
            continue
        if one.nbytes == want + plain:
            out[at] = want > 0
        elif core.options.checksum and one.nbytes == want + trailer.EXPIRING:
            expiring.append(at)
    if expiring:
        until = time.monotonic() + core.options.rpc_timeout
        asked = [keys[at] for at in expiring], [nbytes[at] for at in expiring]
        told = core.ask(partial(read_trailers, core, *asked, trailer.EXPIRING, until))
        for at, one_told in zip(expiring, told, strict=True):
            right = isinstance(one_told, Trailer) and one_told.nbytes == nbytes[at]
            out[at] = right and isinstance(one_told, Trailer) and not one_told.expired()
    return out


def remove(core: Core, keys: Sequence[str]) -> NDArray[np.bool_]:
    """Remove keys; True where one was there: (keys,) bool.

    Without checksums a leased object stays until its readers are done, at most a lease long;
    `BackendError` if it stays longer.
    """
    names = core.names.names(keys)
    gone = np.zeros(len(keys), dtype=np.bool_)
    todo = list(range(len(names)))
    until = time.monotonic() + 2 * core.options.lease
    while todo:
        some = [names[at] for at in todo]
        codes = core.ask(partial(core.client.remove, some, force=core.options.checksum))
        gone[[at for at, code in zip(todo, codes, strict=True) if code == 0]] = True
        done = {0, Code.ABSENT, Code.NOT_READY}
        left = [(at, code) for at, code in zip(todo, codes, strict=True) if code not in done]
        if left and (time.monotonic() > until or left[0][1] != Code.LEASED):
            raise BackendError(
                f"mooncake: {len(left)} of {len(keys)} keys could not be removed, the first: "
                f"{words(left[0][1])}"
            )
        todo = [at for at, _ in left]
        if todo:
            time.sleep(PAUSE)
    return gone


def list_keys(core: Core, prefix: str) -> list[str]:
    """Return the keys that begin with `prefix`, sorted; those being written may be among them."""
    _need_listing(core)
    return core.names.keys(core.admin.keys(), prefix)


def _need_listing(core: Core) -> None:
    if core.options.tenant:
        raise CapabilityError(
            f"mooncake: the master lists no keys of a tenant (tenant={core.options.tenant!r}); "
            f"ask by exists, or share a master by prefix= instead"
        )


def clear(core: Core, prefix: str) -> int:
    """Remove the keys that begin with `prefix` and return how many were removed.

    Leased objects are passed over by the library without a word: without checksums they are
    tried until gone, at most two leases long; `BackendError` says how many are left.
    """
    pattern = core.names.pattern(prefix)
    if core.options.checksum:
        return core.ask(lambda: core.client.remove_matching(pattern, force=True))
    _need_listing(core)
    total, until = 0, time.monotonic() + 2 * core.options.lease
    while True:
        total += core.ask(lambda: core.client.remove_matching(pattern, force=False))
        left = list_keys(core, prefix)
        if not left:
            return total
        if time.monotonic() > until:
            raise BackendError(
                f"mooncake: cleared {total} keys, {len(left)} are still leased to readers or "
                f"being written after {2 * core.options.lease:g} s; clear again later"
            )
        time.sleep(PAUSE)


def put_record(core: Core, name: str, value: bytes) -> None:
    """Store or replace a record; `ConfigError` above 64 KiB, `CapacityError` without room."""
    if len(value) > MAX_RECORD_BYTES:
        raise ConfigError(
            f"mooncake: record {name!r} has {len(value)} B; at most {MAX_RECORD_BYTES} B are kept"
        )
    key, now = core.names.record(name), time.monotonic()
    limits = dict.fromkeys(_CONTENDED, now + core.options.rpc_timeout)
    limits[Code.NO_SPACE] = now + core.options.space_wait
    while True:
        code = core.ask(lambda: core.client.put_bytes(key, RECORD_MAGIC + value))
        if code == 0:
            return
        if time.monotonic() > limits.get(code, 0.0):
            kind = CapacityError if code == Code.NO_SPACE else BackendError
            hint = "; add a segment" if code == Code.NO_SPACE else ""
            raise kind(f"mooncake: record {name!r}: {words(code)}{hint}")
        time.sleep(PAUSE)


def records(core: Core) -> dict[str, bytes]:
    """Return all records; one that vanishes while they are read is left out."""
    _need_listing(core)
    out = {}
    for name in core.names.recorded(core.admin.keys()):
        value = core.ask(partial(core.client.get_bytes, core.names.record(name)))
        if value.startswith(RECORD_MAGIC):
            out[name] = value[len(RECORD_MAGIC) :]
    return out
