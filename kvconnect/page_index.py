"""Token indices to page ids: the check that comes before any descriptor.

Engines hand over one index per token and use one per page; what lies between is taken on
trust. Here every index is looked at, in one vectorised pass, because a page that is not whole,
aligned and contiguous would silently move other pages' bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvconnect.errors import PageIndexError

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]


def as_index_array(values: Any) -> I64:
    """Read integers from a tensor, an array or a sequence as (n,) int64, without a copy if int64.

    Raises `PageIndexError` for other kinds of numbers and other shapes.
    """
    array = _as_array(values)
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise PageIndexError(
            f"indices must be one dimension of integers, not {array.ndim} of {array.dtype}"
        )
    return array.astype(np.int64, copy=False)


def as_token_array(values: Any) -> I64:
    """Read token indices as (n,) int64; narrower integers are refused, not widened.

    An index that was ever held in 32 bits may have wrapped before it came here.
    """
    array = _as_array(values)
    if array.dtype == np.int64 and array.ndim == 1:
        return array
    if array.size and array.dtype.kind in "iu" and array.dtype.itemsize < 8:
        raise PageIndexError(
            f"token indices are {array.dtype}; they must be int64, because {array.dtype} wraps in "
            f"large pools (convert where they are made)"
        )
    return as_index_array(array)


def _as_array(values: Any) -> NDArray[Any]:
    if isinstance(values, np.ndarray):
        return values
    if hasattr(values, "numpy") and hasattr(values, "detach"):
        try:
            found: NDArray[Any] = values.numpy()
        except (TypeError, RuntimeError):  # on a device, or part of a graph
            found = values.detach().cpu().numpy()
        return found
    return np.asarray(_as_list(values))


def _as_list(values: Iterable[int]) -> list[int]:
    return list(values)


def token_pages(values: Any, step: int) -> I64:
    """Return the page ids of whole, aligned pages of `step` tokens: (pages,) int64.

    Raises `PageIndexError` naming the first page that is not `step` consecutive tokens from a
    multiple of `step`. Bounds are not checked here.
    """
    index = as_token_array(values)
    if len(index) % step:
        raise PageIndexError(
            f"{len(index)} token indices are not whole pages of {step}; pad or drop the last "
            f"{len(index) % step}"
        )
    if step == 1 or not len(index):
        return index
    first, last = _pages_of(index[::step], step), _pages_of(index[step - 1 :: step], step)
    # Exact in one pass over the indices: `step` strictly rising integers that begin and end in
    # the same aligned block of `step` are that block. The steps between pages do not count;
    # their places take the comparison of the blocks, so that one reduction judges both.
    rising = np.less(index[:-1], index[1:])
    np.equal(first[:-1], last[:-1], out=rising[step - 1 :: step])
    if not (rising.all() and first[-1] == last[-1]):
        _refuse_tokens(index.reshape(-1, step))
    return first


def _pages_of(index: I64, step: int) -> I64:
    # A shift costs half of a division, and page sizes are powers of two nearly always.
    if step & (step - 1) == 0:
        return index >> (step.bit_length() - 1)
    return index // step


def _refuse_tokens(rows: I64) -> None:
    step = rows.shape[1]
    wrong = (rows != rows[:, :1] + np.arange(step)).any(axis=1) | (rows[:, 0] % step != 0)
    at = int(np.flatnonzero(wrong)[0])
    start = int(rows[at, 0])
    if start % step:
        raise PageIndexError(
            f"page {at} starts at token index {start}, which is no multiple of page size {step}"
        )
    raise PageIndexError(
        f"page {at} (token index {start}) is not {step} consecutive tokens: "
        f"{rows[at][:8].tolist()} ..."
    )


def check_page_ids(ids: I64, pages: int) -> U64:
    """Check that page ids are distinct and inside [0, pages); return them as (n,) uint64."""
    unsigned: U64 = ids.view(np.uint64)
    if not len(ids):
        return unsigned
    # As unsigned, negative ids are huge: one reduction checks both bounds.
    if unsigned.max() >= pages or not _distinct(ids, pages):
        _refuse_pages(ids, pages)
    return unsigned


def _distinct(ids: I64, pages: int) -> bool:
    # Marking each page is cheaper than sorting unless the pool is much larger than the call.
    if pages <= 32 * len(ids):
        marked = np.zeros(pages, dtype=np.bool_)
        marked[ids] = True
        return int(np.count_nonzero(marked)) == len(ids)
    ordered = np.sort(ids)
    return not bool((ordered[1:] == ordered[:-1]).any())


def _refuse_pages(ids: I64, pages: int) -> None:
    outside = np.flatnonzero((ids < 0) | (ids >= pages))
    if len(outside):
        raise PageIndexError(f"page {int(ids[outside[0]])} is outside the pool of {pages} pages")
    values, counts = np.unique(ids, return_counts=True)
    raise PageIndexError(f"page {int(values[counts > 1][0])} appears twice in one call")
