"""Which transport is in use, as far as this process can see for itself.

The library takes TCP where RDMA was asked for and no card is there, and RDMA where TCP was
asked for and one is; both return success. Whoever uses RDMA has a verbs device open, so that
is what is looked at.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from kvconnect.errors import UnavailableError

CARDS = Path("/sys/class/infiniband")
DESCRIPTORS = Path("/proc/self/fd")


def cards(folder: Path = CARDS) -> list[str]:
    """Return the RDMA cards of this host, sorted."""
    return sorted(one.name for one in folder.iterdir()) if folder.is_dir() else []


def in_use(descriptors: Path = DESCRIPTORS) -> str:
    """Return ``rdma`` if this process has a verbs device open, else ``tcp``."""
    for one in descriptors.iterdir():
        with suppress(OSError):
            if "/infiniband/uverbs" in str(one.readlink()):
                return "rdma"
    return "tcp"


def check_cards(asked: str, *, allow_fallback: bool, folder: Path = CARDS) -> None:
    """Raise `UnavailableError` where RDMA is asked for and cannot be."""
    if asked == "rdma" and not allow_fallback and not cards(folder):
        raise UnavailableError(
            f"mooncake: protocol=rdma, but {folder} lists no card, and the library would use tcp "
            f"without saying so; use protocol=tcp, or allow_fallback=true"
        )


def check_in_use(asked: str, used: str, *, allow_fallback: bool) -> None:
    """Raise `UnavailableError` where another transport is in use than was asked for."""
    if asked != used and not allow_fallback:
        raise UnavailableError(
            f"mooncake: protocol={asked} was asked for, {used} is in use; set device=, check the "
            f"card (ibv_devinfo) or MC_FORCE_TCP, or set allow_fallback=true"
        )
