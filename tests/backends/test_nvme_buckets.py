"""Words and the set of them: against plain Python arithmetic and a plain dict."""

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.testing.suite.base import keys
from kvconnect_nvme.buckets import WIDTH, Buckets
from kvconnect_nvme.keys import own_bytes, pack, pack_all
from kvconnect_nvme.pending import Pending
from kvconnect_nvme.words import blocks, lookup, words

MASK = (1 << 64) - 1


def mixed(x):
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ x >> 33) * factor & MASK
    return x ^ x >> 33


def word(packed, nbytes, seed):
    """The hash by its definition, on Python's integers."""
    own = len(packed) == 33 and packed[0] == 1
    block = packed[1:] if own else xxhash.xxh3_128_digest(packed, seed) * 2
    columns = [int.from_bytes(block[i : i + 8], "little") for i in range(0, 32, 8)] + [nbytes]
    seeds = [mixed((i * 0x9E3779B97F4A7C15 + seed) & MASK) for i in range(1, 6)]
    total = sum(mixed(c ^ s) for c, s in zip(columns, seeds, strict=True)) & MASK
    return mixed(total) & ~1 or 2


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
owns = st.binary(min_size=32, max_size=32).map(bytes.hex)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(texts | owns, st.integers(1, MASK)), max_size=20),
    st.integers(0, MASK),
)
def test_a_word_does_not_depend_on_its_company(asked, seed):
    packed = [pack(name) for name, _ in asked]
    sizes = np.array([nbytes for _, nbytes in asked], dtype=np.uint64)
    together = words(blocks(packed, seed), sizes, seed)
    alone = [words(blocks([p], seed), sizes[i : i + 1], seed)[0] for i, p in enumerate(packed)]
    assert together.tolist() == alone
    assert together.tolist() == [word(p, n, seed) for p, (_, n) in zip(packed, asked, strict=True)]


def test_own_keys_need_no_packing():
    names, sizes = keys(50), np.arange(1, 51, dtype=np.uint64)
    assert (words(own_bytes(names), sizes, 7) == words(blocks(pack_all(names), 7), sizes, 7)).all()
    for odd in (["ab" * 32, "AB" * 32], ["ab" * 32, " a" * 32], ["ab" * 32, "é" * 64], ["a"], []):
        assert own_bytes(odd) is None


def test_words_differ_by_key_size_and_seed():
    names = pack_all(keys(2000))
    seen = set()
    for nbytes, seed in ((1, 1), (2, 1), (1, 2)):
        seen.update(words(blocks(names, seed), np.full(2000, nbytes, np.uint64), seed).tolist())
    assert len(seen) == 6000
    assert all(w and not w & 1 for w in seen)


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(1, 40)), st.lists(st.integers(1, 40)), st.booleans())
def test_lookup(there, asked, expires):
    table = np.array(sorted(2 * n + expires for n in there), dtype=np.uint64)
    found = lookup(table, np.array([2 * n for n in asked], dtype=np.uint64))
    assert found.tolist() == [2 * n + expires if n in there else 0 for n in asked]


def a_word(number, flag=0):
    return mixed(number) & ~1 | flag


# Few numbers, so that what is added is often there already, and often removed.
numbers = st.lists(st.integers(1, 60), max_size=25)
steps = st.tuples(st.sampled_from(["add", "expiring", "remove", "double"]), numbers)


@settings(max_examples=80, deadline=None)
@given(st.lists(steps, max_size=25), st.integers(0, 3))
def test_the_set_against_a_dict(history, bits):
    table = Buckets(np.zeros((1 << bits, WIDTH), dtype=np.uint64))
    model = {}
    for what, which in history:
        flag = int(what == "expiring")
        some = np.array([a_word(n, flag) for n in which], dtype=np.uint64)
        if what == "remove":
            table.remove(some)
            for n in which:
                model.pop(n, None)
        elif what == "double":
            if len(table.rows) < 64:
                table = Buckets(np.concatenate(list(table.doubled())))
        else:
            while not table.add(some):
                assert len(table.rows) < 1024
                table = Buckets(np.concatenate(list(table.doubled())))
            model.update(dict.fromkeys(which, flag))
        asked = np.array([a_word(n) for n in range(1, 61)], dtype=np.uint64)
        expected = [a_word(n, model[n]) if n in model else 0 for n in range(1, 61)]
        assert table.find(asked).tolist() == expected
        assert table.count() == len(model)


def test_a_large_set_fills_to_two_thirds_and_doubles():
    rng = np.random.default_rng(3)
    table, inside = Buckets(np.zeros((1 << 12, WIDTH), dtype=np.uint64)), []
    while table.add(part := rng.integers(1, 1 << 63, 512, dtype=np.uint64) << np.uint64(1)):
        inside.append(part)
    every = np.concatenate(inside)
    assert len(every) > 0.66 * table.rows.size
    for _ in range(3):
        table = Buckets(np.concatenate(list(table.doubled())))
        assert (table.find(every) == every).all()
        assert table.count() >= len(every)
    others = rng.integers(1, 1 << 63, 10_000, dtype=np.uint64) << np.uint64(1)
    assert not table.find(np.setdiff1d(others, np.concatenate([every, part]))).any()


def test_repeated_words_are_one():
    table = Buckets(np.zeros((4, WIDTH), dtype=np.uint64))
    assert table.add(np.array([a_word(5)] * 20, dtype=np.uint64))
    assert table.count() == 1


@pytest.mark.parametrize("at", [0, 8, 20, -1])
def test_a_record_with_a_changed_byte_is_no_record(at):
    sent = Pending(9, 4, live=True, seed=MASK, gone=np.array([2], np.uint64),
                   there=np.array([5, 6], np.uint64))  # fmt: skip
    got = Pending.unpack(sent.pack())
    assert (got.txn, got.generation, got.live, got.seed) == (9, 4, True, MASK)
    assert (got.gone.tolist(), got.there.tolist()) == ([2], [5, 6])
    value = bytearray(sent.pack())
    value[at] ^= 4
    assert not Pending.unpack(bytes(value)).live
    assert not Pending.unpack(None).live
    assert not Pending.unpack(b"short").live
