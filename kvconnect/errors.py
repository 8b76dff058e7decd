"""Typed errors: one root, one class per thing a caller can do something about.

Every message names what failed, the numbers involved and the fix. Each class also inherits
the builtin that a caller without kvconnect in mind would catch, so that ``except OSError``
around a store and ``except ValueError`` around a configuration keep working.
A miss is never an error: it is a `kvconnect.backend.Status`.
"""


class KVConnectError(Exception):
    """Root of everything kvconnect raises on purpose."""


class LayoutError(KVConnectError, ValueError):
    """A layout, cut or geometry that cannot be: names the axis and both numbers."""


class PageIndexError(LayoutError, IndexError):
    """Token indices or page ids that do not name whole, aligned pages inside the pool."""


class ConfigError(KVConnectError, ValueError):
    """An option, identity field or URL that cannot be used: names the field and the fix."""


class CapabilityError(KVConnectError, NotImplementedError):
    """A backend was asked for something it does not offer."""


class BackendError(KVConnectError, RuntimeError):
    """A backend failed as a whole; failures of single keys are statuses instead."""


class UnavailableError(BackendError, ConnectionError):
    """The store or a library it needs is not there: names what to install or start."""


class TransferTimeoutError(BackendError, TimeoutError):
    """A wait passed its deadline; memory of the transfer stays leased until it is done."""


class RegistrationError(BackendError, OSError):
    """Memory could not be registered, or a descriptor lies outside what was registered."""


class RegionTooLargeError(RegistrationError):
    """A region is larger than `max_region_bytes`, which can be registered at once."""

    def __init__(self, message: str, max_region_bytes: int) -> None:
        """`max_region_bytes`: what whoever knows the pages may cut it into."""
        super().__init__(message)
        self.max_region_bytes = max_region_bytes


class CapacityError(BackendError, OSError):
    """There is no room: names what is asked, what is free and which option raises it."""


class CorruptionError(BackendError, OSError):
    """The store itself (not one object) is damaged: names the file and the repair."""


class ClosedError(BackendError, ValueError):
    """An operation on something that was closed."""
