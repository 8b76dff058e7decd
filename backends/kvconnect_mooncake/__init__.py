"""Mooncake Store, ``mooncake://master:50051``: one store over many hosts' memory.

Importing this package is cheap and needs no Mooncake; opening a store loads the library.
"""

from collections.abc import Mapping

from kvconnect.backend import Backend


def open_backend(location: str, options: Mapping[str, str]) -> Backend:
    """Connect to the master at `location` (``host:port`` or ``etcd://...``).

    Raises `ConfigError` for options that cannot be, `UnavailableError` where the library is
    missing, no master answers, or another transport than the one asked for would be used.
    """
    from kvconnect_mooncake.store import open_store  # noqa: PLC0415 - heavy, so late

    return open_store(location, options)


def open_local(location: str, options: Mapping[str, str]) -> Backend:
    """Start a master of its own, keep its log in directory `location`, and connect to it.

    The master ends when the store is closed, and when this process ends for whatever reason.
    """
    from kvconnect_mooncake.store import open_own  # noqa: PLC0415 - heavy, so late

    return open_own(location, options)


__all__ = ["open_backend", "open_local"]
