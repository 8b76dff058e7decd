"""What every element of a model's KV cache is, computed from its coordinates alone.

An element is a 16-bit mix of (component, token, global layer, global head, dim). Pools of any
layout, TP rank and PP stage are filled from it and compared with it; nothing here calls
kvconnect, and SGLang's memory is viewed by the axis orders of its own documentation.
"""

import numpy as np
import torch

_MULTIPLIERS = (
    *(0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
    *(0x27D4EB2F165667C5, 0x85EBCA77C2B2AE63),
)
_FACTORS = np.array(_MULTIPLIERS, dtype=np.uint64)


def elements(component, tokens, layers, heads, dims):
    """Return (tokens, layers, heads, dims) uint16 of ranges of global coordinates."""
    axes = [
        np.array([component]),
        *(np.asarray(a) for a in (tokens, layers, heads)),
        np.arange(dims),
    ]
    grid = np.ix_(*[a.astype(np.uint64) + np.uint64(1) for a in axes])
    mixed = sum(axis * factor for axis, factor in zip(grid, _FACTORS, strict=True))
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(48)).astype(np.uint16)[0]


def canonical_object(tokens, layers, heads, dims):
    """Return the bytes of one object: component, head, slot, layer, dim."""
    return b"".join(
        elements(c, tokens, layers, heads, d).transpose(2, 0, 1, 3).tobytes()
        for c, d in enumerate(dims)
    )


# Axes of SGLang's buffers, outermost first; c component, p page, t slot, l layer, h head, d dim.
_ORDERS = {
    "layer_first": "lpthd",
    "page_first": "ptlhd",
    "page_first_direct": "plthd",
    "page_head": "phtld",
}
_WANTED = "ptlhd"


def views(host_pool):
    """Return one (pages, slots, layers, heads, dims) uint16 view for each component.

    Heads that lie in blocks are two axes, (head blocks, heads of a block), of the same order.
    """
    if host_pool.layout == "page_unified":  # page, block, layer, component, slot, head, dim
        buffer = _bits(host_pool.kv_buffer)
        return [buffer[:, :, :, at].transpose(0, 3, 2, 1, 4, 5) for at in (0, 1)]
    order = _ORDERS[host_pool.layout]
    extents = {
        "p": host_pool.page_num,
        "t": host_pool.page_size,
        "l": host_pool.layer_num,
        "h": getattr(host_pool, "head_num", 1),
        "d": -1,
    }
    shape = [extents[axis] for axis in order]
    axes = [order.index(axis) for axis in _WANTED]
    latent = type(host_pool).__name__.startswith("MLA")
    parts = [host_pool.kv_buffer] if latent else list(host_pool.kv_buffer)
    return [_bits(part).reshape(shape).transpose(axes) for part in parts]


def _bits(tensor):
    return tensor.view(torch.int16).numpy().view(np.uint16)


def pool_views(pool):
    """Return the same views of a kvconnect pool; its own axes are page, layer, slot, head, dim."""
    return [pool.array(name).swapaxes(1, 2) for name in pool.components]


def fill(parts, pages, tokens, layers, heads):
    """Write the truth: page i of `pages` gets the tokens i * slots ... of `tokens`."""
    for component, view in enumerate(parts):
        slots = view.shape[1]
        values = elements(component, tokens, layers, heads, view.shape[-1])
        view[pages] = values.reshape(len(pages), slots, *view.shape[2:])


def wrong(parts, pages, tokens, layers, heads):
    """Return how many elements of `pages` differ from the truth."""
    count = 0
    for component, view in enumerate(parts):
        values = elements(component, tokens, layers, heads, view.shape[-1])
        count += int((view[pages] != values.reshape(len(pages), *view.shape[1:])).sum())
    return count


def held_heads(total, rank, size):
    """Return the global KV heads of a TP rank, as engines place them."""
    if size > total:
        return range(rank * total // size, rank * total // size + 1)
    return range(rank * total // size, (rank + 1) * total // size)
