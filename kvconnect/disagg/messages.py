"""Control messages: typed, bounded, versioned; anything else is refused before it is looked at.

A frame is one version byte and one msgpack envelope. The envelope names the generations of
sender and receiver, so that a message to or from an earlier start of a rank is recognised and
dropped. Page ids travel as packed int64; they are checked against the pool by whoever uses them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np

from kvconnect.disagg.cause import Cause
from kvconnect.disagg.sections import KV
from kvconnect.disagg.wire import MAX_SIDE_POOLS, Count, RegionData, SideData, SidePoolData, Text
from kvconnect.errors import ConfigError
from kvconnect.page_index import U64

VERSION = 3
MAX_FRAME_BYTES = 8 << 20
MAX_PAGES = 1 << 19
"""Of one request: as many as fit half a frame."""

Generation = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Reason = Annotated[str, msgspec.Meta(max_length=4000)]
Pages = Annotated[bytes, msgspec.Meta(max_length=8 * MAX_PAGES)]
LayerRange = tuple[Count, Count]
PoolName = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
"""`KV` for the anchor, else the name of a side pool."""


class Hello(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Who a rank is: sent first by the decode side, and answered in kind."""

    role: Literal["prefill", "decode"]
    name: Text
    fleet: Text
    """The instance of the engine; its ranks send the same."""
    ranks: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    """Ranks of that instance."""
    identity: Annotated[bytes, msgspec.Meta(max_length=1 << 16)]
    side: SideData
    transport: Text
    metadata: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
    staging: RegionData
    """Where packed pieces may be put, in slots of `slot_bytes`."""
    slot_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
    side_pools: Annotated[tuple[SidePoolData, ...], msgspec.Meta(max_length=MAX_SIDE_POOLS)] = ()
    """`identity` and `side` are those of the KV."""


class Refused(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The receiver will not talk to the sender, and why.

    `start`: the generation of the receiver that the message was for; empty where it answers a
    Hello, and then it is final.
    """

    reason: Reason
    start: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{32})?$")] = ""


class SideGrant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Pages of a side pool, and how many of their slots will be filled."""

    pool: PoolName
    pages: Pages
    slots: Count


class Grant(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Decode to prefill: these pages of mine are for this request, for so many seconds.

    `slots` of them will be filled; `side` says the same of every side pool that the decode rank
    holds. `way`: who moves the bytes, as the prefill side sees it (push), or the decode side
    (pull).
    """

    request: RequestId
    pages: Pages
    slots: Count
    way: Literal["push", "pull"]
    seconds: Annotated[float, msgspec.Meta(gt=0, le=86400)]
    checksum: bool
    side: Annotated[tuple[SideGrant, ...], msgspec.Meta(max_length=MAX_SIDE_POOLS)] = ()


class Moved(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Prefill to decode: these layers of a pool have landed, `nbytes` of them, confirmed."""

    request: RequestId
    layers: LayerRange
    nbytes: Count
    checksum: Annotated[bytes, msgspec.Meta(max_length=16)] | None
    packed: bool = False
    """Whether they came in `Staged` slots, all of which were announced before."""
    pool: PoolName = KV


class Ready(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Prefill to decode, where the decode side pulls: these layers of a pool lie in these pages."""

    request: RequestId
    layers: LayerRange
    pages: Pages
    checksum: Annotated[bytes, msgspec.Meta(max_length=16)] | None
    pool: PoolName = KV


class Taken(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Decode to prefill: everything of this request was pulled; `nbytes` were confirmed.

    And back: until here the pages were surely the request's.
    """

    request: RequestId
    nbytes: Count


class Abort(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Either side: this request has failed; stop, and say `Quiet` when nothing moves."""

    request: RequestId
    reason: Reason
    cause: Cause = Cause.CANCELLED


class Quiet(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Either side: nothing of mine touches the other's pages of this request any more."""

    request: RequestId


class Want(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Prefill to decode: a job of mine could use so many of your staging slots."""

    claim: Count
    count: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]


class Lent(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Decode to prefill: this slot is that job's until it says `Staged` or `Back`."""

    claim: Count
    slot: Count


class Staged(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Prefill to decode: pieces [first, first + pieces) of some layers lie in a slot, packed."""

    request: RequestId
    layers: LayerRange
    first: Count
    pieces: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    slot: Count
    pool: PoolName = KV


class Back(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Prefill to decode: a slot was not needed; nothing of mine touches it any more."""

    slot: Count


class Ping(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """I am alive; `answer` asks for one back, which repeats the `number`.

    An answer names the staging `slots` of the other side that the sender has: what was lent to
    it before the question and is not among them was lost on the way, there or back.
    """

    answer: bool
    number: Count = 0
    slots: Annotated[tuple[Count, ...], msgspec.Meta(max_length=1 << 16)] = ()


Message = (
    Hello
    | Refused
    | Grant
    | Moved
    | Ready
    | Taken
    | Abort
    | Quiet
    | Want
    | Lent
    | Staged
    | Back
    | Ping
)


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message with the generations it goes from and to; `to` is empty in a first Hello."""

    sender: Generation
    to: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{32})?$")]
    message: Message


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(envelope: Envelope) -> bytes:
    """Return the frame of an envelope; `ConfigError` if it is larger than a peer would take."""
    frame = bytes([VERSION]) + _encoder.encode(envelope)
    if len(frame) > MAX_FRAME_BYTES:
        raise ConfigError(
            f"a control message of {len(frame)} B is larger than {MAX_FRAME_BYTES} B; split the "
            f"request into fewer pages"
        )
    return frame


def decode(frame: bytes) -> Envelope:
    """Return the envelope in a frame; `ConfigError` says what is wrong with it."""
    if not 1 < len(frame) <= MAX_FRAME_BYTES:
        raise ConfigError(
            f"a control message of {len(frame)} B; 2 to {MAX_FRAME_BYTES} B are taken"
        )
    if frame[0] != VERSION:
        raise ConfigError(f"control message of version {frame[0]}, this side speaks {VERSION}")
    try:
        return _decoder.decode(memoryview(frame)[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"control message cannot be read: {error}") from None


def pack_pages(pages: U64) -> bytes:
    """Pack page ids for a message."""
    if len(pages) > MAX_PAGES:
        raise ConfigError(f"{len(pages)} pages in one request; at most {MAX_PAGES} are taken")
    return pages.astype("<i8").tobytes()


def unpack_pages(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the page ids in a message, unchecked: (pages,) int64."""
    if len(data) % 8:
        raise ConfigError(f"packed page ids of {len(data)} B; they must be a multiple of 8 B")
    return np.frombuffer(data, dtype="<i8").astype(np.int64)
