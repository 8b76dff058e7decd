"""Reading trailers alone, without the bytes before them."""

from __future__ import annotations

from kvconnect.backend import Status
from kvconnect_mooncake import slots, trailer
from kvconnect_mooncake.core import Core, Entry
from kvconnect_mooncake.foreign import SETTLED, status_of
from kvconnect_mooncake.trailer import Trailer


def read_trailers(
    core: Core, keys: list[str], nbytes: list[int], tail: int, until: float
) -> list[Trailer | Status]:
    """Return the trailers of objects of these sizes, or why there is none."""
    out: list[Trailer | Status] = []
    most = max(min(core.options.call_entries, core.slots.total // 4), 1)
    for low in range(0, len(keys), most):
        part = slice(low, low + most)
        out += _read_some(core, keys[part], nbytes[part], tail, until)
    return out


def _read_some(
    core: Core, keys: list[str], nbytes: list[int], tail: int, until: float
) -> list[Trailer | Status]:
    taken = core.slots.take(len(keys), until)
    if taken is None:
        return [Status.TIMEOUT] * len(keys)
    quiet = False
    try:
        names, entry = core.names.names(keys), Entry(len(keys), tail * len(keys), until)
        made = core.call(entry, lambda: core.client.tails(names, taken, nbytes, tail))
        if made is None:
            quiet = True
            return [Status.TIMEOUT] * len(keys)
        codes = made[0]
        quiet = all(code >= 0 or code in SETTLED for code in codes)
        return [
            trailer.unpack(key, slots.read(slot, tail)) if code == tail else status_of(code)
            for key, slot, code in zip(keys, taken, codes, strict=True)
        ]
    finally:
        # A slot that may still be written is not used again: 64 bytes for a rare event.
        if quiet:
            core.slots.give(taken)
