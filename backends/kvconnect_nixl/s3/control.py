"""What NIXL cannot ask an S3 server: how large an object is, which there are, and to delete some.

Over botocore. Every call is bounded: one attempt takes at most `request_timeout`, what may help
is tried again at most `retries` times with growing pauses and never past the caller's deadline.
"""

from __future__ import annotations

import functools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import botocore.session
from botocore.config import Config
from botocore.exceptions import ClientError

from kvconnect.backend import Closing
from kvconnect.errors import BackendError, UnavailableError
from kvconnect_nixl.s3 import seal
from kvconnect_nixl.s3.circuit import Circuit
from kvconnect_nixl.s3.foreign import FOREIGN, code_of, translate
from kvconnect_nixl.s3.options import Place, S3Options

T = TypeVar("T")

DELETED_AT_ONCE = 1000
"""Names in one request; S3 takes no more."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0


class Seen(NamedTuple):
    """What a look at an object found: its size (None: there is none) and its last bytes."""

    size: int | None
    tail: bytes


class Control(Closing):
    """Requests about objects; any thread may call."""

    def __init__(self, options: S3Options, place: Place, circuit: Circuit) -> None:
        """Make the client; asks the server nothing."""
        self._options, self._place, self._circuit = options, place, circuit
        self._client, self.region = _connect(options)
        self._pool = ThreadPoolExecutor(options.threads, thread_name_prefix="kvconnect-s3-look")

    def until(self) -> float:
        """Return the deadline of an operation that begins now."""
        return time.monotonic() + self._options.timeout

    def check_bucket(self, prefix: str) -> None:
        """Raise `UnavailableError` unless the bucket is there and may be listed."""
        list(self._page(prefix, None, 1, self.until())[0])

    def look(self, name: str, until: float) -> Seen:
        """Read the size and the trailer of one object."""
        return self._call(f"look at {name}", lambda: self._look(name), until)

    def look_later(self, name: str, until: float) -> Future[Seen]:
        """Look on another thread."""
        return self._pool.submit(self.look, name, until)

    def look_all(self, names: Sequence[str]) -> list[Seen]:
        """Look at many, `threads` at once; the first failure ends all of it."""
        until, found = self.until(), list[Seen]()
        # No more than can begin: the looks of transfers must not queue behind ten thousand.
        asked: deque[Future[Seen]] = deque()
        try:
            for name in names:
                if len(asked) == self._options.threads:
                    found.append(self._answer(asked.popleft(), until))
                asked.append(self.look_later(name, until))
            found += [self._answer(one, until) for one in asked]
        finally:
            for one in asked:
                one.cancel()
        return found

    def _answer(self, asked: Future[Seen], until: float) -> Seen:
        try:
            return asked.result(max(until - time.monotonic(), 0))
        except TimeoutError:
            raise UnavailableError(
                f"nixl+s3: {self._place} did not answer all looks within {self._options.timeout} "
                f"s; raise timeout= or threads="
            ) from None

    def _look(self, name: str) -> Seen:
        try:
            answer = self._client.get_object(
                Bucket=self._place.bucket, Key=name, Range=f"bytes=-{seal.NBYTES}"
            )
        except ClientError as error:
            code = code_of(error)
            if code in {"NoSuchKey", "404"}:
                return Seen(None, b"")
            if code in {"InvalidRange", "416"}:
                return Seen(0, b"")
            raise
        # A server that knows no suffix ranges sends it all; the end is what counts either way.
        tail = answer["Body"].read()[-seal.NBYTES :]
        total = answer.get("ContentRange", "").rpartition("/")[2]
        return Seen(int(total) if total.isdigit() else int(answer["ContentLength"]), tail)

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (name, bytes) of all objects whose names begin so, in order."""
        until, token = self.until(), None
        while True:
            page, token = self._page(prefix, token, 1000, until)
            yield from page
            if token is None:
                return

    def _page(
        self, prefix: str, token: str | None, most: int, until: float
    ) -> tuple[list[tuple[str, int]], str | None]:
        more = {} if token is None else {"ContinuationToken": token}

        def ask() -> Any:
            return self._client.list_objects_v2(
                Bucket=self._place.bucket, Prefix=prefix, MaxKeys=most, **more
            )

        answer = self._call(f"list {prefix}*", ask, until)
        page = [(str(one["Key"]), int(one["Size"])) for one in answer.get("Contents", ())]
        return page, answer.get("NextContinuationToken") if answer.get("IsTruncated") else None

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, a thousand per request; those that are not there are no error."""
        until = self.until()
        for at in range(0, len(names), DELETED_AT_ONCE):
            some = names[at : at + DELETED_AT_ONCE]
            request = {"Objects": [{"Key": name} for name in some], "Quiet": True}

            def ask(request: Any = request) -> Any:
                return self._client.delete_objects(Bucket=self._place.bucket, Delete=request)

            answer = self._call(f"delete {len(some)} objects", ask, until)
            if failed := answer.get("Errors"):
                raise BackendError(
                    f"nixl+s3: {len(failed)} of {len(some)} objects in {self._place} were not "
                    f"deleted, the first, {failed[0].get('Key')}, for {failed[0].get('Code')}"
                )

    def write(self, name: str, data: bytes) -> None:
        """Store a small object."""

        def ask() -> Any:
            return self._client.put_object(Bucket=self._place.bucket, Key=name, Body=data)

        self._call(f"write {name}", ask, self.until())

    def read(self, name: str) -> bytes | None:
        """Return a small object, or None where there is none."""

        def ask() -> bytes | None:
            try:
                answer = self._client.get_object(Bucket=self._place.bucket, Key=name)
            except ClientError as error:
                if code_of(error) in {"NoSuchKey", "404"}:
                    return None
                raise
            return bytes(answer["Body"].read())

        return self._call(f"read {name}", ask, self.until())

    def _call(self, doing: str, ask: Callable[[], T], until: float) -> T:
        attempt = 0
        while True:
            self._circuit.check()
            try:
                return ask()
            except FOREIGN as error:
                failure = translate(error, doing, str(self._place))
                rest = pause(attempt)
                last = attempt == self._options.retries or time.monotonic() + rest >= until
                if last or not failure.again:
                    if failure.down:
                        self._circuit.trip(str(failure.error))
                    raise failure.error from error
            time.sleep(rest)
            attempt += 1

    def close(self) -> None:
        """Drop what has not begun, wait for the rest (each within its time-out), disconnect."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._client.close()


def pause(attempt: int) -> float:
    """Return seconds to wait after failure number `attempt` (0 first), with a random share."""
    longest = min(_FIRST_PAUSE * float(1 << attempt), _LONGEST_PAUSE)
    return longest * (0.5 + secrets.randbelow(1 << 16) / (1 << 17))


@functools.cache
def _descriptions() -> Any:
    """Return botocore's reader of API descriptions; parsing them anew takes 50 ms per store."""
    return botocore.session.get_session().get_component("data_loader")


def _connect(options: S3Options) -> tuple[Any, str]:
    session = botocore.session.get_session()
    session.register_component("data_loader", _descriptions())
    region = options.region or session.get_config_variable("region") or "us-east-1"
    config = Config(
        connect_timeout=options.request_timeout,
        read_timeout=options.request_timeout,
        # Our own, because a deadline has to bound them all together.
        retries={"total_max_attempts": 1, "mode": "standard"},
        max_pool_connections=options.threads,
        s3={"addressing_style": options.addressing},
        # Beyond what a server requires they cost time, and the trailer has a better one.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        user_agent_extra="kvconnect",
    )
    client = session.create_client(
        "s3",
        region_name=region,
        endpoint_url=options.endpoint,
        aws_access_key_id=options.access_key,
        aws_secret_access_key=options.secret_key,
        aws_session_token=options.session_token,
        verify=options.ca_bundle,
        config=config,
    )
    return client, str(region)
