"""Object names: ``PREFIX/objects/NAMESPACE/REST`` for keys, ``PREFIX/records/HEX`` for records.

Only checked hex digits become part of a name, so no model name, salt or record name can point
elsewhere. What lies under the prefix and is not shaped like this is nobody's and left alone.
"""

from __future__ import annotations

import re

from kvconnect.errors import ConfigError
from kvconnect.identity import KEY_HEX, NAMESPACE_HEX

_KEY = re.compile(rf"[0-9a-f]{{{KEY_HEX}}}")
_START = re.compile(rf"[0-9a-f]{{0,{KEY_HEX}}}")
_NAME = re.compile(rf"([0-9a-f]{{{NAMESPACE_HEX}}})/([0-9a-f]{{{KEY_HEX - NAMESPACE_HEX}}})")
_RECORD = re.compile(r"(?:[0-9a-f]{2})+")
MAX_RECORD_NAME = 200
"""Bytes; two characters each, below what S3 leaves beside the longest prefix."""


class Names:
    """The names of one store.

    >>> names = Names("team")
    >>> names.of("0123456789abcdef" + "5" * 48)[:32]
    'team/objects/0123456789abcdef/55'
    """

    __slots__ = ("objects", "recorded")

    def __init__(self, prefix: str) -> None:
        """`prefix`: checked by `parse_place`."""
        start = f"{prefix}/" if prefix else ""
        self.objects, self.recorded = f"{start}objects/", f"{start}records/"

    def of(self, key: str) -> str:
        """Return the name of a key's object; `ConfigError` unless it is kvconnect's kind of key."""
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"nixl+s3: key of {len(key)} characters, {key[:80]!r}; it must be {KEY_HEX} "
                f"lower-case hex digits, as `kvconnect.identity` derives them"
            )
        return f"{self.objects}{key[:NAMESPACE_HEX]}/{key[NAMESPACE_HEX:]}"

    def key_of(self, name: str) -> str | None:
        """Return whose object this is; None for strangers."""
        found = _NAME.fullmatch(name.removeprefix(self.objects))
        return found[1] + found[2] if found and name.startswith(self.objects) else None

    def under(self, prefix: str) -> str | None:
        """Return how the names of keys that begin with `prefix` begin; None where no key can."""
        if not _START.fullmatch(prefix):
            return None
        if len(prefix) <= NAMESPACE_HEX:
            # Whole namespaces end in a slash, but half of one must find all that continue it.
            return self.objects + prefix
        return f"{self.objects}{prefix[:NAMESPACE_HEX]}/{prefix[NAMESPACE_HEX:]}"

    def record(self, name: str) -> str:
        """Return the name of a record's object."""
        data = name.encode()
        if not 0 < len(data) <= MAX_RECORD_NAME:
            raise ConfigError(
                f"nixl+s3: record name of {len(data)} B; it must have 1 to {MAX_RECORD_NAME}"
            )
        return self.recorded + data.hex()

    def record_of(self, name: str) -> str | None:
        """Return which record this is; None for strangers."""
        rest = name.removeprefix(self.recorded)
        if not name.startswith(self.recorded) or not _RECORD.fullmatch(rest):
            return None
        try:
            return bytes.fromhex(rest).decode()
        except UnicodeDecodeError:
            return None


def raw(key: str) -> bytes:
    """Return a checked key's 32 bytes, which its trailer carries."""
    return bytes.fromhex(key)
