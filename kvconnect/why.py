"""`Connector.why(page)`: a miss in words.

Each identity that ever wrote to a store leaves its record there. On a miss the page's key is
derived again under every record, so that "absent" becomes "stored as float16, you ask for
bfloat16".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvconnect.backend import SupportsListing, SupportsRecords
from kvconnect.errors import BackendError, ConfigError
from kvconnect.identity import Identity, KeyMaker

if TYPE_CHECKING:
    from kvconnect.connector import Connector


def why(connector: Connector, page_hash: bytes) -> str:
    """Say why the page is a hit or a miss for this connector."""
    try:
        return _why(connector, page_hash)
    except BackendError as error:
        return f"miss: the store cannot be asked: {error}"


def _why(connector: Connector, page_hash: bytes) -> str:
    keys = connector.keys.keys([page_hash])
    sizes = connector.plan.object_nbytes()
    found = connector.backend.exists(keys, sizes)
    if len(found) != len(keys):
        return f"miss: the store gives {len(found)} answers for {len(keys)} keys"
    if found.all():
        if connector._negative.known([page_hash])[0]:  # noqa: SLF001 - the other half of exists
            return (
                f"miss: present now, but it vanished between exists and get less than "
                f"{connector.options.negative_ttl:g} s ago and is taken for absent that long"
            )
        return f"hit: {len(keys)} of {len(keys)} objects present, {sum(sizes)} B"
    backend = connector.backend
    if not isinstance(backend, SupportsListing):
        return f"miss: {int(found.sum())} of {len(keys)} objects present"
    page = connector.keys.page_digests([page_hash])[0]
    if own := backend.list_keys(page):
        return _own(connector, own, keys, found.tolist())
    others = _elsewhere(connector, page_hash)
    return f"miss: {'; '.join(others)}" if others else "miss: absent under every identity known"


def _own(connector: Connector, own: list[str], keys: list[str], found: list[bool]) -> str:
    """Explain a page whose namespace and hash are present, but not as this rank needs it."""
    here = set(own)
    wrong_size = sum(key in here and not ok for key, ok in zip(keys, found, strict=True))
    if wrong_size:
        return f"miss: {wrong_size} of {len(keys)} objects are stored at another size or expired"
    cells = connector.plan.cells
    missing = [str(c) for c, ok in zip(cells, found, strict=True) if not ok]
    text = f"miss: {sum(found)} of {len(keys)} objects present, missing {missing[0]}"
    foreign = len(here - set(keys))
    if foreign:
        text += (
            f"; {foreign} objects of the page belong to other ranks or another grid "
            f"(head_group, tp_sizes, layer_chunk)"
        )
    return text


def _elsewhere(connector: Connector, page_hash: bytes) -> list[str]:
    backend, mine = connector.backend, connector.identity
    if not isinstance(backend, SupportsRecords) or not isinstance(backend, SupportsListing):
        return []
    out: list[tuple[int, str]] = []
    for name, data in sorted(backend.records().items()):
        if not name.startswith("identity/"):
            continue
        try:
            theirs = Identity.from_json(data)
            page = KeyMaker(theirs, connector.plan.cells).page_digests([page_hash])[0]
        except ConfigError:
            continue
        if theirs.namespace == mine.namespace:
            continue
        if backend.list_keys(page):
            words = differences(theirs, mine)
            out.append((len(words), " and ".join(words)))
    # The nearest identities explain a miss; the rest only repeats that others differ more.
    return [text for _, text in sorted(out)[:2]]


def differences(stored: Identity, asked: Identity) -> list[str]:
    """Name the fields in which two identities differ, both values each."""
    ours, theirs = dict(asked.fields()), dict(stored.fields())
    words = []
    for name in dict.fromkeys([*theirs, *ours]):
        have, want = theirs.get(name), ours.get(name)
        if have != want:
            words.append(
                f"stored as {stored.dtype}, you ask for {asked.dtype}"
                if name == "dtype"
                else f"stored with {name} {have!r}, you ask for {want!r}"
            )
    return words
