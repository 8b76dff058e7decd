"""Questions about keys: which are there, at which size, and what may go."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Status
from kvconnect.errors import ConfigError, CorruptionError, UnavailableError
from kvconnect.memory.objects import MAX_RECORD_BYTES
from kvconnect_nixl.s3 import names, seal
from kvconnect_nixl.s3.core import Core


def exists(core: Core, keys: Sequence[str], nbytes: Sequence[int]) -> NDArray[np.bool_]:
    """Tell which keys have an object of their own with exactly these sizes: (keys,) bool."""
    if len(keys) != len(nbytes):
        raise ConfigError(f"nixl+s3: exists got {len(keys)} keys and {len(nbytes)} sizes")
    distinct = list(dict.fromkeys(keys))
    seen = dict(
        zip(distinct, core.control.look_all([core.names.of(k) for k in distinct]), strict=True)
    )
    now = seal.now_ms()
    right = [
        seal.verdict(*seen[key], names.raw(key), int(size), now)[0] is Status.OK
        for key, size in zip(keys, nbytes, strict=True)
    ]
    return np.array(right, dtype=np.bool_)


def remove(core: Core, keys: Sequence[str]) -> NDArray[np.bool_]:
    """Remove keys; True where an object was there that had not expired: (keys,) bool."""
    objects = [core.names.of(key) for key in keys]
    _await_stores(core, set(objects).__contains__)
    # Deleting says nothing about what was there.
    seen = core.control.look_all(objects)
    core.control.delete(
        [name for name, one in zip(objects, seen, strict=True) if one.size is not None]
    )
    return np.array([_alive(*one) for one in seen], dtype=np.bool_)


def _await_stores(core: Core, concerns: Callable[[str], bool]) -> None:
    """Let stores that timed out end first: landing later, they bring back what is removed."""
    if not core.wire.stores_ended(concerns, core.control.until()):
        raise UnavailableError(
            f"nixl+s3: nothing was removed from {core.place}: a put that was given up is still "
            f"under way after {core.options.timeout} s and would bring it back; try again later"
        )


def _alive(size: int | None, tail: bytes) -> bool:
    found = seal.unpack(tail)
    return size is not None and (found is None or not 0 < found.expiry <= seal.now_ms())


def list_keys(core: Core, prefix: str) -> list[str]:
    """Return the keys that begin with `prefix`, sorted; expired ones are still among them."""
    return sorted(key for key, _ in _listed(core, prefix))


def _listed(core: Core, prefix: str) -> list[tuple[str, str]]:
    under = core.names.under(prefix)
    if under is None:
        return []
    pairs = [(core.names.key_of(name), name) for name, _ in core.control.names(under)]
    return [(key, name) for key, name in pairs if key is not None]


def clear(core: Core, prefix: str) -> int:
    """Remove all keys that begin with `prefix`, and nothing that is no object of ours."""
    _await_stores(core, lambda name: (core.names.key_of(name) or "").startswith(prefix))
    found = _listed(core, prefix)
    core.control.delete([name for _, name in found])
    return len(found)


def put_record(core: Core, name: str, value: bytes) -> None:
    """Store or replace a record, sealed like an object."""
    if len(value) > MAX_RECORD_BYTES:
        raise ConfigError(
            f"nixl+s3: record {name!r} has {len(value)} B; at most {MAX_RECORD_BYTES} B are kept"
        )
    core.control.write(core.names.record(name), value + seal.sealed(_owner(name), value).pack())


def records(core: Core) -> dict[str, bytes]:
    """Return all records; `CorruptionError` names one that is damaged."""
    found: dict[str, bytes] = {}
    for stored, _ in list(core.control.names(core.names.recorded)):
        name = core.names.record_of(stored)
        data = None if name is None else core.control.read(stored)
        if name is None or data is None:
            continue
        value, tail = data[: -seal.NBYTES], data[-seal.NBYTES :]
        if seal.unpack(tail) != seal.sealed(_owner(name), value):
            raise CorruptionError(
                f"nixl+s3: record {name!r} in {core.place} is damaged; delete {stored}"
            )
        found[name] = value
    return found


def _owner(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=32, person=b"kvc-s3-record").digest()
