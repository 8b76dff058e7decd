"""The superblock and the running state of a store, kept in the index."""

from __future__ import annotations

from typing import Any

import msgspec

from kvconnect.errors import ConfigError, CorruptionError

FORMAT = 1
ALIGN = 4096
"""Every object starts at a multiple of this, and takes whole multiples."""


class Superblock(msgspec.Struct, frozen=True):
    """What never changes in a store: format version and bytes of a slab."""

    format: int
    slab_bytes: int
    store_id: str


class State(msgspec.Struct):
    """What every transaction may change; one record, read and written whole."""

    slabs: int = 0
    total: int = 0
    used: int = 0
    objects: int = 0
    seq: int = 1
    hand: int = 0
    evictions: int = 0


def padded(nbytes: int) -> int:
    """Bytes an object takes on disk."""
    return -(-nbytes // ALIGN) * ALIGN


def read_superblock(txn: Any, meta: Any) -> Superblock | None:
    """Return the superblock, or None in a new store."""
    data = txn.get(b"superblock", db=meta)
    if data is None:
        return None
    try:
        block = msgspec.msgpack.decode(data, type=Superblock)
    except msgspec.MsgspecError as error:
        raise CorruptionError(f"superblock of the store cannot be read: {error}") from error
    if block.format != FORMAT:
        raise ConfigError(f"store has format {block.format}, this release reads {FORMAT}")
    return block


def write_superblock(txn: Any, meta: Any, block: Superblock) -> None:
    """Write the superblock of a new store."""
    txn.put(b"superblock", msgspec.msgpack.encode(block), db=meta)


def read_state(txn: Any, meta: Any) -> State:
    """Return the running state."""
    data = txn.get(b"state", db=meta)
    return msgspec.msgpack.decode(data, type=State) if data else State()


def write_state(txn: Any, meta: Any, state: State) -> None:
    """Keep the running state."""
    txn.put(b"state", msgspec.msgpack.encode(state), db=meta)
