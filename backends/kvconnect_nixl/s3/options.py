"""Location and options of ``nixl+s3://bucket/prefix``, parsed and checked once."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from kvconnect.config import Bytes, parse_options
from kvconnect.errors import ConfigError

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]*")
"""One step of the prefix: what every S3 server and its tools take as it is."""

MAX_PREFIX = 512
"""Characters; S3 takes names of 1024 bytes."""


@dataclass(frozen=True, slots=True)
class S3Options:
    """What a URL may say.

    `endpoint`: ``http(s)://host:port`` of a server other than AWS; `region` of the bucket.
    `access_key`, `secret_key`, `session_token`: where the standard AWS chain (environment,
    profile, role) is not to be used. `addressing`: bucket in the path or in the host name.
    `ca_bundle`: file with the certificates to trust. `threads`: requests under way at once.
    `bounce`: bytes of the buffers that all objects pass through. Seconds: `timeout` per
    transfer and per wait, `request_timeout` for one answer of the server, `cooldown` in which
    a server that failed is not asked again. `retries`: of a request that failed for a while.
    """

    endpoint: str | None = None
    region: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    addressing: Literal["path", "virtual"] = "path"
    ca_bundle: str | None = None
    threads: int = 16
    bounce: Bytes = 256 << 20
    timeout: float = 60.0
    request_timeout: float = 3.0
    cooldown: float = 5.0
    retries: int = 3

    def __post_init__(self) -> None:
        """Refuse what cannot be; the values of keys are never shown."""
        if not 1 <= self.threads <= 256:
            raise ConfigError(f"nixl+s3: threads={self.threads}; it must be 1 to 256")
        if self.bounce < 4096:
            raise ConfigError(f"nixl+s3: bounce={self.bounce} B; it must be at least 4096 B")
        if not 0 <= self.retries <= 16:
            raise ConfigError(f"nixl+s3: retries={self.retries}; it must be 0 to 16")
        for name in ("timeout", "request_timeout", "cooldown"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"nixl+s3: {name}={value} s; it must be above 0 and finite")
        if (self.access_key is None) != (self.secret_key is None):
            raise ConfigError("nixl+s3: access_key and secret_key go together; give both or none")
        if self.session_token is not None and self.access_key is None:
            raise ConfigError("nixl+s3: session_token needs access_key and secret_key")
        _check_endpoint(self.endpoint)

    @property
    def scheme(self) -> str:
        """``http`` or ``https``."""
        return urlsplit(self.endpoint).scheme if self.endpoint else "https"


def _check_endpoint(endpoint: str | None) -> None:
    if endpoint is None:
        return
    try:
        parts = urlsplit(endpoint)
        right = parts.scheme in {"http", "https"} and bool(parts.hostname)
        right = right and (parts.port is None or parts.port > 0) and parts.path in {"", "/"}
    except ValueError:
        right = False
    if not right or parts.username or parts.query:
        raise ConfigError(
            "nixl+s3: endpoint= must be http://host:port or https://host:port, without a path "
            "and without credentials"
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Where the store's objects are: a bucket, and a prefix without slashes at its ends."""

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{self.bucket}/{self.prefix}" if self.prefix else self.bucket


def parse_place(location: str) -> Place:
    """Split ``bucket/prefix``; `ConfigError` where S3 or a tool would read it otherwise.

    >>> str(parse_place("kv-cache/team/a"))
    'kv-cache/team/a'
    """
    bucket, _, prefix = location.partition("/")
    if "@" in bucket:
        raise ConfigError(
            "nixl+s3: the bucket's name has an @ in it; credentials go into access_key= and "
            "secret_key=, or stay in the environment"
        )
    if not _BUCKET.fullmatch(bucket) or ".." in bucket:
        raise ConfigError(
            f"nixl+s3: {bucket!r} is no bucket name; it has 3 to 63 of a-z 0-9 . - as in "
            f"nixl+s3://kv-cache/prefix"
        )
    prefix = prefix.removesuffix("/")
    if len(prefix) > MAX_PREFIX:
        raise ConfigError(
            f"nixl+s3: the prefix has {len(prefix)} characters; at most {MAX_PREFIX} leave room"
        )
    for part in prefix.split("/") if prefix else ():
        if not _PART.fullmatch(part):
            raise ConfigError(
                f"nixl+s3: prefix part {part!r}; it must begin with a letter or digit and have "
                f"only these and . _ = -"
            )
    return Place(bucket, prefix)


def parse(options: Mapping[str, str]) -> S3Options:
    """Parse the options of a URL; `ConfigError` names the option and close matches."""
    return parse_options(options, S3Options, "nixl+s3")
