"""Identity and keys: everything that fixes the bytes of an object, and nothing else.

An `Identity` says what the bytes mean (model, weights, dtype, page size ...); a `Placement`
says which part of them a rank holds. They are separate values: two fleets of different TP or
PP with equal identities derive equal keys for equal bytes, because a key names global layer
and head ranges and never a rank.

Key format (version 1), 64 lower-case hex characters, safe as a file name::

    namespace 16 | page 32 | object 16

    namespace = blake2b-8 (identity record)
    page      = blake2b-16(identity record digest, prefix-chain hash of the page)
    object    = blake2b-8 (layer range, head range, shards)

A record is a sequence of length-prefixed fields (kind, length, bytes), so that ('a', 'bc') and
('ab', 'c') differ, and None, '' and 0 differ. The namespace comes first so that a store can
list or clear one identity by prefix. 16 + 32 hex digits carry 192 bits for pages of all
identities; the object part only tells the few objects of one page apart.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvconnect.errors import ConfigError
from kvconnect.placement import Span

SCHEMA = 1
NAMESPACE_HEX, PAGE_HEX, OBJECT_HEX = 16, 32, 16
KEY_HEX = NAMESPACE_HEX + PAGE_HEX + OBJECT_HEX

Field = str | int | bytes | bool | None


def record(fields: Iterable[tuple[str, Field]]) -> bytes:
    """Encode named fields canonically: each name and value is kind + length + bytes."""
    parts = [struct.pack("<I", SCHEMA)]
    for name, value in fields:
        parts.append(_encode(name))
        parts.append(_encode(value))
    return b"".join(parts)


def _encode(value: Field) -> bytes:
    if value is None:
        return b"n" + struct.pack("<Q", 0)
    if isinstance(value, bool):
        kind, data = b"b", bytes([value])
    elif isinstance(value, int):
        kind, data = b"i", str(value).encode()
    elif isinstance(value, str):
        kind, data = b"s", value.encode("utf-8")
    else:
        kind, data = b"y", bytes(value)
    return kind + struct.pack("<Q", len(data)) + data


def _digest(data: bytes, size: int) -> bytes:
    return hashlib.blake2b(data, digest_size=size, person=b"kvconnect-1").digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """All that fixes the bytes under a key, apart from which part of the model they are.

    Every field is part of the record. `model` and `weights` (a fingerprint of the weights) are
    required; a field whose value is not known must be given as the caller's explicit choice,
    never left to a guess, because a key with an unknown field would name two kinds of bytes.

    >>> a = Identity(model="org/m", weights="w1", dtype="bfloat16", page_size=64,
    ...              layers=2, heads=8, head_dim=128, v_head_dim=128)
    >>> a.namespace == dataclasses.replace(a, dtype="float16").namespace
    False
    """

    model: str
    weights: str
    dtype: str
    page_size: int
    layers: int
    """Layers of the whole model."""
    heads: int
    """KV heads of the whole model."""
    head_dim: int
    v_head_dim: int
    object_layout: str = "unset"
    """Byte order inside an object; a `Connector` fills it in from its plan."""
    adapter: str | None = None
    """LoRA adapter, None for the base model."""
    salt: str | None = None
    """Tenant or cache salt: different salts never share pages."""
    scale_scheme: str | None = None
    """How quantised values are scaled (for example "mxfp8-block32")."""
    pool: str = "kv"
    """Which pool of the engine: kv, index, mamba ..."""
    extra: tuple[tuple[str, str], ...] = field(default=())
    """Anything else that fixes the bytes, as sorted (name, value) pairs."""

    def __post_init__(self) -> None:
        """Refuse fields that are unknown, empty where they must not be, or of a wrong type."""
        for name in ("model", "weights", "dtype", "pool", "object_layout"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ConfigError(
                    f"identity field {name!r} is {value!r}; a key needs it as non-empty text"
                )
        for name in ("page_size", "layers", "heads", "head_dim", "v_head_dim"):
            value = getattr(self, name)
            if type(value) is not int or value < (0 if name == "v_head_dim" else 1):
                raise ConfigError(f"identity field {name!r} is {value!r}; a key needs a count")
        for name in ("adapter", "salt", "scale_scheme"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"identity field {name!r} is {value!r}; give text or None")
        pairs = list(self.extra)
        if not all(isinstance(word, str) for pair in pairs for word in pair):
            raise ConfigError(
                f"identity field 'extra' is {self.extra!r}; names and values are text"
            )
        if pairs != sorted(pairs) or len(dict(pairs)) != len(pairs):
            raise ConfigError(
                "identity field 'extra' must be sorted (name, value) pairs, each name once"
            )

    def fields(self) -> list[tuple[str, Field]]:
        """Return (name, value) of every field in record order."""
        plain = [f.name for f in dataclasses.fields(self) if f.name != "extra"]
        pairs: list[tuple[str, Field]] = [(name, getattr(self, name)) for name in plain]
        return pairs + [(f"extra.{name}", value) for name, value in self.extra]

    def record(self) -> bytes:
        """Return the canonical record."""
        return record(self.fields())

    @property
    def digest(self) -> bytes:
        """32 bytes that stand for the record."""
        return _digest(self.record(), 32)

    @property
    def namespace(self) -> str:
        """The first 16 hex characters of every key under this identity."""
        return _digest(self.record(), NAMESPACE_HEX // 2).hex()

    def to_json(self) -> bytes:
        """Encode for the record kept in the store."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Identity:
        """Decode a stored record; `ConfigError` if it is not one."""
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, TypeError) as error:
            raise ConfigError(f"stored identity record cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Cell:
    """Which part of the model an object holds: global layer and head ranges, and shards."""

    layers: Span
    heads: Span
    shards: tuple[tuple[str, Span], ...] = ()

    def digest(self) -> str:
        """Return the 16 hex characters of the key that name this cell."""
        fields: list[tuple[str, Field]] = []
        for name, span in (("layers", self.layers), ("heads", self.heads), *self.shards):
            fields += [(name, span.start), ("stop", span.stop), ("total", span.total)]
        return _digest(record(fields), OBJECT_HEX // 2).hex()

    def __str__(self) -> str:
        shards = "".join(f", {name} {span}" for name, span in self.shards)
        return f"layers {self.layers}, heads {self.heads}{shards}"


class KeyMaker:
    """Derives the keys of one identity and a fixed list of cells; the same for every call."""

    __slots__ = ("_cells", "_prefix", "_seed", "identity")

    def __init__(self, identity: Identity, cells: Sequence[Cell]) -> None:
        """Precompute what does not depend on the page."""
        if identity.object_layout == "unset":
            raise ConfigError("identity field 'object_layout' is unset: no key can be derived")
        self.identity = identity
        self._prefix = identity.namespace
        self._seed = hashlib.blake2b(
            identity.digest, digest_size=PAGE_HEX // 2, person=b"kvconnect-page"
        )
        self._cells = [cell.digest() for cell in cells]
        if len(set(self._cells)) != len(self._cells):
            raise ConfigError("two objects of a page name the same layer and head ranges")

    def page_digests(self, hashes: Sequence[bytes]) -> list[str]:
        """Return namespace + page part of the keys, one per prefix-chain hash."""
        out = []
        for page_hash in hashes:
            state = self._seed.copy()
            state.update(page_hash)
            out.append(self._prefix + state.hexdigest())
        return out

    def keys(self, hashes: Sequence[bytes]) -> list[str]:
        """Return the keys of all objects of the pages, page-major."""
        cells = self._cells
        if len(cells) == 1:
            only = cells[0]
            return [page + only for page in self.page_digests(hashes)]
        return [page + cell for page in self.page_digests(hashes) for cell in cells]

    def turns(self, hashes: Sequence[bytes]) -> NDArray[np.uint64]:
        """Return 64 bits of each page's identity for electing its writer: (pages,) uint64."""
        pages = self.page_digests(hashes)
        low = [int(page[NAMESPACE_HEX : NAMESPACE_HEX + 16], 16) for page in pages]
        return np.array(low, dtype=np.uint64)


def page_hashes(
    tokens: Sequence[int] | NDArray[np.integer],
    page_size: int,
    *,
    first_page: int = 0,
    parent: bytes | None = None,
) -> list[bytes]:
    """Return the prefix-chain hashes (32 bytes each) of all whole pages of `tokens`.

    hash(page) = blake2b(hash(previous page), tokens of the page as little-endian int64). A tail
    shorter than `page_size` has no hash. `first_page` is the page number of tokens[0] in its
    sequence: anything but page 0 needs `parent`, the hash of the page before, else there is no
    key (`ConfigError`).
    """
    if page_size < 1:
        raise ConfigError(f"page_size is {page_size}; it must be at least 1")
    if first_page < 0 or (first_page > 0) != bool(parent):
        raise ConfigError(
            f"page {first_page} with parent hash {'given' if parent else 'missing'}: "
            f"exactly the pages after the first have a parent"
        )
    data = np.asarray(tokens)
    if data.ndim != 1 or (len(data) and data.dtype.kind not in "iu"):
        raise ConfigError(
            f"tokens are {data.ndim} dimensions of {data.dtype}; a page hash needs one of integers"
        )
    data = data.astype("<i8")
    last, out = parent or b"", []
    for start in range(0, len(data) - page_size + 1, page_size):
        state = hashlib.blake2b(last, digest_size=32, person=b"kvconnect-chain")
        state.update(data[start : start + page_size].tobytes())
        last = state.digest()
        out.append(last)
    return out


def as_hash(value: bytes | str) -> bytes:
    """Accept an engine's page hash as bytes or text (SGLang: 64 hex); never empty.

    Text becomes its UTF-8 bytes, so two texts that differ are two pages.
    """
    if not isinstance(value, (str, bytes, bytearray, memoryview)):
        # bytes(7) is seven zeros: an int would be taken for a hash that others have, too.
        raise ConfigError(f"page hash {value!r} is {type(value).__name__}; give bytes or text")
    data = value.encode("utf-8") if isinstance(value, str) else bytes(value)
    if not data:
        raise ConfigError("page hash is empty: a page that is not named has no key")
    return data
