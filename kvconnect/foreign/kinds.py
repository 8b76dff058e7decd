"""`wrap(pool)`: read a foreign host pool by the attributes it has.

Each kind of pool is a row of one table: which attributes tell it, and how to read it. The
first row that fits wins, so special kinds come before the general ones they resemble.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvconnect.errors import LayoutError
from kvconnect.foreign import attention, facades, rows
from kvconnect.pool import Pool

_KINDS: tuple[tuple[tuple[str, ...], Callable[[Any, str], Pool]], ...] = (
    (("temporal_buffer", "conv_buffer"), rows.read_mamba),
    (("index_k_with_scale_buffer",), rows.read_indexer),
    (("_shared_backing", "_host_page_buffer_view"), facades.read_envelope),
    (("kv_buffer", "row_bytes"), rows.read_page_rows),
    (("kv_buffer", "item_bytes"), rows.read_paged_rows),
    (("kv_buffer", "state_page_bytes"), rows.read_paged_rows),
    (("kv_buffer", "kv_lora_rank"), attention.read_mla),
    (("kv_buffer", "head_num"), attention.read_mha),
    (("k_buffer", "head_num"), attention.read_k_only),
)


def wrap(pool: Any, label: str | None = None) -> Pool:
    """Return the `Pool` of a foreign host pool; a kvconnect pool is returned as it is.

    Reads SGLang's host pools (MHA in all layouts, K and V of different head dimensions, MXFP8
    with its scales, MLA also split in two, DSA index, Mamba, packed page rows, page envelopes)
    and whatever else has the same attributes. Geometry comes from the buffers; `LayoutError`
    names the attribute and both numbers where they disagree, or what is missing. The result
    keeps `pool` alive as its `owner`. Other memory: see `pool_from_tensors`.
    """
    if isinstance(pool, Pool):
        return pool
    name = label or str(_peek(pool, "pool_label") or _peek(pool, "pool_name") or "kv")
    if _has(pool, "host_pool", "placement"):
        return facades.read_interleaved(pool, wrap(pool.host_pool, name))
    if _has(pool, "entries", "get_pool"):
        raise LayoutError(
            f"{type(pool).__name__} is a group of {len(pool.entries)} pools; wrap the host_pool "
            f"of each entry"
        )
    if _has(pool, "kv_buffer") and _peek(pool, "kv_buffer") is None and not _has_own(pool):
        raise LayoutError(
            f"{type(pool).__name__}: kv_buffer is None; a logical or destroyed pool has no memory "
            f"to describe (wrap the pools that hold the bytes)"
        )
    for attributes, read in _KINDS:
        if _has(pool, *attributes):
            return read(pool, name)
    raise LayoutError(
        f"{type(pool).__name__} is no host pool known by its attributes (none of "
        f"{', '.join(sorted({a for names, _ in _KINDS for a in names}))}); describe its memory "
        f"with pool_from_tensors"
    )


def _has_own(pool: Any) -> bool:
    """Tell whether a pool without `kv_buffer` keeps its bytes under another name."""
    return _has(pool, "temporal_buffer") or _has(pool, "_host_page_buffer_view")


def _has(pool: Any, *attributes: str) -> bool:
    return all(_peek(pool, name, _MISSING) is not _MISSING for name in attributes)


_MISSING = object()


def _peek(pool: Any, name: str, default: Any = None) -> Any:
    # A property of a pool without memory may fail with anything; that is "not there" too.
    try:
        return getattr(pool, name)
    except Exception:  # noqa: BLE001
        return default
