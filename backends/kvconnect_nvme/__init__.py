"""The embedded NVMe store, ``nvme:///folder?capacity=200GiB`` (see `kvconnect_nvme.store`)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvconnect_nvme.store import NvmeBackend


def open_backend(location: str, options: Mapping[str, str]) -> "NvmeBackend":
    """Open the store in folder or on block device `location`; the caller closes it.

    Raises `ConfigError` for options that cannot be, `UnavailableError` where the path or a
    library is missing, `CorruptionError` where the index is damaged.
    """
    from kvconnect_nvme import store  # noqa: PLC0415 - registering a backend must stay cheap

    return store.open_backend(location, options)


__all__ = ["open_backend"]
