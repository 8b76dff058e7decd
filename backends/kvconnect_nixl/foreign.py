"""NIXL's exceptions become ours here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvconnect.errors import (
    BackendError,
    CapabilityError,
    KVConnectError,
    RegistrationError,
    UnavailableError,
)

_OURS: dict[str, tuple[type[KVConnectError], str]] = {
    "nixlNotFoundError": (
        RegistrationError,
        "not registered, or outside of what was registered with this plugin",
    ),
    "nixlInvalidParamError": (BackendError, "a parameter or descriptor is refused"),
    "nixlMismatchError": (BackendError, "the two sides differ"),
    "nixlNotAllowedError": (BackendError, "more than the plugin takes at once"),
    "nixlNotSupportedError": (CapabilityError, "the plugin cannot do this"),
    "nixlBackendError": (BackendError, "the plugin failed"),
    "nixlRemoteDisconnectError": (UnavailableError, "the peer is gone"),
    "nixlRepostActiveError": (BackendError, "it is still under way"),
}
"""By the name of the class: the module that defines it has several names."""


def translate(error: Exception, doing: str) -> KVConnectError:
    """Return our error for a foreign one; `doing` names operation, plugin and numbers."""
    if isinstance(error, KVConnectError):
        return error
    kind, meaning = _OURS.get(type(error).__name__, (BackendError, type(error).__name__))
    return kind(f"nixl: {doing}: {meaning} ({error})")


@contextmanager
def mapped(doing: str) -> Iterator[None]:
    """Translate whatever is raised inside."""
    try:
        yield
    except KVConnectError:
        raise
    except Exception as error:
        raise translate(error, doing) from error
