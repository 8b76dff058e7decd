"""`FirstFit`: which parts of a buffer are out, for pools of registered memory.

Lowest first, so that memory that was touched is used again before new pages are.
"""

from __future__ import annotations

from bisect import bisect


class FirstFit:
    """Offsets into `nbytes`; whoever owns it sees to locking.

    Invariants: parts that are out are disjoint; holes are sorted, disjoint and never adjacent.
    `out`: bytes that are out now, `touched`: the highest end that ever was.

    >>> parts = FirstFit(8192)
    >>> parts.take(4096), parts.take(4096), parts.take(1)
    (0, 4096, None)
    """

    __slots__ = ("_holes", "out", "touched")

    def __init__(self, nbytes: int) -> None:
        """All of it is free."""
        self._holes = [(0, nbytes)] if nbytes else []
        self.out = self.touched = 0

    def take(self, nbytes: int) -> int | None:
        """Return the offset of `nbytes` that are now out; None where no hole is so large."""
        for at, (start, room) in enumerate(self._holes):
            if room >= nbytes:
                rest = [(start + nbytes, room - nbytes)] if room > nbytes else []
                self._holes[at : at + 1] = rest
                self.out += nbytes
                self.touched = max(self.touched, start + nbytes)
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Take a part back; `ValueError` if some of it was not out."""
        end, at = start + nbytes, bisect(self._holes, (start, 0))
        before = sum(self._holes[at - 1]) if at else -1
        after = self._holes[at][0] if at < len(self._holes) else end + 1
        if before > start or after < end:
            raise ValueError(f"{nbytes} B at {start} were given back already, or in part")
        self.out -= nbytes
        if after == end:
            end = sum(self._holes.pop(at))
        if before == start:
            start = self._holes.pop(at - 1)[0]
            at -= 1
        self._holes.insert(at, (start, end - start))
