"""One rank's calls on a store: each with a judgement of every page, byte for byte.

A page that is not in a call, nor held by a late transfer, is painted and watched (see
`page_book`): once the connector says that nothing holds a page it is somebody else's, and a
change of it is reported as `reused`. So a store that writes too late is found out by its paint,
and one that reads too late by paint that comes back as a page's content.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from kvconnect.backend import Backend, Closing, Outcome, Status
from kvconnect.connector import Connector
from kvconnect.errors import (
    BackendError,
    CapacityError,
    ClosedError,
    CorruptionError,
    RegistrationError,
    TransferTimeoutError,
    UnavailableError,
)
from kvconnect.hostpool import HostPool
from kvconnect.registry import open_url
from kvconnect.testing.cluster.content import page_hash
from kvconnect.testing.cluster.events import Call
from kvconnect.testing.cluster.l3_messages import Verdict, WorkerConfig
from kvconnect.testing.cluster.page_book import PageBook, Pages

_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (RegistrationError, ""),
    (ClosedError, ""),
    (UnavailableError, "UNAVAILABLE"),
    (TransferTimeoutError, "TIMEOUT"),
    (CapacityError, "NO_SPACE"),
    (CorruptionError, "CORRUPT"),
    (BackendError, "BACKEND_ERROR"),
)
_OK, _WRONG = "OK", "WRONG"
_FINAL = {_OK, _WRONG, "ABSENT", "PARTIAL"}
_AGAIN_SECONDS = 0.2


def reason(error: Exception) -> str:
    """Return a word for what a broken store may raise; empty for what is a bug."""
    return next((word for kind, word in _REASONS if isinstance(error, kind)), "")


@dataclass(frozen=True, slots=True)
class _Done:
    """A call that has ended: a word for each page, or the error of a bug."""

    started: float
    seconds: float
    words: Sequence[str]
    error: str = ""

    def of(self, ids: Sequence[int], word: str) -> tuple[int, ...]:
        """Return the pages that this word was said of."""
        return tuple(one for one, said in zip(ids, self.words, strict=True) if said == word)

    @property
    def misses(self) -> dict[str, int]:
        """Count the pages that are neither stored nor read, by reason."""
        return dict(Counter(word for word in self.words if word not in {_OK, _WRONG, ""}))


class Calls(Closing):
    """A pool on an open store, and the calls on it. Used by one thread, but for `stats`."""

    _kept: ClassVar[list[PageBook]] = []

    def __init__(self, config: WorkerConfig) -> None:
        """Open the store and attach; raises what these raise."""
        self.config, self.number = config, 0
        self._held: dict[int, int] = {}
        self._pool: HostPool = config.plan().allocate()
        try:
            self._book = PageBook(self._pool, config.placement, config.content)
            self._backend: Backend = open_url(config.url)
            self._connector = self._attach()
        except BaseException:
            self._pool.close()
            raise

    def _attach(self) -> Connector:
        c = self.config
        try:
            return Connector(
                self._pool,
                c.placement,
                c.identity,
                self._backend,
                object_layout=c.object_layout or "native",
                tp_sizes=c.tp_sizes or (c.tp_size,),
                timeout=c.deadline,
                self_test=c.self_test,
            )
        except BaseException as error:
            try:
                self._backend.close()
            except BackendError as left:
                # A transfer may still reach this pool: its memory must stay.
                self._kept.append(self._book)
                error.add_note(f"closing the store failed too: {left}")
            raise

    @property
    def plan(self) -> str:
        """What is stored, and how, in words."""
        return self._connector.explain()

    def store(self, ids: Sequence[int]) -> Call:
        """Store pages; `acked` are those that the store said are stored."""
        done = self._move("store", ids, self.config.deadline)
        return self._judged("store", ids, done, acked=done.of(ids, _OK))

    def load(self, ids: Sequence[int]) -> Call:
        """Load pages and compare them."""
        done = self._move("load", ids, self.config.deadline)
        return self._judged("load", ids, done, hits=done.of(ids, _OK), wrong=done.of(ids, _WRONG))

    def exists(self, ids: Sequence[int]) -> Call:
        """Ask for pages; what is there is not in the event, as nothing of it was read."""
        before = self._failures()
        started, words, error = time.monotonic(), [""] * len(ids), ""
        try:
            found = self._connector.exists(self._hashes(ids)).pages.tolist()
            word = "BACKEND_ERROR" if self._failures() > before else "ABSENT"
            words = [_OK if there else word for there in found]
        except Exception as caught:  # noqa: BLE001 - what it raises is what is tested
            words, error = _raised(caught, len(ids))
        done = _Done(started, time.monotonic() - started, words, error)
        return self._judged("exists", ids, done)

    def verify(self, ids: Sequence[int], deadline: float) -> Verdict:
        """Look at pages until each is read or known to be gone, or `deadline` seconds are over.

        Raises `BackendError` with the words of what no store may raise.
        """
        until, size = time.monotonic() + deadline, self.config.batch
        left, said = list(dict.fromkeys(ids)), dict[int, str]()
        while left and time.monotonic() < until:
            for start in range(0, len(left), size):
                batch = left[start : start + size]
                limit = min(until - time.monotonic(), self.config.deadline)
                if limit <= 0:
                    break
                done = self._move("load", batch, limit)
                if done.error:
                    raise BackendError(f"verify: {done.error}")
                said.update(zip(batch, done.words, strict=True))
            left = [one for one in left if said.get(one) not in _FINAL]
            if left:
                time.sleep(_AGAIN_SECONDS)
        words = [said.get(one, "TIMEOUT") for one in ids]
        done = _Done(0.0, 0.0, words)
        good = {*done.of(ids, _OK), *done.of(ids, _WRONG)}
        return Verdict(
            ok=done.of(ids, _OK),
            missing=tuple(one for one in ids if one not in good),
            wrong=done.of(ids, _WRONG),
            misses=done.misses,
        )

    def watch(self) -> Call | None:
        """Look at all memory that is somebody else's; a call of no page where some changed."""
        call = self._judged("load", (), _Done(time.monotonic(), 0.0, ()))
        return call if call.reused else None

    def stats(self) -> dict[str, float]:
        """Return the connector's counters. Any thread may ask."""
        return self._connector.stats()

    def quarantined(self) -> int:
        """Return the bytes that late transfers hold. Any thread may ask."""
        return len(self._connector.quarantined()) * self._book.page_nbytes

    def _failures(self) -> float:
        return self._connector.stats().get("exists.backend_error", 0.0)

    def _hashes(self, ids: Sequence[int]) -> list[bytes]:
        return [page_hash(self.config.seed, one) for one in ids]

    def _move(self, op: Literal["store", "load"], ids: Sequence[int], limit: float) -> _Done:
        self._settle()
        if self._book.free < len(ids):
            return _Done(time.monotonic(), 0.0, ["QUARANTINED"] * len(ids))
        pages = self._book.take(ids)
        call: Callable[..., Outcome] = self._connector.get
        if op == "store":
            call, held = self._connector.put, self.config.placement.layers
            self._book.fill(pages, ids, range(held.start, held.stop))
        done = self._timed(call, ids, pages, limit)
        if op == "load":
            done = self._compared(done, ids, pages)
        self._held.update(zip(pages.tolist(), ids, strict=True))
        self._settle()
        return done

    def _timed(
        self, call: Callable[..., Outcome], ids: Sequence[int], pages: Pages, limit: float
    ) -> _Done:
        hashes, started = self._hashes(ids), time.monotonic()
        try:
            outcome = call(hashes, pages, timeout=limit)
            words, error = [Status(int(one)).name for one in outcome.status], ""
        except Exception as caught:  # noqa: BLE001 - what it raises is what is tested
            words, error = _raised(caught, len(ids))
        return _Done(started, time.monotonic() - started, words, error)

    def _compared(self, done: _Done, ids: Sequence[int], pages: Pages) -> _Done:
        """Compare what is said to have been read with what must be there."""
        at = [i for i, word in enumerate(done.words) if word == _OK]
        if not at:
            return done
        wrong = set(self._book.wrong(pages[at], [ids[i] for i in at]))
        pairs = zip(ids, done.words, strict=True)
        words = [_WRONG if one in wrong and word == _OK else word for one, word in pairs]
        return _Done(done.started, done.seconds, words, done.error)

    def _settle(self) -> None:
        """Use all pages for something else that no transfer holds any more."""
        late = set(self._connector.quarantined())
        free = [page for page in self._held if page not in late]
        if free:
            former = [self._held.pop(page) for page in free]
            self._book.give(np.array(free, dtype=np.int64), former)

    def _judged(self, op: str, ids: Sequence[int], done: _Done, **pages: Any) -> Call:
        number, self.number = self.number, self.number + 1
        good = len(pages.get("acked", ())) + len(pages.get("hits", ()))
        return Call(
            op=op,
            worker=self.config.name,
            number=number,
            started=done.started,
            seconds=done.seconds,
            deadline=self.config.deadline,
            asked=len(ids),
            misses=done.misses,
            reused=tuple(self._book.changed()),
            nbytes=good * self._book.page_nbytes,
            error=done.error,
            **pages,
        )

    def close(self) -> None:
        """Detach, close the store, let go of the pool; the second call does nothing.

        Raises `TransferTimeoutError` where transfers go on; then the memory stays.
        """
        self._connector.close(self.config.leaving / 2)
        self._backend.close()
        self._pool.close()


def _raised(error: Exception, count: int) -> tuple[list[str], str]:
    """Return a word for each page, and the error where it is a bug's."""
    word = reason(error)
    return [word] * count, "" if word else f"{type(error).__name__}: {error}"
