"""The async view of a connector: the same calls, awaited.

Calls run on a small thread pool of the view, because a call may wait for a store; the event
loop never does. Cancelling an await does not cancel the transfer: its pages stay leased until
it ends, as everywhere else.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from kvconnect.backend import Outcome
from kvconnect.connector import Connector, PageHash
from kvconnect.errors import ClosedError
from kvconnect.outcome import Hits

P = ParamSpec("P")
T = TypeVar("T")


class AsyncConnector:
    """Awaitable `put`, `get`, `exists`, `remove`, `clear` and `why` of one `Connector`."""

    def __init__(self, connector: Connector, *, threads: int = 4) -> None:
        """View `connector`, with at most `threads` calls under way at once."""
        self.connector = connector
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvconnect-aio")
        self._closed = False

    async def _run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._closed:
            raise ClosedError(f"{self.connector!r} is closed")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(call, *args, **kwargs))

    async def put(self, hashes: Sequence[PageHash], page_ids: Any, **options: Any) -> Outcome:
        """Store pages, as `Connector.put`."""
        return await self._run(self.connector.put, hashes, page_ids, **options)

    async def get(self, hashes: Sequence[PageHash], page_ids: Any, **options: Any) -> Outcome:
        """Load pages, as `Connector.get`."""
        return await self._run(self.connector.get, hashes, page_ids, **options)

    async def exists(self, hashes: Sequence[PageHash]) -> Hits:
        """Look pages up, as `Connector.exists`."""
        return await self._run(self.connector.exists, hashes)

    async def remove(self, hashes: Sequence[PageHash]) -> Hits:
        """Remove pages, as `Connector.remove`."""
        return await self._run(self.connector.remove, hashes)

    async def clear(self) -> int:
        """Clear this identity, as `Connector.clear`."""
        return await self._run(self.connector.clear)

    async def why(self, page_hash: PageHash) -> str:
        """Explain a page, as `Connector.why`."""
        return await self._run(self.connector.why, page_hash)

    async def close(self) -> None:
        """Close the connector, then the threads; the second call does nothing."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self.connector.close)
        self._closed = True
        self._threads.shutdown(wait=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
