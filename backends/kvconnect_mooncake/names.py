"""Keys as the store has them: objects and records of one prefix apart from all others.

Objects with and without a trailer are two kinds: read as the other, neither would be right.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvconnect.errors import ConfigError

MAX_CHARACTERS = 256
PAGE_CHARACTERS = 48
"""Of kvconnect's keys: what comes before is the page, what follows the part of it."""
_SPECIAL = frozenset(r"\^$.*+?()[]{}|/")


class Names:
    """Maps keys to the store's names and back."""

    def __init__(self, prefix: str, *, checksum: bool) -> None:
        """`prefix` and `checksum` are the options of these names."""
        self.objects = f"kv1:{prefix}:{'c' if checksum else 'p'}:"
        self._records = f"kv1:{prefix}:r:"

    def name(self, key: str) -> str:
        """Return an object's name; `ConfigError` for a key that no listing could return."""
        if not 0 < len(key) <= MAX_CHARACTERS or not key.isprintable():
            raise ConfigError(
                f"mooncake: key {key[:80]!r} of {len(key)} characters; it must have 1 to "
                f"{MAX_CHARACTERS} printable characters"
            )
        return self.objects + key

    def names(self, keys: Sequence[str]) -> list[str]:
        """Return the names of objects."""
        return [self.name(key) for key in keys]

    def record(self, name: str) -> str:
        """Return a record's name: in hex, as it may hold anything."""
        return self._records + name.encode().hex()

    def keys(self, names: Sequence[str], prefix: str = "") -> list[str]:
        """Return the keys among `names` that begin with `prefix`, sorted."""
        start = self.objects + prefix
        return sorted(name[len(self.objects) :] for name in names if name.startswith(start))

    def recorded(self, names: Sequence[str]) -> list[str]:
        """Return the names of the records among `names`."""
        mine = [name[len(self._records) :] for name in names if name.startswith(self._records)]
        return [bytes.fromhex(name).decode() for name in mine]

    def pattern(self, prefix: str) -> str:
        """Return the regular expression of the objects that begin with `prefix`."""
        escaped = "".join("\\" + c if c in _SPECIAL else c for c in self.objects + prefix)
        return f"^{escaped}.*"


def page_of(key: str) -> str:
    """Return the part of a key that all objects of its page share."""
    return key[:PAGE_CHARACTERS]
