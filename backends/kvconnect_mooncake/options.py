"""Options of ``mooncake://`` and ``mooncake+local://``, parsed and checked once."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from kvconnect.config import Bytes, parse_options
from kvconnect.errors import ConfigError

MIN_SEGMENT = 16 << 20
"""Bytes; the library mounts no smaller segment."""
MAX_ENTRIES = 1024
"""Mooncake queues as many transfers per peer; what is above may fail after a second."""
LOCAL_SEGMENT = 1 << 30


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """What a URL may say; sizes in bytes, times in seconds.

    `segment`: memory this process gives to the store; `prefix`: goes before every key, so that
    stores can share a master; `lease`: the master's ``default_kv_lease_ttl``, which it must
    match; `entries`: runs inside the library at once; `side`: buffer of the trailers;
    `breaker`: how long what failed is left alone; `linger`: how long the key and the space of a
    store that failed are, as its bytes may come late; `admin`: HTTP ``host:port;host:port`` of all
    masters, for listing; `max_region_bytes`: most that one registration may have, found out where
    it is not given; `soft_pin`: how long stored objects resist eviction; `group`: ``page`` evicts
    the objects of a page together; `close_timeout`: how long closing waits for the library.
    """

    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = ""
    allow_fallback: bool = False
    host: str | None = None
    segment: Bytes = 0
    replicas: int = 1
    prefer: str | None = None
    prefix: str = ""
    checksum: bool = True
    lease: float = 10.0
    timeout: float = 60.0
    rpc_timeout: float = 6.0
    entries: int = 512
    threads: int = 4
    side: Bytes = 256 << 10
    breaker: float = 10.0
    linger: float = 120.0
    space_wait: float = 2.0
    close_timeout: float = 5.0
    min_run_bytes: Bytes | None = None
    max_region_bytes: Bytes | None = None
    admin: str | None = None
    tenant: str = ""
    group: Literal["none", "page"] = "none"
    soft_pin: float | None = None
    ssd: str | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that no store can have; `ConfigError` names the option."""
        self._check_times()
        for name, low, high in (
            ("replicas", 1, 64),
            ("threads", 1, 64),
            ("entries", 8, MAX_ENTRIES),
            ("side", 4096, 1 << 30),
        ):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(
                    f"mooncake: {name}={getattr(self, name)}; it must be {low} to {high}"
                )
        if self.segment and self.segment < MIN_SEGMENT:
            raise ConfigError(
                f"mooncake: segment={self.segment} B; the library mounts 0 or at least "
                f"{MIN_SEGMENT} B"
            )
        if not re.fullmatch(r"[A-Za-z0-9_.-]{0,64}", self.prefix):
            raise ConfigError(
                f"mooncake: prefix={self.prefix!r}; up to 64 of A-Z a-z 0-9 _ . - are allowed"
            )
        if self.ssd is not None and not self.ssd.startswith("/"):
            raise ConfigError(f"mooncake: ssd={self.ssd!r} must be an absolute directory")
        if self.ssd is not None and not self.segment:
            raise ConfigError(
                f"mooncake: ssd={self.ssd!r} keeps what leaves this process's segment, and "
                f"segment=0; give both where the memory is"
            )

    def _check_times(self) -> None:
        for name in ("lease", "timeout", "rpc_timeout", "breaker", "close_timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"mooncake: {name}={getattr(self, name)} s; it must be above 0 and finite"
                )
        for name in ("space_wait", "linger"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ConfigError(f"mooncake: {name}={value} s; it must be 0 or more and finite")

    @property
    def smallest_run(self) -> int:
        """Bytes below which the connector repacks runs: an entry costs as much as copying."""
        if self.min_run_bytes is not None:
            return self.min_run_bytes
        return (64 << 10) if self.protocol == "tcp" else (4 << 10)

    @property
    def call_entries(self) -> int:
        """Entries of one call: two calls overlap, so that one hashes while the other moves."""
        return self.entries // 2


def parse(options: Mapping[str, str]) -> MooncakeOptions:
    """Parse the options of a URL; `ConfigError` names the option and close matches."""
    return parse_options(options, MooncakeOptions, "mooncake")


def parse_local(options: Mapping[str, str]) -> MooncakeOptions:
    """Parse the options of a store with a master of its own, which needs a segment."""
    parsed = parse({"segment": str(LOCAL_SEGMENT), **options})
    for name in ("admin", "tenant"):
        if getattr(parsed, name):
            raise ConfigError(f"mooncake+local: {name}= is for a master that others started")
    return parsed if parsed.segment else replace(parsed, segment=LOCAL_SEGMENT)
