"""Mooncake's numbers become our statuses and errors here and nowhere else."""

from __future__ import annotations

import enum

from kvconnect.backend import Status


class Code(enum.IntEnum):
    """Return codes of the store; counts of bytes are not negative."""

    NO_SPACE = -200
    REFUSED = -600
    NOT_OURS = -601
    NO_MEMORY_REPLICA = -702
    NOT_READY = -703
    ABSENT = -704
    EXISTS = -705
    LEASED = -706
    LEASE_EXPIRED = -707
    TRANSFER = -800
    CHECKSUM = -801
    RPC_FAILED = -900
    RPC_TIMEOUT = -901
    NO_OFFLOAD = -1300
    QUOTA = -1700
    NO_TENANT = -1701


_WORDS = {
    Code.NO_SPACE: "no space in any segment",
    Code.REFUSED: "refused: a wrong argument, or memory that is not registered",
    Code.NOT_OURS: "the put was given up by the master",
    Code.NO_MEMORY_REPLICA: "no replica in memory",
    Code.NOT_READY: "not complete",
    Code.ABSENT: "absent",
    Code.EXISTS: "another writer has it open",
    Code.LEASED: "leased to a reader",
    Code.LEASE_EXPIRED: "the lease ran out during the transfer",
    Code.TRANSFER: "the transfer failed",
    Code.CHECKSUM: "Mooncake's own checksum does not agree",
    Code.RPC_FAILED: "the master cannot be reached",
    Code.RPC_TIMEOUT: "the master does not answer",
    Code.NO_OFFLOAD: "ssd= is given, and the master runs without --enable_offload=true",
    Code.QUOTA: "the tenant's quota is used up",
    Code.NO_TENANT: "the master does not know the tenant",
}
_STATUS = {
    Code.NO_SPACE: Status.NO_SPACE,
    Code.QUOTA: Status.NO_SPACE,
    Code.ABSENT: Status.ABSENT,
    Code.NOT_READY: Status.ABSENT,
    Code.LEASE_EXPIRED: Status.LEASE_EXPIRED,
    Code.CHECKSUM: Status.CHECKSUM,
}

NOT_MADE = -(1 << 20)
"""No code of the library's: the call was not made, as no entries were free in time."""
LOST_MASTER = frozenset({Code.RPC_FAILED, Code.RPC_TIMEOUT})
SETTLED = frozenset({*map(int, Code), NOT_MADE}) - {Code.TRANSFER}
"""Codes after which the library moves no more bytes of that key."""


def words(code: int) -> str:
    """Say what a code means.

    >>> words(-706), words(-5)
    ('leased to a reader (-706)', 'unknown code (-5)')
    """
    known = _WORDS.get(Code(code)) if code in _KNOWN else None
    return f"{known or 'unknown code'} ({code})"


def status_of(code: int) -> Status:
    """Return the status that stands for a code of one key."""
    return _STATUS.get(Code(code), Status.BACKEND_ERROR) if code in _KNOWN else Status.BACKEND_ERROR


_KNOWN = {int(code) for code in Code}
