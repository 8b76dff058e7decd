"""Why a request failed, as a type: what a caller branches on, beside the words for its log."""

from __future__ import annotations

import enum
import logging

from kvconnect.disagg.transport import PeerOutcome, PeerStatus
from kvconnect.errors import (
    BackendError,
    ClosedError,
    KVConnectError,
    TransferTimeoutError,
    UnavailableError,
)

log = logging.getLogger("kvconnect.disagg")


class Cause(enum.Enum):
    """Why a request failed; the values stand in control messages.

    A cause goes from rank to rank with the word that a request has failed, so that all of them
    name the same one.
    """

    CANCELLED = "cancelled"
    """`abort` was called here."""
    PEER_GAVE_UP = "peer gave up"
    """`abort` was called on another rank."""
    TIMEOUT = "timeout"
    """The deadline of the request, or of a transfer of it, has passed."""
    CHECKSUM = "checksum"
    """What arrived is not what was read at the source."""
    SIZE_MISMATCH = "size mismatch"
    """More or fewer bytes were confirmed than the plan has."""
    REFUSED = "refused"
    """One side named what the other cannot take: pages, layers, slots, pools, an id in use."""
    TRANSPORT = "transport"
    """The transport reported a failure."""
    PEER_LOST = "peer lost"
    """A rank of the other side died, fell silent, or closed."""
    GENERATION = "generation"
    """Another start of a rank answers at its address."""
    CLOSED = "closed"
    """The endpoint here was closed."""
    ERROR = "error"
    """A bug here; the log has the traceback."""

    @property
    def told(self) -> Cause:
        """What it is to a rank that hears of it from the one where it happened."""
        return _TOLD.get(self, self)


_TOLD = {Cause.CANCELLED: Cause.PEER_GAVE_UP, Cause.CLOSED: Cause.PEER_LOST}

_STATUSES = {
    PeerStatus.TIMEOUT: Cause.TIMEOUT,
    PeerStatus.CANCELLED: Cause.CANCELLED,
    PeerStatus.PEER_GONE: Cause.PEER_LOST,
}

_ERRORS: tuple[tuple[type[Exception], Cause], ...] = (
    (TransferTimeoutError, Cause.TIMEOUT),
    (ClosedError, Cause.CLOSED),
    (UnavailableError, Cause.PEER_LOST),
    (BackendError, Cause.TRANSPORT),
    (KVConnectError, Cause.REFUSED),
)
"""The first class that fits counts."""


class RequestError(KVConnectError):
    """What ends one request, with its cause."""

    def __init__(self, cause: Cause, words: str) -> None:
        """`words` are for people."""
        super().__init__(words)
        self.cause = cause


def noted(error: Exception) -> Exception:
    """Return an error; one that is no typed error, so a bug, leaves its traceback in the log."""
    if not isinstance(error, KVConnectError):
        log.error("kvconnect: in a worker", exc_info=error)
    return error


def cause_of(error: Exception | None) -> Cause:
    """Return the cause that an error is to the request it ends."""
    if isinstance(error, RequestError):
        return error.cause
    return next((cause for kind, cause in _ERRORS if isinstance(error, kind)), Cause.ERROR)


def cause_of_outcome(outcome: PeerOutcome) -> Cause:
    """Return the cause that a failed batch is to its request."""
    return _STATUSES.get(outcome.status, Cause.TRANSPORT)
