"""Hit policies against loops that enumerate every length and look at every page it needs."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.engines.sglang.hits import (
    ALL_PAGES,
    BLOCK_GROUPS,
    TRAILING_PAGES,
    Side,
    all_pages,
    block_groups,
    joint,
    trailing_pages,
)
from kvconnect.errors import ConfigError
from kvconnect.outcome import joint_length

steady = settings(deadline=None, max_examples=300)
holes = st.lists(st.booleans(), max_size=24)
mostly = st.lists(st.sampled_from([True] * 7 + [False]), max_size=24)
presences = st.one_of(holes, mostly)


def bools(values):
    return np.array(values, dtype=np.bool_)


def legal(present, needed):
    """Return the lengths of which every page that `needed` names is present."""
    return [n for n in range(len(present) + 1) if all(present[page] for page in needed(n))]


def whole(length):
    return range(length)


def tail(window):
    return lambda length: range(max(0, length - window), length)


def leading(present):
    count = 0
    for here in present:
        if not here:
            break
        count += 1
    return count


def covered(present, block, group):
    """Walk block by block until the key of a group is missing or the block is cut short."""
    pages = 0
    while pages + block <= len(present):
        for page in range(pages + block - group, pages + block):
            if not present[page]:
                return pages
        pages += block
    return pages


def lengths_of(mask):
    return [length for length, fits in enumerate(mask) if fits]


@steady
@given(presences)
def test_all_pages_needs_every_page_of_a_prefix(present):
    assert lengths_of(all_pages(bools(present))) == legal(present, whole)


@steady
@given(presences, st.integers(1, 30))
def test_trailing_pages_needs_the_window_at_the_end_of_a_prefix(present, window):
    assert lengths_of(trailing_pages(bools(present), window)) == legal(present, tail(window))


@steady
@given(presences, st.integers(1, 6), st.data())
def test_block_groups_cover_whole_blocks_only(present, block, data):
    group = data.draw(st.integers(1, block))
    assert block_groups(bools(present), block, group) == covered(present, block, group)


@st.composite
def questions(draw):
    pages = draw(st.integers(0, 20))
    row = st.lists(st.sampled_from([True] * 5 + [False]), min_size=pages, max_size=pages)
    sides = []
    for number in range(draw(st.integers(0, 4))):
        policy = draw(st.sampled_from([ALL_PAGES, TRAILING_PAGES, BLOCK_GROUPS]))
        block = draw(st.integers(1, 5))
        sides.append(
            {
                "pool": f"pool{number}",
                "policy": policy,
                "present": draw(row),
                "window": draw(st.integers(1, 6)),
                "block_pages": block,
                "group_pages": draw(st.integers(1, block)),
            }
        )
    return draw(row), sides


@steady
@given(questions())
def test_the_joint_answer_is_what_every_pool_allows(drawn):
    """The answer of an enumeration: each length, each pool, each page it needs."""
    kv, sides = drawn
    pages = leading(kv)
    sets, verdicts = [set(range(1, pages + 1))], {}
    for side in sides:
        if side["policy"] == BLOCK_GROUPS:
            verdicts[side["pool"]] = covered(
                side["present"], side["block_pages"], side["group_pages"]
            )
            continue
        needed = whole if side["policy"] == ALL_PAGES else tail(side["window"])
        allowed = [n for n in legal(side["present"], needed) if n <= pages]
        sets.append(set(allowed))
        verdicts[side["pool"]] = max(allowed)
    found = joint(bools(kv), [Side(**side | {"present": bools(side["present"])}) for side in sides])
    assert found.lengths == sorted(set.intersection(*sets) - {0})
    assert found.kv_hit_pages == joint_length(sets)
    assert found.pools == verdicts
    assert {type(n) for n in found.lengths} <= {int}


def test_the_minimum_of_maxima_is_not_the_answer():
    """KV allows 4, the window 4 and 2, another window 3 and 2: only 2 is legal for all."""
    kv = bools([True] * 4)
    first = Side("mamba", TRAILING_PAGES, bools([False, True, False, True]), window=1)
    second = Side("swa", TRAILING_PAGES, bools([True, True, True, False]), window=2)
    found = joint(kv, [first, second])
    assert (found.kv_hit_pages, found.lengths) == (2, [2])
    assert found.pools == {"mamba": 4, "swa": 3}


def test_nothing_is_legal_but_length_0_without_kv():
    side = Side("index", ALL_PAGES, bools([True, True]))
    found = joint(bools([False, True]), [side])
    assert (found.kv_hit_pages, found.lengths, found.pools) == (0, [], {"index": 0})
    assert joint(bools([]), []).lengths == []


def test_block_groups_look_beyond_what_kv_has():
    """They are a form of the pages of their own: KV that is missing does not hide them."""
    groups = Side("c4", BLOCK_GROUPS, bools([True] * 6), block_pages=2, group_pages=2)
    found = joint(bools([True, False] + [True] * 4), [groups])
    assert (found.kv_hit_pages, found.lengths, found.pools) == (1, [1], {"c4": 6})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"policy": "some_pages"}, "some_pages"),
        ({"policy": TRAILING_PAGES, "window": 0}, "window of 0"),
        ({"policy": BLOCK_GROUPS}, "groups of 0 keys in blocks of 0"),
        ({"policy": BLOCK_GROUPS, "block_pages": 2, "group_pages": 3}, "groups of 3 keys"),
        ({"policy": BLOCK_GROUPS, "block_pages": 2, "group_pages": 0}, "groups of 0 keys"),
    ],
)
def test_a_geometry_that_cannot_be_is_refused(wrong, words):
    with pytest.raises(ConfigError, match=words):
        Side("odd", present=bools([True]), **wrong)


def test_presence_shorter_than_kv_is_refused():
    with pytest.raises(ConfigError, match="presence of 1 pages, KV has 2"):
        joint(bools([True, True]), [Side("swa", ALL_PAGES, bools([True]))])


def test_thousands_of_pages_take_no_time():
    """32768 pages and three pools: well under the 0.25 s of a loop over pages and windows."""
    source = np.random.default_rng(1)
    kv = np.ones(32768, dtype=np.bool_)
    sides = [
        Side("swa", TRAILING_PAGES, source.random(len(kv)) < 0.99, window=128),
        Side("index", ALL_PAGES, kv.copy()),
        Side("c4", BLOCK_GROUPS, kv.copy(), block_pages=4, group_pages=2),
    ]
    best = float("inf")
    for _ in range(5):
        started = time.thread_time()
        found = joint(kv, sides)
        best = min(best, time.thread_time() - started)
    assert found.kv_hit_pages > 0
    assert best < 0.05, f"{best * 1e3:.1f} ms"
