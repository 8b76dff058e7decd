"""The embedded NVMe store, ``nvme:///path?capacity=200GiB``: nothing to start, nothing to run.

Importing this package is cheap; LMDB and numpy code load when a store is opened.
"""

from collections.abc import Mapping

from kvconnect.backend import Backend


def open_backend(location: str, options: Mapping[str, str]) -> Backend:
    """Open the store in directory or on block device `location`; the caller closes it.

    Raises `ConfigError` for options that cannot be, `UnavailableError` where the path cannot
    be used, `CapacityError` where not even the index fits, `CorruptionError` where the index
    is damaged.
    """
    try:
        from kvconnect_nvme.store import open_store  # noqa: PLC0415 - heavy, so late
    except ImportError as error:
        from kvconnect.errors import UnavailableError  # noqa: PLC0415

        raise UnavailableError(
            f"nvme needs {error.name}: {error}. Install it with pip install kvconnect"
        ) from error
    return open_store(location, options)


__all__ = ["open_backend"]
