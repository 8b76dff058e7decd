"""What the processes of the P/D demo are told, and what they say: plain values, JSON lines."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from kvconnect.cli.model_config import chunk_bounds
from kvconnect.cli.model_job import ModelJob
from kvconnect.errors import ConfigError
from kvconnect.placement import Placement, Span

CHUNK_TOKENS = 128
KEYS, TOKEN = "keys", "token"
"""Files in the run's directory: the fleet's key pair, and what the directory asks for."""

Role = Literal["prefill", "decode"]


class Job(ModelJob, frozen=True, kw_only=True):
    """One run: model and prompt, and the shapes of both sides."""

    scratch: str
    """A directory of this run: keys, and where the ranks of a side find each other."""
    layout_prefill: str
    layout_decode: str
    page_size_prefill: int
    page_size_decode: int
    prefill_tp: int
    decode_tp: int
    pp_prefill: int
    transport: str
    stage: Literal["auto", "always", "never"]
    timeout: float
    """Seconds for the whole run; every wait of every process ends before."""
    tamper: bool = False
    directory: str = ""
    """URL of the directory where decode ranks find prefill ranks; "": they are told addresses."""

    def bounds(self, tokens: int) -> list[int]:
        """Return where prefill chunks begin and end; the same on all sides."""
        size = self.page_size_prefill
        return chunk_bounds(tokens, size, max(CHUNK_TOKENS // size, 1))

    def slots(self, tokens: int) -> int:
        """Return the slots that move: whole pieces of both page sizes."""
        piece = math.gcd(self.page_size_prefill, self.page_size_decode)
        return -(-tokens // piece) * piece

    def page_size(self, role: Role) -> int:
        """Return the slots of a page of one side."""
        return self.page_size_prefill if role == "prefill" else self.page_size_decode

    def pages(self, role: Role, tokens: int) -> int:
        """Return the pages of the prompt on one side."""
        return -(-self.slots(tokens) // self.page_size(role))

    def layout(self, role: Role) -> str:
        """Return the name of the pool layout of one side."""
        return self.layout_prefill if role == "prefill" else self.layout_decode

    def ranks(self, role: Role) -> int:
        """Return how many ranks one side has."""
        return self.prefill_tp * self.pp_prefill if role == "prefill" else self.decode_tp

    def tp(self, role: Role) -> int:
        """Return the TP size of one side."""
        return self.prefill_tp if role == "prefill" else self.decode_tp

    def placement(self, role: Role, number: int) -> Placement:
        """Return what a rank holds; PP stages follow one another, all TP ranks of one first."""
        stages = self.pp_prefill if role == "prefill" else 1
        stage, rank = divmod(number, self.tp(role))
        layers = Span(
            self.layers * stage // stages, self.layers * (stage + 1) // stages, self.layers
        )
        heads = self.config().kv_heads
        return Placement.tensor_parallel(layers=layers, heads=heads, rank=rank, size=self.tp(role))


def job_of(**values: Any) -> Job:
    """Build a job; `ConfigError` names a value that is none of its choices."""
    try:
        return msgspec.convert(values, Job)
    except msgspec.ValidationError as error:
        raise ConfigError(f"pd-demo: {error}") from None


class Listening(msgspec.Struct, frozen=True, tag=True):
    """A prefill rank, or the directory, can be found."""

    address: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A rank waits for the start."""

    pool_nbytes: int


class Moved(msgspec.Struct, frozen=True, tag=True):
    """A prefill rank has pushed some layers to a decode rank."""

    target: str
    layers: tuple[int, int]
    nbytes: int
    seconds: float
    packed: bool
    why: str
    failure: str


class Token(msgspec.Struct, frozen=True, tag=True):
    """A token, so many seconds after the start."""

    value: int
    seconds: float


class Computed(msgspec.Struct, frozen=True, tag=True):
    """A prefill rank has computed a layer."""

    layer: int
    seconds: float


class Held(msgspec.Struct, frozen=True, tag=True):
    """A decode rank holds the whole prompt: what it was told, and a digest of K and V."""

    seconds: float
    nbytes: int
    digest: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """How a rank's request ended, and that nothing touches its pages."""

    state: str
    reason: str
    nbytes: int
    quiet: bool


class Single(msgspec.Struct, frozen=True, tag=True):
    """What one process doing both got: tokens, and the digests that decode ranks must report."""

    tokens: list[int]
    digests: list[str]
    first_token: float


Event = Listening | Ready | Moved | Token | Computed | Held | Ended | Single


class Addresses(msgspec.Struct, frozen=True, tag=True):
    """To decode ranks: where the prefill ranks are."""

    addresses: list[str]


class Go(msgspec.Struct, frozen=True, tag=True):
    """To all: start now."""


class First(msgspec.Struct, frozen=True, tag=True):
    """To decode ranks: the token that the prefill side decoded."""

    value: int


class Bye(msgspec.Struct, frozen=True, tag=True):
    """To all: every rank has ended its work; close."""


Order = Addresses | Go | First | Bye
