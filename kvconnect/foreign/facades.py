"""Pools whose page numbers are not places in memory: envelopes that move, stripes over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kvconnect.errors import LayoutError, PageIndexError
from kvconnect.foreign.declared import check_axes, check_size, number
from kvconnect.foreign.tensors import Buffer, planes_of
from kvconnect.page_index import I64
from kvconnect.pool import Pool


def read_envelope(pool: Any, label: str) -> Pool:
    """Read whole-page envelopes in a backing that two pools share and compact.

    Page numbers are logical; each call translates them as they are then. Hold the engine's
    layout lease from the call until the transfer is done, or compaction moves the page.
    """
    buffer = Buffer(("page",), pool._host_page_buffer_view, ("page", "dim"), "page buffer")  # noqa: SLF001
    planes = planes_of([buffer], number(pool, "page_size"), label)
    check_axes(pool, planes[0], buffer, {"page": "page_num", "dim": "item_bytes"})
    check_size(pool, planes)
    return Pool(
        planes,
        page_size=number(pool, "page_size"),
        layers=1,
        heads=1,
        head_dim=number(pool, "item_bytes"),
        v_head_dim=0,
        dtype="uint8",
        label=label,
        owner=pool,
        translate=_by_backing(pool),
    )


def _by_backing(pool: Any) -> Callable[[I64], I64]:
    backing, name, size = pool._shared_backing, pool.pool_label, pool.page_size  # noqa: SLF001

    def translate(pages: I64) -> I64:
        try:
            found = [backing.translate_index(name, page * size) // size for page in pages.tolist()]
        except (AssertionError, KeyError) as error:
            raise PageIndexError(f"{error} A page must be allocated to be described") from error
        return np.array(found, dtype=np.int64)

    return translate


def read_interleaved(pool: Any, inner: Pool) -> Pool:
    """Read a striped pool: of `shard_size` ranks, page p lies on rank p % shard_size."""
    rank, ranks = int(pool.shard_rank), number(pool, "shard_size")
    if inner.translate is not None:
        raise LayoutError("a striped pool over page envelopes is not supported; wrap them apart")

    def translate(pages: I64) -> I64:
        away = np.flatnonzero(pages % ranks != rank)
        if len(away):
            page = int(pages[away[0]])
            raise PageIndexError(
                f"page {page} lies on shard rank {page % ranks}, this is rank {rank} of {ranks}"
            )
        return pages // ranks

    return replace(inner, translate=translate, owner=pool)
