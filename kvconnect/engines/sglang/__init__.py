"""kvconnect as an L3 store of SGLang's HiCache, loaded by its ``dynamic`` storage backend.

::

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kvconnect",
      "module_path": "kvconnect.engines.sglang", "class_name": "KVConnectStorage",
      "interface_v1": 1, "url": "nvme:///mnt/kv?capacity=200GiB"}'

Importing this package imports neither SGLang nor torch; `KVConnectStorage` is made on first
use, because it must be a subclass of the engine's own class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvconnect.engines.sglang.storage import KVConnectStorage

__all__ = ["KVConnectStorage", "explain"]


def __getattr__(name: str) -> Any:
    if name != "KVConnectStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvconnect.engines.sglang.storage import KVConnectStorage  # noqa: PLC0415

    return KVConnectStorage


def explain(pool: Any, config: Any) -> str:
    """Say what would be stored for a host pool under a `HiCacheStorageConfig`, and why.

    Opens the store for what it can take and closes it again; stores and reads nothing.
    """
    from kvconnect.engines.sglang.explaining import explain_pool  # noqa: PLC0415

    return explain_pool(pool, config)
