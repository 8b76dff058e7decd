"""Page results, joint prefixes and joint lengths, against definitions written out plainly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.backend import Outcome, Status
from kvconnect.outcome import Hits, joint_length, joint_prefix, page_outcome, page_status, spread

OBJECT = [s for s in Status if s not in {Status.PARTIAL, Status.NOT_WRITER}]
rows = st.integers(1, 4).flatmap(
    lambda per_page: st.lists(
        st.lists(st.sampled_from(OBJECT), min_size=per_page, max_size=per_page), max_size=5
    ).map(lambda pages: (per_page, pages))
)
steady = settings(deadline=None)


def flat(pages):
    return np.array([s for page in pages for s in page], dtype=np.uint8)


@steady
@given(rows)
def test_a_page_is_ok_only_if_every_object_is(drawn):
    per_page, pages = drawn
    for page, got in zip(pages, page_status(flat(pages), per_page), strict=True):
        kinds = set(page)
        if len(kinds) == 1:
            assert got == page[0]
        elif kinds == {Status.OK, Status.ABSENT}:
            assert got == Status.PARTIAL
        else:
            assert got == max(kinds - {Status.OK, Status.ABSENT})
        assert (got == Status.OK) == (kinds == {Status.OK})


@steady
@given(rows, st.data())
def test_bytes_causes_and_dirt_of_a_page(drawn, data):
    per_page, pages = drawn
    objects = flat(pages)
    flags = data.draw(st.lists(st.booleans(), min_size=len(objects), max_size=len(objects)))
    causes = {at: f"cause {at}" for at in range(len(objects)) if data.draw(st.booleans())}
    outcome = page_outcome(objects, causes, per_page, 384, np.array(flags, dtype=bool))
    good = [all(s == Status.OK for s in page) for page in pages]
    assert outcome.ok.tolist() == good
    assert outcome.nbytes == 384 * sum(good)
    for number, page in enumerate(pages):
        mine = range(number * per_page, (number + 1) * per_page)
        assert outcome.dirty[number] == (not good[number] and any(flags[at] for at in mine))
        said = [causes[at] for at in mine if at in causes and objects[at] != Status.OK]
        if said:
            assert outcome.causes[number] == said[0]
        elif set(page) == {Status.OK, Status.ABSENT}:
            missing = page.count(Status.ABSENT)
            assert outcome.causes[number] == f"{missing} of {per_page} objects are absent"
        else:
            assert number not in outcome.causes
    assert page_outcome(objects, causes, per_page, 384, None).dirty is None


@steady
@given(st.lists(st.booleans(), max_size=8))
def test_a_prefix_ends_at_the_first_hole(pages):
    hits = Hits(np.array(pages, dtype=bool))
    assert len(hits) == len(pages)
    assert hits.prefix == next((n for n, page in enumerate(pages) if not page), len(pages))


@steady
@given(
    st.integers(0, 6).flatmap(
        lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=1, max_size=4)
    )
)
def test_a_joint_prefix_is_served_by_every_rank_and_none_longer_is(ranks):
    found = joint_prefix([np.array(rank, dtype=bool) for rank in ranks])
    assert all(all(rank[:found]) for rank in ranks)
    if found < len(ranks[0]):
        assert not all(rank[found] for rank in ranks)


def test_one_rank_without_the_first_page_leaves_no_joint_prefix():
    """Case 9: TP 2, one rank stored and the other did not."""
    assert joint_prefix([np.array([True, True]), np.array([False, False])]) == 0
    assert joint_prefix([]) == 0


@steady
@given(st.lists(st.sets(st.integers(0, 9)), max_size=4))
def test_a_joint_length_is_legal_for_all_and_the_largest_such(legal):
    found = joint_length(legal)
    common = [n for n in range(10) if legal and all(n in lengths for lengths in legal)]
    assert found == (common[-1] if common else 0)


def test_the_minimum_of_the_maxima_would_not_be_legal():
    """sglang#39147: full attention restores 8 pages, SWA 4 or 8, Mamba only 0, 3 or 6."""
    pools = [range(9), [0, 4, 8], [0, 3, 6]]
    assert min(max(pool) for pool in pools) == 6
    assert joint_length(pools) == 0


@steady
@given(st.lists(st.sampled_from([None, *OBJECT]), max_size=6))
def test_spreading_keeps_every_page_in_its_place(wanted):
    """None is a page that another replica writes."""
    mine = np.array([status is not None for status in wanted], dtype=bool)
    moved = np.array([status for status in wanted if status is not None], dtype=np.uint8)
    causes = {n: f"of {s}" for n, s in enumerate(moved.tolist())}
    outcome = spread(Outcome(moved, 5, causes), mine)
    expected = [Status.NOT_WRITER if s is None else s for s in wanted]
    assert outcome.status.tolist() == expected
    assert outcome.nbytes == 5
    assert outcome.causes == {n: f"of {int(s)}" for n, s in enumerate(wanted) if s is not None}


def test_the_repr_says_hits_and_prefix():
    assert repr(Hits(np.array([True, False, True]))) == "Hits(2 of 3, prefix 1)"


@pytest.mark.parametrize("empty", [Hits(np.zeros(0, dtype=bool))])
def test_nothing_asked_is_nothing_found(empty):
    assert (empty.prefix, len(empty)) == (0, 0)
