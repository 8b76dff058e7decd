"""`find`: every object that a store keeps of one page, under whatever identity it was stored.

A page hash names tokens; a key also names model, dtype, pool and part of the model, and cannot
be turned back into them. Each identity that ever wrote to a store leaves its record there, so
the page's keys are derived again under every one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvconnect.backend import Backend, Location, SupportsListing, SupportsLocate, SupportsRecords
from kvconnect.errors import CapabilityError, ConfigError
from kvconnect.identity import Identity, KeyMaker, as_hash


@dataclass(frozen=True, slots=True)
class Found:
    """One stored object of the page; `location` None where the store does not or cannot say."""

    identity: Identity
    key: str
    location: Location | None


def find(backend: Backend, page_hash: bytes | str) -> list[Found]:
    """Return the page's objects, identity by identity, sorted by key within each.

    Reads the objects, where the backend locates them. Raises `CapabilityError` if the backend
    keeps no records or lists no keys.
    """
    if not isinstance(backend, SupportsRecords) or not isinstance(backend, SupportsListing):
        raise CapabilityError(
            f"backend {backend.name!r} keeps no identity records or lists no keys: which keys a "
            f"page has cannot be told"
        )
    name, found = as_hash(page_hash), list[Found]()
    for identity in _identities(backend.records()):
        keys = backend.list_keys(KeyMaker(identity, ()).page_digests([name])[0])
        places: list[Location | None] = [None] * len(keys)
        if isinstance(backend, SupportsLocate):
            places = backend.locate(keys)
        found += [Found(identity, *pair) for pair in zip(keys, places, strict=True)]
    return found


def _identities(records: dict[str, bytes]) -> Iterator[Identity]:
    for name, data in sorted(records.items()):
        if name.startswith("identity/"):
            try:
                identity = Identity.from_json(data)
            except ConfigError:
                continue  # not one of ours, or of a later version: it explains nothing here
            if identity.object_layout != "unset":
                yield identity
