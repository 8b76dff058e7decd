"""Tiered stores by URL: a list, or one URL that carries the others.

``tiered://?tier1=nvme:///mnt/kv?capacity=200GiB&tier2=mooncake://master:50051&write=back``

Inside a tier's URL write ``%26`` for ``&``, ``%23`` for ``#``, ``%2B`` for ``+`` and ``%25`` for
``%``; everything else stays as it is.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence

from kvconnect.backend import Backend
from kvconnect.config import parse_options
from kvconnect.errors import ConfigError
from kvconnect.registry import open_url
from kvconnect.tiered.backend import TieredBackend
from kvconnect.tiered.options import TieredOptions

EXAMPLE = "tiered://?tier1=nvme:///mnt/kv?capacity=200GiB&tier2=mooncake://master:50051"


def open_backend(location: str, options: Mapping[str, str]) -> Backend:
    """Open ``tiered://?tier1=URL&tier2=URL&option=value``; `ConfigError` names what is wrong."""
    if location:
        raise ConfigError(f"tiered: {location!r} is no part of it; write {EXAMPLE}")
    urls = {name: value for name, value in options.items() if re.fullmatch(r"tier\d+", name)}
    wanted = [f"tier{number}" for number in range(1, len(urls) + 1)]
    if sorted(urls) != sorted(wanted):
        raise ConfigError(
            f"tiered: got {', '.join(sorted(urls))}; tiers are numbered from tier1, fastest first"
        )
    rest = {name: value for name, value in options.items() if name not in urls}
    return open_tiers([urls[name] for name in wanted], rest)


def open_tiers(urls: Sequence[str], options: Mapping[str, object] | None = None) -> TieredBackend:
    """Open the stores at `urls`, fastest first, and put them together.

    If one cannot be opened, those opened before are closed and its error is raised.
    """
    parsed = parse_options(options or {}, TieredOptions, "tiered")
    if len(urls) < 2:
        raise ConfigError(f"tiered: {len(urls)} tiers; it takes two or more, as in {EXAMPLE}")
    with contextlib.ExitStack() as undo:
        backends = [undo.enter_context(open_url(url)) for url in urls]
        store = TieredBackend(backends, parsed)
        undo.pop_all()
        return store
