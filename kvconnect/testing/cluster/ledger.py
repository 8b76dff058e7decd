"""Which pages a group was told are stored, and when: what must be there at the end.

A page is acknowledged once every rank of the group has been told so of its own part; each rank's
last word counts, as a later one says that the page was still, or again, there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvconnect.testing.cluster.events import Call
from kvconnect.testing.cluster.journal import Entry, Heard, Member


class Ledger:
    """The acknowledgements of a run, by group."""

    def __init__(self, members: Iterable[Member], entries: Iterable[Entry]) -> None:
        """Read them out of what the ranks told; transfers between ranks store nothing."""
        self._members = {member.name: member for member in members}
        self._said: dict[str, dict[int, dict[str, float]]] = {}
        for entry in entries:
            if isinstance(entry, Heard) and isinstance(entry.event, Call):
                self._take(entry, entry.event)

    def _take(self, heard: Heard, call: Call) -> None:
        member = self._members.get(heard.worker)
        if member is None or not member.store or not call.acked:
            return
        pages = self._said.setdefault(member.group, {})
        for page in call.acked:
            pages.setdefault(page, {})[member.name] = heard.at

    @property
    def groups(self) -> list[str]:
        """The groups that were told of any page."""
        return sorted(self._said)

    def acknowledged(self, group: str) -> Mapping[int, float]:
        """Return the pages of a group, and since when all its ranks have known of each."""
        size = next((m.size for m in self._members.values() if m.group == group), 1)
        return {
            page: min(ranks.values())
            for page, ranks in sorted(self._said.get(group, {}).items())
            if len(ranks) == size
        }
