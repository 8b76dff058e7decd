"""What the tests of the presence table look at: its words, and the entries themselves."""

from pathlib import Path

from kvconnect_nvme.keys import pack_all
from kvconnect_nvme.presence import Presence

OPTIONS = {"capacity": "8MiB", "durability": "none"}
SIZES = [100, 4096]


def files(location):
    return sorted(Path(location, "index").glob("presence-*"))


def state(store):
    return store.stats()["presence"]


def by_entries(store, names, sizes):
    """Ask again without the table."""
    real = Presence.view
    Presence.view = lambda *_: None
    try:
        return store.exists(names, sizes)
    finally:
        Presence.view = real


def agree(store, names, expected):
    """Compare both ways of asking, for every name and size, with a dict of what is there."""
    asked = [(name, size) for name in names for size in SIZES]
    found = store.exists([n for n, _ in asked], [s for _, s in asked])
    assert found.tolist() == [expected.get(name) == size for name, size in asked]
    assert found.tolist() == by_entries(store, *map(list, zip(*asked, strict=True))).tolist()


def table(store):
    """The words as they are in the file."""
    with store.core.env.read() as session:
        return store.core.env.presence.view(session).file.table


def words_of(store, names, size):
    with store.core.env.read() as session:
        pending = store.core.env.presence.view(session).pending
    return pending.words(pack_all(names), [size] * len(names))


def settle(store):
    """Have what is pending applied, by a transaction that changes nothing."""
    store.core.env.write(lambda session: None)
