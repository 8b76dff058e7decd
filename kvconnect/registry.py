"""Backends by URL scheme: ``kvconnect.open("nvme:///mnt/kv?capacity=200GiB")``.

A backend is a callable ``(location, options) -> Backend``, registered in the entry-point
group ``kvconnect.backends`` under its scheme. The built-in table serves a bare checkout, where
no entry points exist; an installed entry point of the same name wins.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import cast
from urllib.parse import parse_qsl, unquote, urlsplit

from kvconnect.backend import Backend
from kvconnect.errors import ConfigError, UnavailableError

GROUP = "kvconnect.backends"

Opener = Callable[[str, Mapping[str, str]], Backend]

BUILT_IN = {
    "memory": "kvconnect.memory:open_backend",
    "mooncake": "kvconnect_mooncake:open_backend",
    "mooncake+local": "kvconnect_mooncake:open_local",
    "nixl+s3": "kvconnect_nixl.s3:open_backend",
    "nvme": "kvconnect_nvme:open_backend",
    "tiered": "kvconnect.tiered:open_backend",
}

_EXTRAS = {"mooncake+local": "mooncake", "nixl+s3": "s3"}
"""Extras that are not called like the scheme."""


def known_schemes() -> list[str]:
    """Return every scheme that can be opened, sorted."""
    return sorted({*BUILT_IN, *(e.name for e in entry_points(group=GROUP))})


def split_url(url: str) -> tuple[str, str, dict[str, str]]:
    """Split ``scheme://location?options``; `ConfigError` on repeated or empty options.

    >>> split_url("nvme:///mnt/kv?capacity=1GiB")
    ('nvme', '/mnt/kv', {'capacity': '1GiB'})
    """
    # Options may hold secrets, which have no place in messages.
    shown = re.sub("//[^/]*@", "//...@", re.split("[?#]", url, maxsplit=1)[0])
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"{shown!r} is no store URL: {error}") from None
    if not parts.scheme or "://" not in url:
        raise ConfigError(f"{shown!r} is no store URL; write scheme://location, as in {_EXAMPLE}")
    if parts.fragment:
        raise ConfigError(f"{shown!r}: '#' starts a fragment; write %23 for it in a path")
    options: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in options:
            raise ConfigError(f"{shown!r}: option {name!r} is given twice")
        if not name or not value:
            raise ConfigError(
                f"{shown!r}: option {name!r} has the value {value!r}; write name=value"
            )
        options[name] = value
    return parts.scheme, unquote(parts.netloc + parts.path), options


_EXAMPLE = "nvme:///mnt/kv?capacity=200GiB"


def open_url(url: str | Sequence[str]) -> Backend:
    """Open the store that `url` names; the caller closes it.

    A list of URLs, fastest first, opens them as one tiered store.

    Raises `ConfigError` for an unknown scheme or option, `UnavailableError` when the backend's
    library is missing or the store cannot be reached.
    """
    if not isinstance(url, str):
        from kvconnect.tiered import open_tiers  # noqa: PLC0415 - it needs this module

        return open_tiers(url)
    scheme, location, options = split_url(url)
    return _load(scheme)(location, options)


def _load(scheme: str) -> Opener:
    for entry in entry_points(group=GROUP):
        if entry.name == scheme:
            return _import(entry.value, scheme)
    if scheme not in BUILT_IN:
        raise ConfigError(
            f"no backend is called {scheme!r}; known: {', '.join(known_schemes())}. A backend "
            f"of your own registers in the entry-point group {GROUP!r}"
        )
    return _import(BUILT_IN[scheme], scheme)


def _import(target: str, scheme: str) -> Opener:
    module, _, attribute = target.partition(":")
    try:
        return cast("Opener", getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        extra = _EXTRAS.get(scheme, scheme)
        raise UnavailableError(
            f"backend {scheme!r} needs {error.name or module}: {error}. Install it with "
            f"pip install 'kvconnect[{extra}]', or put backends/ on PYTHONPATH in a checkout"
        ) from error
