"""A scenario: who runs where, under which load, which faults hit it, and what must still hold.

Scenarios are data, TOML files, so that one can be written, read and replayed without knowing
the runner. Everything is checked when the file is read, and a key that is not known is an error;
seconds are from the start of the load.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvconnect.layouts import itemsize_of

Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Moment = Annotated[float, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(pattern="^[a-z][a-z0-9-]*$")]

Kind = Literal[
    "kill", "stop", "cut", "partition", "shape", "drop", "fill_disk", "power_cut", "restart",
    "rolling",
]  # fmt: skip
Effect = Literal["miss", "slow", "dropped", "ended", "none"]
Value = str | int | float | bool

_EFFECTS: dict[str, Effect] = {
    "shape": "slow",
    "drop": "dropped",
    "power_cut": "ended",
    "restart": "ended",
}


class Length(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long the load runs: in CI, and in full.

    The faults are repeated every `round` (`short`, where it is not given); of a run that is
    shorter than one, those are left out that do not fit.
    """

    short: Seconds
    full: Seconds
    round: Seconds | None = None


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the pages hold; a content number is `unit` slots, whatever a pool's page size."""

    layers: Positive = 4
    heads: Positive = 4
    head_dim: Positive = 64
    v_head_dim: Count = 32
    dtype: str = "int16"
    unit: Positive = 16

    @property
    def number_nbytes(self) -> int:
        """Bytes of one content number, over all layers and heads."""
        width = self.head_dim + self.v_head_dim
        return self.unit * self.layers * self.heads * width * itemsize_of(self.dtype)


class ServiceSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server, or a part of a store, on a host. `of` names the service that it belongs to."""

    name: Name
    kind: str
    host: Count = 0
    of: str = ""
    options: dict[str, Value] = {}


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor-parallel group whose ranks load from and store to one store.

    `hosts` holds one host for all ranks, or one for each. With `spread`, hosts beyond those of
    the scenario get a copy each. `warm` of the `universe` pages are stored before the load
    begins (None: all of them), the others are new to the store when they are drawn.
    """

    name: Name
    hosts: tuple[Count, ...]
    tp: Positive = 1
    layout: str = "page_head"
    object_layout: str | None = None
    store: str
    options: dict[str, Value] = {}
    roles: tuple[Literal["write", "read"], ...] = ("write", "read")
    pages: Positive = 64
    batch: Positive = 8
    pause: Moment = 0.0
    first: Count = 0
    universe: Positive = 64
    warm: Count | None = None
    deadline: Seconds = 3.0
    grace: Seconds = 1.5
    spread: bool = False

    def host_of(self, rank: int) -> int:
        """Return the host of one rank."""
        return self.hosts[rank % len(self.hosts)]


class SideSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prefill or the decode side of a pair, its ranks on one host or on one each."""

    hosts: tuple[Count, ...]
    tp: Positive = 1
    layout: str = "page_head"
    page_size: Positive = 16
    pages: Positive = 96

    def host_of(self, rank: int) -> int:
        """Return the host of one rank."""
        return self.hosts[rank % len(self.hosts)]


class PairSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prefill and a decode fleet; a request moves `batch` content numbers from one to the other.

    `flight` requests are under way at a time. `endpoint` are options of both ends.
    """

    name: Name
    transport: str
    prefill: SideSpec
    decode: SideSpec
    batch: Positive = 24
    flight: Positive = 1
    pause: Moment = 0.02
    deadline: Seconds = 4.0
    grace: Seconds = 1.5
    step: Count = 0
    way: Literal["push", "pull"] = "push"
    checksum: bool = True
    connect: Seconds = 1.0
    endpoint: dict[str, str | int | float] = {}


class FaultSpec(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={"seconds": "for"},
):
    """What breaks, when, for how long, and by what one must be able to tell that it did.

    Its targets are `hosts`, or services or workers by name. `effect`: some call misses, calls
    are slow, packets are dropped, processes end, or nothing shows. `recover` and `detect` take
    the place of the scenario's limits.
    """

    kind: Kind
    at: Moment
    seconds: Moment = 0.0
    hosts: tuple[Count, ...] = ()
    peers: tuple[Count, ...] = ()
    services: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    groups: tuple[tuple[Count, ...], ...] = ()
    rate: str | None = None
    percent: float | None = None
    leave: Count = 0
    effect: Effect | None = None
    recover: Seconds | None = None
    detect: Seconds | None = None

    @property
    def shows(self) -> Effect:
        """By what it must be seen, where the file does not say."""
        return self.effect or _EFFECTS.get(self.kind, "miss")


class RandomSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults drawn by seed, one after the other, 2 s and then `every` in the mean apart.

    None is left in the last `quiet` seconds.

    Each entry of `faults` is a fault as in the list, but its `at` is drawn, and its `for` lies
    between half of what it says and all of it.
    """

    every: Seconds
    quiet: Seconds
    faults: tuple[FaultSpec, ...]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must hold beyond what always must. Growth is per process, from warm-up to the end.

    `lost`: "none", every acknowledged page is there at the end; "volatile", but for those last
    acknowledged before a fault ended a process that kept them, or filled the disk that they are
    on; "any", nothing is promised.
    `damage`: the scenario changes bytes, so that checksums may disagree.
    """

    recover: Seconds = 10.0
    detect: Seconds = 10.0
    lost: Literal["none", "volatile", "any"] = "none"
    damage: bool = False
    calls: Count = 20
    pages: Count = 20
    files: Count = 8
    threads: Count = 8
    rss_mib: Positive = 96
    start: Seconds = 60.0
    settle: Seconds = 10.0
    quit: Seconds = 20.0


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of the catalogue. `disk_mib` is each host's disk, `rate` its link's."""

    name: Name
    about: str
    hosts: Positive
    most: Positive = 8
    disk_mib: Positive = 256
    rate: str | None = None
    seconds: Length
    model: Model = Model()
    services: tuple[ServiceSpec, ...] = ()
    groups: tuple[GroupSpec, ...] = ()
    pairs: tuple[PairSpec, ...] = ()
    faults: tuple[FaultSpec, ...] = ()
    random: RandomSpec | None = None
    limits: Limits = Limits()
