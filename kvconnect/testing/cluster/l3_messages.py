"""What a worker on a store is told: its configuration, and the arguments of its commands.

The first line of its stdin is a `WorkerConfig`, every further one a `Command` of the module
events, turned into an `Order` by `order_of`. Its answers are those events; the first, to command
0, comes once its connector is attached, and each try to open the store is a `Call` of its own.
Pages are named by content numbers (see `kvconnect.testing.cluster.content`). Sizes are elements
or counts; times seconds.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvconnect.errors import ConfigError
from kvconnect.testing.cluster.content import Content
from kvconnect.testing.cluster.events import Command, order_among
from kvconnect.testing.cluster.rank_shape import Positive, RankShape

Role = Literal["write", "read"]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Pause = Annotated[float, msgspec.Meta(ge=0)]


class WorkerConfig(RankShape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank of one group.

    The ranks of a `group` draw the same pages in the same order from content numbers
    `first` to `first + universe`, `batch` in a call, `pause` between two calls. `tp_sizes` are
    those of all groups that share pages. `opening` is what one try to open the store may take,
    `deadline` a call, and `grace` how long after it a call may end: what the store's own options
    in `url` must fit, as `exists` takes no deadline. `leaving` is what closing may take.
    """

    name: str
    group: str
    url: str
    object_layout: str | None = None
    tp_sizes: tuple[int, ...] = ()
    first: int = 0
    universe: Positive
    roles: tuple[Role, ...]
    batch: Positive
    pause: Pause = 0.0
    deadline: Seconds
    grace: Seconds
    opening: Seconds = 30.0
    leaving: Seconds = 15.0
    self_test: bool = True

    def __post_init__(self) -> None:
        """Refuse what no worker can do; `ConfigError` names the field."""
        if not self.roles:
            raise ConfigError("roles is empty; it must have write, read or both")
        if self.pages < self.batch:
            raise ConfigError(f"pages is {self.pages}; a call of batch={self.batch} needs as many")

    @property
    def content(self) -> Content:
        """What every page must contain."""
        return self.content_of(self.page_size)


class Start(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Begin the load, or go on with it after a `Pause`."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Make no more calls of the load; answered when the one under way has ended."""


class Store(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Store `ids`; answered after the `Call`."""

    ids: tuple[int, ...]


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Load `ids` and compare them; answered after the `Call`."""

    ids: tuple[int, ...]


class Exists(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ask whether `ids` are there; answered after the `Call`, which tells of misses only."""

    ids: tuple[int, ...]


class Verify(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Look at every one of `ids`; the answer is a `Verdict`.

    What missed for another reason than that it is not there is asked for again until `deadline`
    seconds are over.
    """

    ids: tuple[int, ...]
    deadline: Seconds = 20.0


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Change the rate of the load, from its next call on; None leaves as it is."""

    batch: Positive | None = None
    pause: Pause | None = None


class Counts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Send a `State`; answered at once, whatever call is under way."""


class Quit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Close everything and end; answered when that is done, or with the error why it is not."""


Order = Start | Stop | Store | Load | Exists | Verify | Settings | Counts | Quit

_WORDS: dict[str, type[Order]] = {
    "start": Start,
    "resume": Start,
    "pause": Stop,
    "store": Store,
    "load": Load,
    "exists": Exists,
    "verify": Verify,
    "settings": Settings,
    "counts": Counts,
    "quit": Quit,
}


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Which pages are there, byte for byte, and which are not; `misses` counts by last reason."""

    ok: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    wrong: tuple[int, ...] = ()
    misses: dict[str, int] = {}


def order_of(command: Command) -> Order:
    """Return what a command asks for; `ConfigError` names a word or argument that is unknown."""
    return order_among(_WORDS, command)
