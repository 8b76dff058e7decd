"""Moving pieces by the Transfer Engine: one entry a call, so that each has a status of its own.

In a batch of many entries the engine reports the first failure while the others go on, and
offers no way to ask when they end. An entry alone costs as much as one in a batch, and what is
said of it is final.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from kvconnect.backend import Closing
from kvconnect.disagg.lane import cut
from kvconnect.disagg.transport import Runs, Way
from kvconnect.errors import BackendError, UnavailableError
from kvconnect.hostmem import allocate

PIECE_BYTES = 2 << 20
"""Longer runs are cut, so that the lanes of the engine share them and a cancel is prompt."""
_RUNNING, _DONE, _TIMED_OUT = 0, 1, -2
_POLL_SECONDS = 2e-4
_CONNECTIONS = 16
"""More than the library keeps open to one peer (4, unless MC_TCP_LANES_PER_PEER says more)."""

_SLOT = 16
_HEADER_BYTES = 4096

Piece = tuple[Way, int, int, int]


class Header(Closing):
    """A registered page: this rank's generation, and slots in which peers' ones are read."""

    def __init__(self, generation: bytes) -> None:
        """Put the generation at the start of the page."""
        self._memory = allocate(_HEADER_BYTES, "generation", pin=False)
        self.address, self.nbytes = self._memory.address, _HEADER_BYTES
        ctypes.memmove(self.address, generation, _SLOT)
        self._slots = deque(range(self.address + _SLOT, self.address + self.nbytes, _SLOT))

    def take(self) -> int:
        """Return the address of a free slot, zeroed; `BackendError` where calls hold all."""
        try:
            slot = self._slots.popleft()
        except IndexError:
            raise BackendError(
                f"mooncake: {_HEADER_BYTES // _SLOT - 1} peers are being asked for their "
                f"generation and have not answered; connect later"
            ) from None
        ctypes.memset(slot, 0, _SLOT)
        return slot

    def give(self, slot: int) -> bytes:
        """Return what was read, and the slot to the free ones."""
        found = ctypes.string_at(slot, _SLOT)
        self._slots.append(slot)
        return found

    def close(self) -> None:
        """Let the page go."""
        self._memory.close()


class TransferDriver:
    """The `Driver` of one peer: `session` is the engine's name for it."""

    name = "mooncake"

    def __init__(
        self, engine: Any, header: Header, target: tuple[str, int, bytes], entries: int
    ) -> None:
        """`target`: the peer's session, where its generation lies, and which it must be."""
        self._engine, self._header = engine, header
        self._session, self._at, self._generation = target
        self.depth = entries

    def verify(self) -> None:
        """Read the generation that is there now; `UnavailableError` unless it is the peer's."""
        slot = self._header.take()
        try:
            said = self._ended(self.post((Way.PULL, slot, self._at, _SLOT)))
        finally:
            found = self._header.give(slot)
        if said:
            raise UnavailableError(f"the engine at {self._session} cannot be read: {said}")
        if found != self._generation:
            raise UnavailableError(
                f"the engine at {self._session} is another rank's: generation {found.hex()}"
            )

    def pieces(self, way: Way, runs: Runs) -> Iterator[Piece]:
        """Cut a batch into entries."""
        short = cut(runs, PIECE_BYTES)
        columns = (short.local.tolist(), short.remote.tolist(), short.nbytes.tolist())
        for local, remote, nbytes in zip(*columns, strict=True):
            yield way, local, remote, nbytes

    def post(self, piece: Piece) -> int:
        """Submit one entry."""
        way, local, remote, nbytes = piece
        engine = self._engine
        push, pull = engine.batch_transfer_async_write, engine.batch_transfer_async_read
        call = push if way is Way.PUSH else pull
        ticket: int = call(self._session, [local], [remote], [nbytes])
        if not ticket:
            raise BackendError(f"{self._session} takes no entry; it is gone, or its memory is")
        return ticket

    def poll(self, ticket: int) -> str | None:
        """Ask for the status of an entry; the library forgets it once it has ended."""
        code = self._engine.transfer_check_status(ticket)
        if code in {_RUNNING, _TIMED_OUT}:
            # Timed out is the caller's clock (MC_TRANSFER_TIMEOUT): the entry goes on.
            return None
        if code == _DONE:
            return ""
        return f"an entry to or from {self._session} failed ({code})"

    def _ended(self, ticket: int) -> str:
        # The lane's own thread: the engine ends this by its progress time-out.
        while (said := self.poll(ticket)) is None:
            time.sleep(_POLL_SECONDS)
        return said

    def close(self, *, gone: bool) -> None:
        """Let go of the engine, which ends when all have."""
        if gone:
            self._hang_up()
        self._engine = None

    def _hang_up(self) -> None:
        """Have the engine close its connections to a process that has ended.

        It looks at one only when it uses it, and would keep those of every start of every peer.
        """
        with contextlib.suppress(BackendError):
            slot, tickets = self._header.take(), list[int]()
            try:
                for _ in range(_CONNECTIONS):
                    tickets.append(self.post((Way.PULL, slot, self._at, _SLOT)))
            finally:
                for ticket in tickets:
                    self._ended(ticket)
                self._header.give(slot)
