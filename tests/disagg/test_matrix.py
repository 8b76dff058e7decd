"""The whole matrix of shapes between endpoints, over shared memory."""

import pytest

from tests.disagg.matrix import LAYOUTS, SIZES, STAGES, Fleetful, check, everything

CASES = everything()


@pytest.fixture(scope="module")
def transports():
    fleetful = Fleetful("shm")
    yield fleetful
    fleetful.close()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_matrix(transports, case):
    check(transports, case)


def test_the_matrix_has_what_it_says():
    """Every pair of TP sizes and of layouts, MLA, stages that differ, 16 and 64, K unlike V."""
    sides = [(case.prefill, case.decode) for case in CASES]
    assert {(a.tp, b.tp) for a, b in sides} == {(p, d) for p in SIZES for d in SIZES}
    assert {(a.layout, b.layout) for a, b in sides} == {(a, b) for a in LAYOUTS for b in LAYOUTS}
    assert {a.heads for a, _ in sides} >= {1, 2, 4, 8}
    assert {(a.stages, b.stages) for a, b in sides} >= set(STAGES)
    assert {(a.page_size, b.page_size) for a, b in sides} >= {(16, 64), (64, 16), (4, 8), (4, 2)}
    assert {a.dims for a, _ in sides} >= {(192, 128), (8, None), (6, 4), (24, 0)}
