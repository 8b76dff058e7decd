"""The content of pages, word by word, against plain integers of Python."""

import hashlib

import numpy as np
import pytest

from kvconnect.testing.cluster.content import Content, page_hash

MASK = (1 << 64) - 1
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(value):
    value = ((value ^ value >> 30) * FIRST) & MASK
    value = ((value ^ value >> 27) * SECOND) & MASK
    return value ^ value >> 31


def word(seed, component, indices, dim, itemsize):
    """One element; `indices`: page, slot, global layer, global head."""
    start = f"{seed}/{'kv'.index(component)}".encode()
    row = int.from_bytes(hashlib.blake2b(start, digest_size=8).digest(), "little")
    for index in indices:
        row = mix((row + (index + 1) * STEP) & MASK)
    place, part = divmod(dim, 8 // itemsize)
    value = ((row ^ mix(place + 1)) * SECOND) & MASK
    value ^= value >> 32
    return value >> 8 * itemsize * part & ((1 << 8 * itemsize) - 1)


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize(("component", "dim"), [("k", 6), ("v", 5)])
def test_every_word_is_the_function_of_its_global_place(itemsize, component, dim):
    content = Content(seed=9, page_size=3, head_dim=6, v_head_dim=5, itemsize=itemsize)
    pages, layers, heads = [4, 0, 70_000], range(2, 4), range(5, 8)
    made = content.pages(pages, component, layers, heads)
    assert made.shape == (3, 3, 2, 3, dim)
    for at in np.ndindex(made.shape):
        place = pages[at[0]], at[1], layers[at[2]], heads[at[3]]
        assert made[at] == word(9, component, place, at[4], itemsize)


def test_a_flipped_bit_is_counted_on_its_page_only():
    content = Content(seed=1, page_size=4, head_dim=8, v_head_dim=0, itemsize=2)
    got = content.pages([3, 1, 2], "k", range(2), range(2)).copy()
    assert content.wrong([3, 1, 2], "k", range(2), range(2), got).tolist() == [0, 0, 0]
    got[1, 3, 1, 0, 7] ^= 1
    assert content.wrong([3, 1, 2], "k", range(2), range(2), got).tolist() == [0, 1, 0]
    moved = got[[1, 0, 2]]
    assert (content.wrong([3, 1, 2], "k", range(2), range(2), moved)[:2] > 60).all()


def test_what_has_no_words_is_refused_and_mla_has_no_values():
    with pytest.raises(ValueError, match="itemsize is 3"):
        Content(seed=1, page_size=4, head_dim=8, v_head_dim=8, itemsize=3)
    latent = Content(seed=1, page_size=4, head_dim=8, v_head_dim=0, itemsize=2)
    assert latent.components == ("k",)
    assert latent.page_nbytes(range(3), range(1)) == 4 * 3 * 8 * 2


def test_page_hashes_differ_by_seed_and_number():
    assert len({page_hash(seed, number) for seed in range(30) for number in range(30)}) == 900
