"""The book of pages: what it writes, what it finds wrong, what it sees of memory given away."""

import numpy as np
import pytest

from kvconnect.errors import CapacityError
from kvconnect.hostpool import HostPool
from kvconnect.placement import Placement
from kvconnect.testing.cluster.content import Content
from kvconnect.testing.cluster.page_book import PageBook

CONTENT = Content(seed=3, page_size=4, head_dim=8, v_head_dim=6, itemsize=2)
NUMBERS = (11, 5, 7)


@pytest.fixture(params=["page_first", "page_head", "layer_first", "page_unified"])
def made(request):
    """A rank that holds heads 2 and 3 of four, two layers, pages of 8 slots."""
    blocks = {"head_blocks": 2} if request.param == "page_unified" else {}
    pool = HostPool.allocate(
        layout=request.param, pages=5, page_size=8, layers=2, heads=2, head_dim=8, v_head_dim=6,
        dtype="int16", **blocks,
    )  # fmt: skip
    place = Placement.tensor_parallel(layers=2, heads=4, rank=1, size=2)
    return pool, PageBook(pool, place, CONTENT)


def element(pool, component, page, layer, slot, head, dim):
    """One element, whatever the layout."""
    array = pool.array(component)
    index = (page, layer, slot, head, 0, dim) if array.ndim == 6 else (page, layer, slot, head, dim)
    return array, index


def test_what_is_filled_is_the_content_of_the_global_heads(made):
    pool, book = made
    pages = book.take(NUMBERS)
    book.fill(pages, NUMBERS, range(2))
    for at, number in enumerate(NUMBERS):
        for component, dims in (("k", 8), ("v", 6)):
            want = CONTENT.pages([number], component, range(2), range(4))
            for slot, layer, head, dim in np.ndindex(4, 2, 2, dims):
                place = int(pages[at // 2]), layer, at % 2 * 4 + slot, head, dim
                array, index = element(pool, component, *place)
                assert array[index] == want[0, slot, layer, 2 + head, dim]
    assert book.wrong(pages, NUMBERS) == []
    assert book.spilled(pages, NUMBERS) == []


@pytest.mark.parametrize("component", ["k", "v"])
def test_one_changed_bit_makes_its_number_wrong(made, component):
    pool, book = made
    pages = book.take(NUMBERS)
    book.fill(pages, NUMBERS, range(2))
    array, index = element(pool, component, int(pages[0]), 1, 6, 1, 5)
    array[index] ^= 1
    assert book.wrong(pages, NUMBERS) == [5]


def test_a_layer_that_never_came_is_wrong(made):
    _, book = made
    pages = book.take(NUMBERS)
    book.fill(pages, NUMBERS, range(1))
    assert book.wrong(pages, NUMBERS) == list(NUMBERS)


def test_slots_behind_the_last_number_belong_to_nobody(made):
    pool, book = made
    pages = book.take(NUMBERS)
    book.fill(pages, NUMBERS, range(2))
    array, index = element(pool, "v", int(pages[1]), 0, 4, 0, 0)
    array[index] ^= 1
    assert book.wrong(pages, NUMBERS) == []
    assert book.spilled(pages, NUMBERS) == [7]


def test_pages_given_back_are_painted_and_watched(made):
    pool, book = made
    pages = book.take(NUMBERS)
    book.fill(pages, NUMBERS, range(2))
    book.give(pages, NUMBERS)
    assert book.free == 5
    assert book.changed() == []
    array, index = element(pool, "k", int(pages[0]), 1, 7, 1, 7)
    array[index] ^= 1
    assert book.changed() == [11, 5]
    assert book.changed() == []


def test_every_painting_is_another(made):
    pool, book = made
    seen = set()
    for _ in range(4):
        pages = book.take(range(10))
        seen |= {int(array[page].flat[0]) for array in [pool.array("k")] for page in pages}
        book.give(pages, ())
    assert len(seen) == 20


def test_more_pages_than_are_free_are_refused_whole(made):
    _, book = made
    book.take(range(6))
    with pytest.raises(CapacityError, match="5 numbers need 3 pages, 2 are free of 5"):
        book.take(range(5))
    assert book.free == 2
