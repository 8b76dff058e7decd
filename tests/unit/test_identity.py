"""Keys: everything that fixes the bytes changes them, nothing else does, and they never drift."""

import dataclasses
import hashlib
import itertools
import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.errors import ConfigError
from kvconnect.identity import (
    KEY_HEX,
    NAMESPACE_HEX,
    PAGE_HEX,
    Cell,
    Identity,
    KeyMaker,
    as_hash,
    page_hashes,
    record,
)
from kvconnect.objects import cells_of
from kvconnect.placement import Placement, Span

GOLDEN = Path(__file__).parent.parent / "golden" / "keys.json"

BASE = Identity(
    model="org/model",
    weights="w1",
    dtype="bfloat16",
    page_size=64,
    layers=4,
    heads=8,
    head_dim=128,
    v_head_dim=128,
    object_layout="k:head.slot.layer.dim|v:head.slot.layer.dim",
)
WHOLE = Cell(Span(0, 4, 4), Span(0, 8, 8))


def keys(identity=BASE, cells=(WHOLE,), hashes=(b"page",)):
    return KeyMaker(identity, list(cells)).keys(list(hashes))


def changed(**fields):
    return dataclasses.replace(BASE, **fields)


# Case 7: one change at a time, of everything that fixes the bytes.
VARIANTS = {
    "base": BASE,
    **{f"dtype {d}": changed(dtype=d) for d in ("float16", "float8_e4m3fn", "float8_e5m2", "int8")},
    "weights": changed(weights="w2"),
    "model a/b": changed(model="a/b"),
    "model a-b": changed(model="a-b"),
    "model a": changed(model="a"),
    "salt ''": changed(salt=""),
    "salt 'a'": changed(salt="a"),
    "adapter ''": changed(adapter=""),
    "adapter 'a'": changed(adapter="a"),
    "scale": changed(scale_scheme="mxfp8-block32"),
    "pool": changed(pool="index"),
    "page_size": changed(page_size=32),
    "layers": changed(layers=5),
    "heads": changed(heads=16),
    "head_dim": changed(head_dim=64),
    "v_head_dim": changed(v_head_dim=64),
    "layout": changed(object_layout="k+v:layer.component.slot.head.dim"),
    "extra a=bc": changed(extra=(("a", "bc"),)),
    "extra ab=c": changed(extra=(("ab", "c"),)),
    "extra salt": changed(extra=(("salt", "a"),)),
    "split a|bc": changed(model="a", weights="bc"),
    "split ab|c": changed(model="ab", weights="c"),
}


def test_every_variant_has_its_own_key_namespace_and_digest():
    for derived in (
        [keys(identity)[0] for identity in VARIANTS.values()],
        [identity.namespace for identity in VARIANTS.values()],
        [identity.digest for identity in VARIANTS.values()],
    ):
        assert len(set(derived)) == len(VARIANTS)


def test_every_field_of_the_dataclass_is_in_the_record():
    """A field added later and forgotten in the record would let two kinds of bytes share keys."""
    other = {
        str: lambda v: (v or "") + "x",
        int: lambda v: v + 1,
        tuple: lambda v: (*v, ("z", "z")),
        type(None): lambda v: "x",
    }
    for field in dataclasses.fields(Identity):
        value = getattr(BASE, field.name)
        assert changed(**{field.name: other[type(value)](value)}).record() != BASE.record(), field


text = st.text(max_size=6)


@settings(deadline=None)
@given(
    st.lists(
        st.builds(
            changed,
            model=text.filter(bool),
            weights=text.filter(bool),
            adapter=st.none() | text,
            salt=st.none() | text,
            page_size=st.integers(1, 4),
            heads=st.integers(1, 3),
            extra=st.dictionaries(text, text, max_size=2).map(lambda d: tuple(sorted(d.items()))),
        ),
        min_size=2,
        max_size=30,
    )
)
def test_different_identities_have_different_records(identities):
    records = {identity.record(): identity for identity in identities}
    assert len(records) == len(set(identities))
    for identity in identities:
        assert Identity.from_json(identity.to_json()) == identity


def test_a_thousand_random_records_do_not_collide():
    rng = np.random.default_rng(1)
    words = ["", "a", "b", "ab", "a/b", "a-b", "é", "\0"]
    seen = set()
    derived = set()
    while len(seen) < 1000:
        pick = rng.integers(0, len(words), 3)
        identity = changed(
            model="m" + words[pick[0]],
            salt=words[pick[1]],
            adapter=words[pick[2]],
            page_size=int(rng.integers(1, 99)),
        )
        page = bytes(rng.integers(0, 256, int(rng.integers(1, 40)), dtype=np.uint8))
        if (identity, page) not in seen:
            seen.add((identity, page))
            derived.add(keys(identity, hashes=[page])[0])
    assert len(derived) == 1000


def test_a_record_is_length_prefixed_exactly_as_documented():
    """Encoded here by hand: schema, then kind + length + bytes of every name and value."""

    def one(kind, data):
        return kind + struct.pack("<Q", len(data)) + data

    expected = struct.pack("<I", 1)
    for name, (kind, data) in [
        ("s", (b"s", "é".encode())),
        ("i", (b"i", b"-7")),
        ("n", (b"n", b"")),
        ("t", (b"b", b"\x01")),
        ("y", (b"y", b"\0")),
    ]:
        expected += one(b"s", name.encode()) + one(kind, data)
    fields = [("s", "é"), ("i", -7), ("n", None), ("t", True), ("y", b"\0")]
    assert record(fields) == expected


values = st.none() | st.booleans() | st.integers() | text | st.binary(max_size=4)
fields = st.lists(st.tuples(text, values), max_size=4)


@settings(deadline=None)
@given(fields, fields)
def test_two_lists_of_fields_share_a_record_only_if_they_are_equal(one, other):
    def same(x, y):
        return [(n, type(v), v) for n, v in x] == [(n, type(v), v) for n, v in y]

    assert (record(one) == record(other)) == same(one, other)


def test_a_key_is_64_hex_characters_that_begin_with_the_namespace():
    cells = [Cell(Span(0, 4, 4), Span(h, h + 2, 8)) for h in range(0, 8, 2)]
    hashes = [b"x", b"y", b"y\0"]
    found = keys(cells=cells, hashes=hashes)
    assert all(re.fullmatch(r"[0-9a-f]{64}", key) for key in found)
    assert KEY_HEX == 64
    assert {key[:NAMESPACE_HEX] for key in found} == {BASE.namespace}
    pages = [key[NAMESPACE_HEX : NAMESPACE_HEX + PAGE_HEX] for key in found]
    objects = [key[NAMESPACE_HEX + PAGE_HEX :] for key in found]
    assert pages == [p for p in dict.fromkeys(pages) for _ in cells], "page-major"
    assert len(set(pages)) == len(hashes)
    assert objects == objects[: len(cells)] * len(hashes)
    assert len(set(objects)) == len(cells)


def test_the_page_part_differs_between_identities_too():
    """The 64-bit namespace alone would not keep 2**32 identities apart."""
    one, other = keys(BASE)[0], keys(changed(weights="w2"))[0]
    assert one[NAMESPACE_HEX : NAMESPACE_HEX + PAGE_HEX] != other[NAMESPACE_HEX:][:PAGE_HEX]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *itertools.product(("model", "weights", "dtype", "pool", "object_layout"), ("", None, 3)),
        *itertools.product(("page_size", "layers", "heads", "head_dim"), (0, -1, None, 1.0, True)),
        ("v_head_dim", -1),
        ("v_head_dim", None),
        *itertools.product(("adapter", "salt", "scale_scheme"), (3, b"a", ())),
        ("extra", (("b", "1"), ("a", "1"))),
        ("extra", (("a", "1"), ("a", "2"))),
        ("extra", (("a", None),)),
        ("extra", (("a", 1),)),
    ],
)
def test_a_field_that_is_unknown_refuses_to_be(field, value):
    with pytest.raises(ConfigError, match=f"'{field}'"):
        changed(**{field: value})


def test_no_key_without_an_object_layout_or_with_two_equal_cells():
    with pytest.raises(ConfigError, match="'object_layout' is unset"):
        KeyMaker(dataclasses.replace(BASE, object_layout="unset"), [WHOLE])
    with pytest.raises(ConfigError, match="same layer and head ranges"):
        KeyMaker(BASE, [WHOLE, WHOLE])


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b'{"model": 3}'])
def test_a_record_that_cannot_be_read_is_a_typed_error(data):
    with pytest.raises(ConfigError):
        Identity.from_json(data)


@pytest.mark.parametrize("value", ["", b"", 7, None, ["a"], 1.5])
def test_a_page_without_a_name_has_no_key(value):
    with pytest.raises(ConfigError, match="page hash"):
        as_hash(value)


def test_text_and_bytes_name_the_same_page():
    assert as_hash("ab") == as_hash(b"ab") == as_hash(bytearray(b"ab")) == b"ab"


# Case 8: who may share keys.


def cell_bytes(cell):
    """What a cell is, as global (layer, head, slots) triples: equal sets are equal bytes."""
    slots = dict(cell.shards).get("cp", Span(0, 1, 1))
    return frozenset(
        itertools.product(
            range(cell.layers.start, cell.layers.stop),
            range(cell.heads.start, cell.heads.stop),
            [(slots.start, slots.stop, slots.total)],
        )
    )


def check_fleet(placements, group=None):
    """Equal keys exactly for equal bytes; and every key has exactly one writer per page."""
    hashes = [f"page{n}".encode() for n in range(40)]
    holders = {}
    for rank, placement in enumerate(placements):
        cells = cells_of(placement, group)
        maker = KeyMaker(BASE, cells)
        mine = placement.writes(maker.turns(hashes))
        every = np.array(maker.keys(hashes)).reshape(len(hashes), len(cells))
        for page in range(len(hashes)):
            for at, cell in enumerate(cells):
                key = every[page, at]
                holders.setdefault(key, []).append((page, cell_bytes(cell), bool(mine[page]), rank))
    for held in holders.values():
        assert len({(page, cell) for page, cell, _, _ in held}) == 1, "one key, two kinds of bytes"
        assert sum(writer for _, _, writer, _ in held) == 1, "one writer"
    assert len({(held[0][0], held[0][1]) for held in holders.values()}) == len(holders)
    return holders


def test_pp2_tp2_ranks_share_no_key():
    stages = [Span(0, 2, 4), Span(2, 4, 4)]
    ranks = [
        Placement.tensor_parallel(layers=stage, heads=8, rank=rank, size=2)
        for stage in stages
        for rank in range(2)
    ]
    assert len(check_fleet(ranks)) == 4 * 40


@pytest.mark.parametrize("name", ["cp", "dcp"])
def test_context_parallel_ranks_share_no_key(name):
    ranks = [
        Placement(Span(0, 4, 4), Span(0, 8, 8), shards=(("cp", Span(n, n + 1, 4)),))
        for n in range(4)
    ]
    assert len(check_fleet(ranks)) == 4 * 40
    named = [dataclasses.replace(r, shards=((name, r.shards[0][1]),)) for r in ranks]
    plain = Placement(Span(0, 4, 4), Span(0, 8, 8))
    derived = {keys(cells=cells_of(rank, None))[0] for rank in [*named, plain]}
    assert len(derived) == 5, "a shard is not the whole page"


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_replicated_heads_share_keys_and_have_one_writer_that_rotates(size):
    ranks = [
        Placement.tensor_parallel(layers=4, heads=2, rank=rank, size=size) for rank in range(size)
    ]
    holders = check_fleet(ranks)
    assert len(holders) == 40 * min(size, 2)
    writers = {rank for held in holders.values() for _, _, writer, rank in held if writer}
    assert writers == set(range(size)), "the duty goes round"


@pytest.mark.parametrize("group", [1, 2])
def test_fleets_of_different_tp_derive_the_same_keys(group):
    def derived(size):
        found = set()
        for rank in range(size):
            placement = Placement.tensor_parallel(layers=4, heads=8, rank=rank, size=size)
            found |= set(keys(cells=cells_of(placement, group)))
        return found

    assert derived(1) == derived(2) == derived(4)
    assert len(derived(4)) == 8 // group


# Case 26: prefix chains.


def chain(tokens, size, last=b""):
    """The documented chain, written down again."""
    out = []
    for at in range(0, len(tokens) // size * size, size):
        data = b"".join(struct.pack("<q", t) for t in tokens[at : at + size])
        last = hashlib.blake2b(last + data, digest_size=32, person=b"kvconnect-chain").digest()
        out.append(last)
    return out


@settings(deadline=None)
@given(st.lists(st.integers(-1, 1 << 40), max_size=12), st.integers(1, 5), st.data())
def test_page_hashes_chain_and_can_be_continued(tokens, size, data):
    every = page_hashes(tokens, size)
    assert every == chain(tokens, size)
    assert page_hashes(np.array(tokens, dtype=np.int64), size) == every
    if every:
        cut = data.draw(st.integers(1, len(every)))
        rest = page_hashes(tokens[cut * size :], size, first_page=cut, parent=every[cut - 1])
        assert every[:cut] + rest == every


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=4, max_size=4), st.integers(0, 3))
def test_a_token_changes_its_page_and_all_after_it_and_none_before(tokens, at):
    other = [*tokens]
    other[at] += 1
    same = [a == b for a, b in zip(page_hashes(tokens, 1), page_hashes(other, 1), strict=True)]
    assert same == [n < at for n in range(4)]


@pytest.mark.parametrize(
    ("first_page", "parent"), [(1, None), (3, b""), (0, b"parent"), (-1, None), (-1, b"x")]
)
def test_no_key_for_a_page_whose_parent_is_not_known(first_page, parent):
    with pytest.raises(ConfigError, match="parent hash"):
        page_hashes([1, 2], 2, first_page=first_page, parent=parent)


@pytest.mark.parametrize("tokens", [[1.5, 2.0], [[1, 2]], ["a"], 3, [True, False]])
def test_tokens_that_are_no_integers_have_no_hash(tokens):
    with pytest.raises(ConfigError, match="tokens are"):
        page_hashes(tokens, 1)


# Golden corpus: a change of the format must be noticed, and then be a new schema version.


def test_the_key_format_has_not_changed():
    for case in json.loads(GOLDEN.read_text()):
        fields = {**case["identity"]}
        fields["extra"] = tuple(tuple(pair) for pair in fields.get("extra", ()))
        identity = Identity(**fields)
        cells = [
            Cell(
                Span(*cell["layers"]),
                Span(*cell["heads"]),
                tuple((name, Span(*span)) for name, span in cell.get("shards", [])),
            )
            for cell in case["cells"]
        ]
        hashes = [bytes.fromhex(page) for page in case["pages"]]
        assert hashlib.sha256(identity.record()).hexdigest() == case["record_sha256"], case
        assert identity.namespace == case["namespace"]
        assert KeyMaker(identity, cells).keys(hashes) == case["keys"]
        assert page_hashes(case["tokens"], identity.page_size) == [
            bytes.fromhex(page) for page in case["chain"]
        ]
