"""Copies of many runs against one copy after the other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.errors import LayoutError, RegistrationError
from kvconnect.region import Region
from kvconnect.run_copy import copy_runs

NBYTES = 4096


def area(seed):
    """Two regions of random bytes, and where they begin."""
    arrays = [
        np.random.default_rng(seed + i).integers(0, 256, NBYTES, dtype=np.uint8) for i in (0, 1)
    ]
    return arrays, [Region(str(i), a.ctypes.data, NBYTES) for i, a in enumerate(arrays)]


def check(runs):
    """Copy runs of (source region, offset, target region, offset, bytes) and compare it all."""
    (sources, from_), (targets, to) = area(1), area(5)
    expected = [target.copy() for target in targets]
    for a, at, b, there, n in runs:
        expected[b][there : there + n] = sources[a][at : at + n]
    column = [np.array(c, dtype=np.uint64) for c in zip(*runs, strict=True)]
    begins = [np.array([r.address for r in rs], dtype=np.uint64) for rs in (from_, to)]
    copy_runs(
        begins[0][column[0].astype(int)] + column[1], from_,
        begins[1][column[2].astype(int)] + column[3], to, column[4],
    )  # fmt: skip
    assert all(np.array_equal(t, e) for t, e in zip(targets, expected, strict=True))


@st.composite
def loops(draw):
    """Stretches of runs at equal steps, either way, between any regions; targets apart."""
    runs, free = [], [0, 0]
    for _ in range(draw(st.integers(1, 6))):
        n, count = draw(st.sampled_from([1, 2, 4, 8, 24, 64])), draw(st.integers(1, 12))
        a, b = draw(st.integers(0, 1)), draw(st.integers(0, 1))
        gap = draw(st.integers(0, 9))
        if free[b] + count * (n + gap) > NBYTES:
            continue
        places = [free[b] + i * (n + gap) for i in range(count)]
        free[b] += count * (n + gap)
        if draw(st.booleans()):
            places.reverse()
        step = draw(st.integers(0, (NBYTES - n) // count))
        start = draw(st.integers(0, NBYTES - n - step * (count - 1)))
        runs += [(a, start + i * step, b, place, n) for i, place in enumerate(places)]
    return runs


@given(loops().filter(bool), st.randoms())
@settings(max_examples=300)
def test_every_run_lands_where_it_should_and_nothing_else_changes(runs, random):
    check(runs)
    random.shuffle(runs)
    check(runs)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_few_runs(count):
    check([(0, 40 * i, 1, 56 * i, 8) for i in range(count)] or [(0, 0, 0, 0, 0)])


def test_a_run_outside_and_memory_elsewhere_are_refused():
    (_, from_), (targets, to) = area(1), area(5)
    before = [target.copy() for target in targets]
    size = np.array([8], dtype=np.uint64)
    at, beyond = (np.array([r], dtype=np.uint64) for r in (from_[0].address, to[1].end - 7))
    with pytest.raises(RegistrationError, match="outside"):
        copy_runs(at, from_, beyond, to, size)
    far = [Region(r.name, r.address, r.nbytes, "cuda:0") for r in to]
    with pytest.raises(LayoutError, match="only host memory"):
        copy_runs(at, from_, at * 0 + np.uint64(to[0].address), far, size)
    assert all(np.array_equal(t, b) for t, b in zip(targets, before, strict=True))
