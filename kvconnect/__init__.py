"""kvconnect: the storage-backend connector for disaggregated LLM KV caches.

    with kvconnect.open("nvme:///mnt/kv?capacity=200GiB") as store:
        with kvconnect.Connector(pool, placement, identity, store) as connector:
            connector.put(hashes, page_ids)

Importing this module imports neither torch nor any backend; names load when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvconnect.aio import AsyncConnector as AsyncConnector
    from kvconnect.backend import Outcome as Outcome
    from kvconnect.backend import Status as Status
    from kvconnect.connector import Connector as Connector
    from kvconnect.descriptors import describe as describe
    from kvconnect.foreign import wrap as wrap
    from kvconnect.hostpool import HostPool as HostPool
    from kvconnect.identity import Identity as Identity
    from kvconnect.identity import page_hashes as page_hashes
    from kvconnect.layout import Layout as Layout
    from kvconnect.placement import Placement as Placement
    from kvconnect.placement import Span as Span
    from kvconnect.pool import Pool as Pool
    from kvconnect.registry import open_url as open  # noqa: A004, F401 - the public name

_HOME = {
    "AsyncConnector": "kvconnect.aio",
    "Connector": "kvconnect.connector",
    "HostPool": "kvconnect.hostpool",
    "Identity": "kvconnect.identity",
    "Layout": "kvconnect.layout",
    "Outcome": "kvconnect.backend",
    "Placement": "kvconnect.placement",
    "Pool": "kvconnect.pool",
    "Span": "kvconnect.placement",
    "Status": "kvconnect.backend",
    "describe": "kvconnect.descriptors",
    "open": "kvconnect.registry:open_url",
    "page_hashes": "kvconnect.identity",
    "wrap": "kvconnect.foreign:wrap",
}

__all__ = ["__version__", *_HOME]  # noqa: PLE0604 - the keys are strings


def __getattr__(name: str) -> Any:
    """Load a public name from its module the first time it is used."""
    if name not in _HOME:
        raise AttributeError(f"module 'kvconnect' has no attribute {name!r}")
    module, _, attribute = _HOME[name].partition(":")
    value = getattr(import_module(module), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
