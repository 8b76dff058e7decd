"""Which pages a group was told are stored, and when: what must be there at the end.

A page is acknowledged once every rank of the group has been told so of its own part; each rank's
last word counts, as a later one says that the page was still, or again, there. Such a word is true
of some moment of the call that brought it: what happened meanwhile may have undone it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvconnect.testing.cluster.events import Call
from kvconnect.testing.cluster.journal import Entry, Heard, Member


class Told(NamedTuple):
    """Seconds of the run in which a call went on that acknowledged a page to one rank."""

    began: float
    ended: float

    def within(self, first: float, last: float) -> bool:
        """Tell whether any moment of it lies in [first, last]."""
        return self.began <= last and self.ended >= first


class Ledger:
    """The acknowledgements of a run, by group."""

    def __init__(self, members: Iterable[Member], entries: Iterable[Entry]) -> None:
        """Read them out of what the ranks told; transfers between ranks store nothing."""
        self._members = {member.name: member for member in members}
        self._said: dict[str, dict[int, dict[str, Told]]] = {}
        for entry in entries:
            if isinstance(entry, Heard) and isinstance(entry.event, Call):
                self._take(entry, entry.event)

    def _take(self, heard: Heard, call: Call) -> None:
        member = self._members.get(heard.worker)
        if member is None or not member.store or not call.acked:
            return
        pages = self._said.setdefault(member.group, {})
        for page in call.acked:
            pages.setdefault(page, {})[member.name] = Told(heard.at - call.seconds, heard.at)

    @property
    def groups(self) -> list[str]:
        """The groups that were told of any page."""
        return sorted(self._said)

    def acknowledged(self, group: str) -> Mapping[int, tuple[Told, ...]]:
        """Return the pages of a group of which all its ranks were told, with their last words."""
        size = next((m.size for m in self._members.values() if m.group == group), 1)
        return {
            page: tuple(ranks.values())
            for page, ranks in sorted(self._said.get(group, {}).items())
            if len(ranks) == size
        }
