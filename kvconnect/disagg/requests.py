"""Handles of requests: what a caller waits on, and when its pages are free."""

from __future__ import annotations

import enum
import threading
import time
from dataclasses import dataclass, field

from kvconnect.disagg.cause import Cause
from kvconnect.page_index import U64


class RequestState(enum.Enum):
    """Where a request is; the last two are final."""

    UNDER_WAY = "under way"
    DONE = "done"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        """Whether nothing changes it any more."""
        return self is not RequestState.UNDER_WAY


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """How a request stands: `nbytes` are confirmed bytes over all pools.

    Of one that failed, `cause` says why, and `reason` says it in words; else both are empty.
    """

    state: RequestState
    nbytes: int
    reason: str = ""
    cause: Cause | None = None

    @property
    def ok(self) -> bool:
        """Whether everything has moved."""
        return self.state is RequestState.DONE


@dataclass(frozen=True, slots=True)
class Filled:
    """Pages of one pool, (pages,) uint64, and how many of their slots a request fills."""

    pages: U64
    slots: int


@dataclass(eq=False)
class Request:
    """One request on one rank.

    `pages` are its pages here of the KV, (pages,) uint64. They, and those of the side pools, are
    in use until `quiet()`: a request that failed may still be written to (decode) or read from
    (prefill) by a peer that has not heard.
    """

    request_id: str
    pages: U64
    until: float
    nbytes: int = 0
    reason: str = ""
    cause: Cause | None = None
    state: RequestState = RequestState.UNDER_WAY
    _ended: threading.Event = field(default_factory=threading.Event)
    _quiet: threading.Event = field(default_factory=threading.Event)

    def wait(self, timeout: float | None = None) -> RequestOutcome:
        """Wait until it is done or has failed, at most `timeout` seconds (None: its deadline)."""
        left = self.until - time.monotonic() + 1.0
        self._ended.wait(max(left, 0.0) if timeout is None else timeout)
        return RequestOutcome(self.state, self.nbytes, self.reason, self.cause)

    def quiet(self, timeout: float = 0.0) -> bool:
        """Wait at most `timeout` seconds; tell whether the pages may be used for other things."""
        return self._quiet.wait(timeout)

    def end(self, state: RequestState, reason: str = "", cause: Cause | None = None) -> bool:
        """Channel thread: fix the outcome; False if it was fixed before."""
        if self._ended.is_set():
            return False
        self.reason, self.cause, self.state = reason, cause, state
        self._ended.set()
        return True

    def settle(self) -> None:
        """Channel thread: nothing touches the pages any more."""
        self._quiet.set()

    def __repr__(self) -> str:
        free = "" if self._quiet.is_set() else ", pages held"
        why = f": {self.reason}" if self.reason else ""
        return (
            f"Request({self.request_id!r}, {len(self.pages)} pages, {self.state.value}{free}{why})"
        )
