"""The negative cache: vanished pages stay absent for a while, new ones are found at once."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect import negative
from kvconnect.negative import NegativeCache


class Clock:
    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_only_a_page_that_was_seen_can_vanish(clock):
    cache = NegativeCache(5.0, clock)
    cache.saw([b"a"])
    assert cache.vanished([b"a", b"b"]) == 1
    assert cache.known([b"a", b"b", b"c"]).tolist() == [True, False, False]


@pytest.mark.parametrize(("later", "known"), [(0, True), (4.9, True), (5.0, False), (9, False)])
def test_it_forgets_after_its_time(clock, later, known):
    cache = NegativeCache(5.0, clock)
    cache.saw([b"a"])
    cache.vanished([b"a"])
    clock.now += later
    assert cache.known([b"a"]).tolist() == [known]


def test_a_page_that_was_stored_again_is_found_at_once(clock):
    cache = NegativeCache(5.0, clock)
    cache.saw([b"a", b"b"])
    cache.vanished([b"a", b"b"])
    cache.forget([b"a", b"never"])
    assert cache.known([b"a", b"b"]).tolist() == [False, True]


def test_no_time_remembers_nothing(clock):
    cache = NegativeCache(0.0, clock)
    cache.saw([b"a"])
    cache.vanished([b"a"])
    assert not cache.known([b"a"]).any()


def test_it_is_bounded_and_drops_the_oldest(clock, monkeypatch):
    monkeypatch.setattr(negative, "MOST", 3)
    cache = NegativeCache(5.0, clock)
    pages = [bytes([n]) for n in range(6)]
    cache.saw(pages)
    assert cache.vanished(pages) == 3, "what was seen longest ago is forgotten"
    assert cache.known(pages).tolist() == [False] * 3 + [True] * 3
    for page in pages:
        cache.saw([page])
        cache.vanished([page])
    assert cache.known(pages).tolist() == [False] * 3 + [True] * 3


names = st.sampled_from([b"a", b"b", b"c"])
steps = st.one_of(
    st.tuples(st.sampled_from(["saw", "vanished", "forget"]), st.lists(names, max_size=2)),
    st.tuples(st.just("pass"), st.floats(0, 4)),
)


@settings(deadline=None)
@given(st.lists(steps, max_size=20))
def test_against_a_plain_model(done):
    """The model keeps every event of a page and reads the answer off the history."""
    clock, seen, until = Clock(), set(), {}
    cache = NegativeCache(5.0, clock)
    for what, value in done:
        if what == "pass":
            clock.now += value
            continue
        getattr(cache, what)(value)
        for page in value:
            if what == "saw":
                seen.add(page)
            elif what == "forget":
                until.pop(page, None)
            elif page in seen:
                seen.remove(page)
                until[page] = clock.now + 5.0
        expected = [until.get(page, 0) > clock.now for page in (b"a", b"b", b"c")]
        assert cache.known([b"a", b"b", b"c"]).tolist() == expected


def test_many_threads_leave_it_whole(clock):
    cache = NegativeCache(5.0, clock)
    counts = []

    def work(name):
        for round_ in range(300):
            page = f"{name}{round_}".encode()
            cache.saw([page])
            counts.append(cache.vanished([page]))
            assert cache.known([page]).all()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert counts == [1] * 1200
