"""The parts of a buffer, against a plain list of bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.first_fit import FirstFit

SIZE = 24


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_parts_are_disjoint_lowest_first_and_come_back(steps):
    parts, taken, used = FirstFit(SIZE), [], [False] * SIZE
    most = 0
    for take, number in steps:
        if take:
            free = (at for at in range(SIZE - number + 1) if not any(used[at : at + number]))
            want = next(free, None)
            assert parts.take(number) == want
            if want is not None:
                taken.append((want, number))
                used[want : want + number] = [True] * number
                most = max(most, want + number)
        elif taken:
            start, length = taken.pop(number % len(taken))
            parts.give(start, length)
            used[start : start + length] = [False] * length
        assert (parts.out, parts.touched) == (sum(used), most)
    for one in taken:
        parts.give(*one)
    assert parts.take(SIZE) == 0


@pytest.mark.parametrize("part", [(0, 4), (2, 4), (6, 4), (8, 8), (1, 1), (0, 16)])
def test_what_is_not_out_cannot_be_given_back(part):
    parts = FirstFit(16)
    for _ in range(4):
        parts.take(4)
    parts.give(0, 4)
    parts.give(8, 4)
    with pytest.raises(ValueError, match="already"):
        parts.give(*part)


def test_nothing_holds_nothing():
    assert FirstFit(0).take(1) is None
