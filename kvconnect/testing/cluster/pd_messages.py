"""What a P/D rank worker is told: its configuration, and the arguments of its commands.

The first line of its stdin is a `RankConfig`, every further one a `Command` of the module
events, turned into an `Order` by `order_of`. Its answers are those events.
Pages are named by content numbers (see `kvconnect.testing.cluster.content`) of `unit` slots
each, so that the two sides may have pages of different size: a pool page of 64 slots holds four
numbers of 16. Sizes are bytes where the name says so, else elements or counts; times seconds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvconnect.config import parse_options
from kvconnect.disagg.keys import Keys
from kvconnect.disagg.options import EndpointOptions
from kvconnect.errors import ConfigError
from kvconnect.testing.cluster.content import Content
from kvconnect.testing.cluster.events import Command, order_among
from kvconnect.testing.cluster.rank_shape import Positive, RankShape


class RankConfig(RankShape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank.

    `host` is its address for the transport and `listen` where a prefill rank takes control
    connections; both are on the cluster's network, for which `keys` are needed. A rank that is
    started again with the same `listen` is a new generation on the same address. `grace` is how
    long after its deadline a request may take to end.
    """

    name: str
    role: Literal["prefill", "decode"]
    transport: str
    host: str
    listen: str = ""
    keys: Keys | None = None
    fleet: str
    ranks: int
    unit: Positive
    deadline: float = 10.0
    grace: float = 2.0
    transport_options: dict[str, str | int | float] = msgspec.field(default_factory=dict)
    endpoint: dict[str, str | int | float] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what no rank can be; `ConfigError` names the field."""
        if self.page_size % self.unit:
            raise ConfigError(
                f"unit is {self.unit} slots, pages have {self.page_size}; it must divide them"
            )
        if (self.role == "prefill") != bool(self.listen):
            raise ConfigError(
                f"listen={self.listen!r} of a {self.role} rank: prefill ranks listen, decode "
                f"ranks connect"
            )

    @property
    def content(self) -> Content:
        """What every number must contain."""
        return self.content_of(self.unit)

    @property
    def options(self) -> EndpointOptions:
        """Options of its endpoint: `endpoint` and what the fields say."""
        own = {"name": self.name, "fleet": self.fleet, "ranks": self.ranks}
        return parse_options({"timeout": self.deadline} | self.endpoint | own, EndpointOptions)


class Send(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prefill: make the content of `ids` and offer it, `step` layers at a time (0: all)."""

    request: str
    ids: tuple[int, ...]
    deadline: float | None = None
    step: int = 0


class Receive(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Decode: have `ids` moved here; the event of its end says which of them are right."""

    request: str
    ids: tuple[int, ...]
    deadline: float | None = None
    checksum: bool = True
    way: Literal["push", "pull"] = "push"


class Abort(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """End a request, on whichever side."""

    request: str
    reason: str = "the user has left"


class Connect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Decode: meet all prefill ranks; answered when it is done or has failed."""

    addresses: tuple[str, ...]
    timeout: float = 10.0


class Flip(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Change one byte on its way in each of the next `batches` batches that this rank moves."""

    batches: int = 1


class Verify(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Look once more at all memory that was handed out again; an event says what changed."""


class Counts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Send a `State`."""


class Quit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Close everything and end."""


Order = Send | Receive | Abort | Connect | Flip | Verify | Counts | Quit

_WORDS: dict[str, type[Order]] = {
    "send": Send,
    "receive": Receive,
    "abort": Abort,
    "connect": Connect,
    "flip": Flip,
    "verify": Verify,
    "counts": Counts,
    "quit": Quit,
}


def order_of(command: Command) -> Order:
    """Return what a command asks for; `ConfigError` names a word or argument that is unknown."""
    return order_among(_WORDS, command)
