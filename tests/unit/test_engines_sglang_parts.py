"""The small parts of the SGLang adapter: duplicate keys, log lines, rates."""

import logging
import threading

from hypothesis import given
from hypothesis import strategies as st

from kvconnect.engines.sglang.duplicates import rounds_of
from kvconnect.engines.sglang.notices import EVERY, Notices
from kvconnect.engines.sglang.rates import GB, MOST, Rates

CALLS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 5)), max_size=12)


@given(CALLS, st.booleans())
def test_rounds_name_every_key_once_and_miss_nothing(call, every_page):
    keys, pages = [k for k, _ in call], [p for _, p in call]
    found = rounds_of(keys, pages, every_page=every_page)
    places = [place for part in found.rounds for place in part]
    assert sorted([*places, *found.same_as]) == list(range(len(call)))
    for part in found.rounds:
        assert len({keys[place] for place in part}) == len(part)
    for place, earlier in found.same_as.items():
        assert earlier in places
        assert keys[place] == keys[earlier]
        assert not every_page or pages[place] == pages[earlier]
    if not every_page:
        assert len(found.rounds) <= 1


@given(st.lists(st.sampled_from("abcdefgh"), unique=True))
def test_distinct_keys_are_one_round(keys):
    found = rounds_of(keys, range(len(keys)), every_page=True)
    assert [list(part) for part in found.rounds] == ([list(range(len(keys)))] if keys else [])
    assert not found.same_as


def test_a_kind_is_said_at_once_and_then_counted(caplog):
    now = [100.0]
    notices = Notices("pool kv", clock=lambda: now[0])
    for _ in range(5):
        notices.say("late", "two pages")
        notices.say("other", "something else")
        now[0] += EVERY / 10
    assert len(caplog.messages) == 2
    now[0] += EVERY
    notices.say("late", "three pages")
    assert caplog.messages[-1] == "kvconnect: pool kv: three pages (4 more like it since)"
    now[0] += EVERY
    notices.say("late", "four pages")
    assert caplog.messages[-1] == "kvconnect: pool kv: four pages"
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_rates_are_taken_once():
    rates = Rates()
    rates.note("get", 4, 2 * GB, 0.5)
    rates.note("get", 1, GB, 1.0)
    rates.note("set", 3, GB, 2.0)
    taken = rates.take()
    assert taken["get"].pages == [4, 1]
    assert taken["get"].bandwidth == [4.0, 1.0]
    assert (taken["set"].pages, taken["set"].bandwidth) == ([3], [0.5])
    assert rates.take() == {}


def test_nothing_moved_is_no_rate():
    rates = Rates()
    rates.note("get", 0, 0, 0.5)
    rates.note("get", 1, GB, 0.0)
    assert rates.take() == {}


def test_rates_that_nobody_reads_do_not_grow():
    rates = Rates()
    threads = [
        threading.Thread(target=lambda: [rates.note("set", 1, 1, 1.0) for _ in range(MOST)])
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(rates.take()["set"].pages) == MOST
