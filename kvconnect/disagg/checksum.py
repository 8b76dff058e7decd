"""One checksum over what a request moves, in an order that both sides share.

The bytes are taken as `Packer` packs them: piece by piece, block by block. That order is fixed
by the plan, so the two sides agree also where their layouts, TP sizes and pages differ.
"""

from __future__ import annotations

import numpy as np
import xxhash

from kvconnect.disagg.blocks import Packer
from kvconnect.page_index import U64

_CHUNK_BYTES = 4 << 20
"""Small enough to be hashed out of the cache."""


def checksum(packer: Packer, pages: U64, pieces: int) -> bytes:
    """Return 16 bytes of xxh3 over the first `pieces` pieces of `pages`."""
    state = xxhash.xxh3_128()
    step = max(_CHUNK_BYTES // packer.nbytes, 1)
    buffer = np.empty(min(step, pieces) * packer.nbytes, dtype=np.uint8)
    for first in range(0, pieces, step):
        part = buffer[: min(step, pieces - first) * packer.nbytes]
        packer.pack(pages, first, part)
        state.update(part.data)
    return state.digest()
