"""botocore's exceptions become ours here and nowhere else.

A server's own words are quoted by code and status only: messages may repeat parts of a request.
"""

from __future__ import annotations

from typing import NamedTuple

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004 - botocore's own
    ConnectTimeoutError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
)

from kvconnect.errors import BackendError, KVConnectError, UnavailableError

FOREIGN = (BotoCoreError, ClientError)
"""What botocore raises."""

_REFUSED = {
    "AccessDenied", "AllAccessDisabled", "AuthorizationHeaderMalformed", "ExpiredToken",
    "Forbidden", "InvalidAccessKeyId", "InvalidToken", "RequestTimeTooSkewed",
    "SignatureDoesNotMatch", "TokenRefreshRequired",
}  # fmt: skip
_BUSY = {"InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown", "Throttling"}


class Failure(NamedTuple):
    """A foreign error as ours.

    `again`: trying again may help at once; `down`: every other request would fail likewise.
    """

    error: KVConnectError
    again: bool
    down: bool


def translate(error: Exception, doing: str, place: str) -> Failure:
    """Return our error for a foreign one; `doing` names operation and numbers."""
    if isinstance(error, ClientError):
        return _from_answer(error, doing, place)
    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        ours = UnavailableError(
            f"nixl+s3: {doing} in {place}: no credentials; set AWS_ACCESS_KEY_ID and "
            f"AWS_SECRET_ACCESS_KEY, a profile (AWS_PROFILE) or a role"
        )
        return Failure(ours, again=False, down=True)
    if isinstance(error, (ConnectTimeoutError, ReadTimeoutError)):
        ours = UnavailableError(f"nixl+s3: {doing} in {place}: the server does not answer")
        # Waiting out another time-out per request is what nobody has time for.
        return Failure(ours, again=False, down=True)
    if isinstance(error, (HTTPClientError, ConnectionError)):
        ours = UnavailableError(
            f"nixl+s3: {doing} in {place}: the server cannot be reached ({error}); is endpoint= "
            f"right, and does it run?"
        )
        return Failure(ours, again=True, down=True)
    return Failure(BackendError(f"nixl+s3: {doing} in {place}: {error}"), again=True, down=False)


def code_of(error: ClientError) -> str:
    """Return the server's code, or the HTTP status where it sent none."""
    return str(error.response.get("Error", {}).get("Code") or _http(error))


def _http(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _from_answer(error: ClientError, doing: str, place: str) -> Failure:
    code, status = code_of(error), _http(error)
    said = f"nixl+s3: {doing} in {place}: the server answers {status} {code}"
    if code == "NoSuchBucket":
        ours: KVConnectError = UnavailableError(f"{said}; create the bucket, or correct its name")
        return Failure(ours, again=False, down=True)
    if code in _REFUSED or status in {401, 403}:
        ours = UnavailableError(
            f"{said}; check the credentials, the region and that they allow GetObject, PutObject, "
            f"DeleteObject and ListBucket there"
        )
        return Failure(ours, again=False, down=True)
    busy = code in _BUSY or status == 429 or status >= 500
    return Failure(BackendError(said), again=busy, down=False)
