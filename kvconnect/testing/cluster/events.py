"""What workers tell the runner: one JSON line an event, the only thing that invariants see.

Times are seconds of the worker's own `time.monotonic()`; the runner adds when it received the
line, by its own clock, so that hosts need no common clock for what is judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, TypeVar

import msgspec

from kvconnect.errors import ConfigError

Order = TypeVar("Order")


class Call(msgspec.Struct, frozen=True, kw_only=True, tag="call", forbid_unknown_fields=True):
    """One call of the load, ended.

    `acked` are page ids that the store acknowledged as stored (all objects OK), `hits` those
    that were read back and compared equal to the oracle, `wrong` those that were handed out with
    any wrong byte, `reused` those whose memory changed after it was given to somebody else.
    `misses` counts the others by reason (a `Status` name, or a request's final state).
    `nbytes` is what was moved for `acked` or `hits`, on this rank.
    """

    op: str  # "store", "load", "exists", "transfer"
    worker: str
    number: int  # ascending in one worker, from 0 at each start of the process
    started: float
    seconds: float
    deadline: float  # seconds the call was given
    asked: int  # pages
    acked: tuple[int, ...] = ()
    hits: tuple[int, ...] = ()
    wrong: tuple[int, ...] = ()
    reused: tuple[int, ...] = ()
    misses: dict[str, int] = msgspec.field(default_factory=dict)
    nbytes: int = 0
    request: str = ""  # of a transfer
    error: str = ""  # "Type: words" when the call raised; the type of a bug, never of a fault


class State(msgspec.Struct, frozen=True, kw_only=True, tag="state", forbid_unknown_fields=True):
    """What a worker holds: compared with its own at the start."""

    worker: str
    at: float
    fds: int
    threads: int
    rss: int  # bytes
    quarantined: int = 0  # bytes
    stats: dict[str, float] = msgspec.field(default_factory=dict)


class Said(msgspec.Struct, frozen=True, kw_only=True, tag="said", forbid_unknown_fields=True):
    """An answer to a command: `number` is the command's; `error` is empty when it was done."""

    number: int
    value: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""


Event = Call | State | Said


class Command(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the runner asks of a worker: a word of its own and arguments by name."""

    number: int
    word: str
    arguments: dict[str, object] = msgspec.field(default_factory=dict)


def order_among(words: Mapping[str, type[Order]], command: Command) -> Order:
    """Return what a command asks for; `ConfigError` names a word or argument that is unknown."""
    kind = words.get(command.word)
    if kind is None:
        raise ConfigError(f"word is {command.word!r}; it must be one of {', '.join(words)}")
    try:
        return msgspec.convert(command.arguments, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{command.word}: {error}") from None


class Lines:
    """Events and commands as lines of JSON."""

    _encoder: ClassVar[msgspec.json.Encoder] = msgspec.json.Encoder()
    _events: ClassVar[msgspec.json.Decoder[Event]] = msgspec.json.Decoder(Event)
    _commands: ClassVar[msgspec.json.Decoder[Command]] = msgspec.json.Decoder(Command)

    @classmethod
    def write(cls, message: Event | Command) -> str:
        """Return one line, without its end."""
        return cls._encoder.encode(message).decode()

    @classmethod
    def event(cls, line: str) -> Event:
        """Parse a worker's line; `msgspec.ValidationError` or `DecodeError` if it is none."""
        return cls._events.decode(line)

    @classmethod
    def command(cls, line: str) -> Command:
        """Parse a runner's line."""
        return cls._commands.decode(line)
