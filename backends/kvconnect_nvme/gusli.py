"""What GUSLI needs around the registration of memory, which it puts shared memory over.

It takes the name ``gs_iobuf_N``, the same in every process, away from whoever had it and makes
it anew, but not in one step: of two processes at once the second may open what the first has
just made, and each would then read and write the other's buffers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvconnect.region import Region
from kvconnect_nvme.owners import exclusive

_SHARED = Path("/dev/shm")  # noqa: S108 - where the names are


def lock() -> Path:
    """Return the lock file of this user's processes; it lies where the names do."""
    return _SHARED / f"kvconnect-gusli-{os.getuid()}.lock"


@contextmanager
def alone(region: Region, timeout: float) -> Iterator[None]:
    """Register `region` inside: one process at a time, and what it is then in is private.

    Raises `TransferTimeoutError` if others take longer than `timeout` seconds.
    """
    with exclusive(lock(), timeout):
        yield
        for name in _files(region):
            # GUSLI makes it readable for everybody; nothing has been written there yet.
            Path(name).chmod(0o600)


def _files(region: Region) -> Iterator[str]:
    """Yield the shared memory that lies at the start of `region`."""
    with Path("/proc/self/maps").open() as maps:
        for line in maps:
            place, *_, name = line.split()
            first, _, end = place.partition("-")
            if int(first, 16) <= region.address < int(end, 16) and name.startswith(
                f"{_SHARED}/gs_"
            ):
                yield name
