"""Decode side: greeting a prefill rank until it answers, refuses, or the time is up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from kvconnect.disagg.peer_rank import PeerRank
from kvconnect.errors import UnavailableError

_AGAIN_SECONDS = 0.5


class Greetings:
    """Who waits for which rank's answer: one caller at a time, so that no answer is mixed up."""

    def __init__(self) -> None:
        """Wait for nobody."""
        self._one = threading.Lock()
        self._waiting: dict[str, tuple[threading.Event, list[PeerRank | Exception]]] = {}

    def greet(
        self, address: str, route: str, until: float, say_hello: Callable[[], Any]
    ) -> PeerRank:
        """Say hello again and again until `until`; returns the rank, or raises its refusal."""
        missing = UnavailableError(
            f"no prefill rank answered at {address}: is it running, and are the keys and the "
            f"release of kvconnect the same on both sides?"
        )
        if not self._one.acquire(timeout=max(until - time.monotonic(), 0)):
            raise missing
        done, box = threading.Event(), list[PeerRank | Exception]()
        self._waiting[route] = done, box
        try:
            while not done.is_set():
                left = until - time.monotonic()
                if left <= 0:
                    raise missing
                # What is sent to a rank that is not up yet may be lost.
                say_hello()
                done.wait(min(left, _AGAIN_SECONDS))
        finally:
            del self._waiting[route]
            self._one.release()
        answer = box[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def expects(self, route: str) -> bool:
        """Tell whether somebody waits for an answer from there."""
        return route in self._waiting

    def answer(self, route: str, value: PeerRank | Exception) -> None:
        """Channel thread: hand over what came of a greeting; the first answer counts."""
        found = self._waiting.get(route)
        if found is not None and not found[0].is_set():
            found[1].append(value)
            found[0].set()
