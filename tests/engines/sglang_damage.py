"""Damage to the stored bytes of one page, where `kvconnect find` says that they lie."""

import os
from contextlib import contextmanager
from pathlib import Path

import kvconnect
from kvconnect.find import find


def places(url, page_hash):
    """Return where every stored object of a page lies; at least one."""
    with kvconnect.open(url) as store:
        found = [one.location for one in find(store, page_hash)]
    if not found or None in found:
        raise LookupError(f"page {page_hash} is not in files: {found}")
    return found


@contextmanager
def slab(place):
    with Path(place.path).open("r+b", buffering=0) as file:
        yield file
        os.fsync(file.fileno())


def truncate_half(place):
    """Cut the slab off in the middle of the object; whatever lies behind is lost too."""
    os.truncate(place.path, place.offset + place.nbytes // 2)


def truncate_all(place):
    """Cut the slab off where the object begins."""
    os.truncate(place.path, place.offset)


def zero(place):
    """Overwrite the object with zeros."""
    with slab(place) as file:
        os.pwrite(file.fileno(), bytes(place.nbytes), place.offset)


def flip(place):
    """Flip one bit in the middle."""
    at = place.offset + place.nbytes // 2
    with slab(place) as file:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), at)


def lengthen(place):
    """Append a block to the slab; the objects are as they were."""
    with slab(place) as file:
        os.truncate(file.fileno(), os.fstat(file.fileno()).st_size + 4096)
