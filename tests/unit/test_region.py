"""Regions: where descriptors lie, how regions are cut for registration, and rolled back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import BackendError, RegistrationError
from kvconnect.layout import Axis, Layout
from kvconnect.region import Region, RegionTable, chunks, granularity, register_all
from tests.unit.algebra_oracle import elements, examples, segments

TOP = 2**64


def _uint64(values):
    return np.array(values, np.uint64)


@st.composite
def _tables(draw):
    """Disjoint regions, adjacent ones included, low in memory or at its very top."""
    gaps = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), min_size=1, max_size=5))
    room = sum(gap + nbytes for gap, nbytes in gaps)
    at = draw(st.sampled_from([1, 2**32 - 20, 2**63 - 20, TOP - 1 - room]))
    regions = []
    for i, (gap, nbytes) in enumerate(gaps):
        regions.append(Region(f"r{i}", at + gap, nbytes))
        at += gap + nbytes
    return draw(st.permutations(regions)), at


def _home(regions, address, nbytes):
    """The one region that holds every byte of the descriptor, by looking at all of them."""
    found = [
        r
        for r in regions
        if r.address <= address < r.end and address + nbytes <= r.address + r.nbytes
    ]
    assert len(found) <= 1
    return found[0] if found else None


@examples(300)
@given(_tables(), st.data())
def test_locate_against_looking_at_every_region(case, data):
    regions, top = case
    table = RegionTable(regions)
    assert sorted(r.name for r in table.regions) == sorted(r.name for r in regions)
    bottom = min(r.address for r in regions)
    places = st.one_of(
        st.integers(max(0, bottom - 12), min(TOP - 1, top + 12)),
        st.sampled_from([edge for r in regions for edge in (r.address, r.end)]),
        st.sampled_from([0, 1, 2**63, TOP - 1]),
    )
    sizes = st.one_of(st.integers(0, 40), st.sampled_from([2**32, 2**63, TOP - 1]))
    many = data.draw(st.lists(st.tuples(places, sizes), min_size=1, max_size=6))
    if data.draw(st.booleans()):
        many = [d for d in many if _home(regions, *d)]
    homes = [_home(regions, *descriptor) for descriptor in many]
    address, nbytes = _uint64([d[0] for d in many]), _uint64([d[1] for d in many])
    if None not in homes:
        assert [table.regions[i] for i in table.locate(address, nbytes)] == homes
        return
    with pytest.raises(RegistrationError) as caught:
        table.locate(address, nbytes)
    first = homes.index(None)
    assert f"{many[first][0]:#x}" in str(caught.value)
    assert str(many[first][1]) in str(caught.value)


@examples(100)
@given(_tables(), st.data())
def test_one_byte_too_many_is_refused_at_every_edge(case, data):
    regions, _ = case
    table = RegionTable(regions)
    region = data.draw(st.sampled_from(regions))
    start, stop = region.address, region.end
    fits = _uint64([start, stop - 1, start]), _uint64([region.nbytes, 1, 1])
    assert {table.regions[i] for i in table.locate(*fits)} == {region}
    for address, nbytes in [(start, region.nbytes + 1), (stop - 1, 2), (start - 1, 2)]:
        with pytest.raises(RegistrationError):  # straddles, even into an adjacent region
            table.locate(_uint64([start, address]), _uint64([1, nbytes]))


@pytest.mark.parametrize("count", [1, 2])
def test_sums_that_wrap_around_are_outside(count):
    table = RegionTable([Region(f"r{i}", 4096 * (i + 1), 4096) for i in range(count)])
    for address in (4096, 8191, 5000):
        for landing in (0, 1, 4095, address - 1):  # where address + nbytes comes out modulo 2**64
            with pytest.raises(RegistrationError):
                table.locate(_uint64([address]), _uint64([(landing - address) % TOP]))


@pytest.mark.parametrize("count", [1, 2])
def test_the_end_of_a_region_is_outside_even_for_no_bytes(count):
    """However many regions there are: the answer must not depend on the path taken."""
    table = RegionTable([Region(f"r{i}", 4096 * (2 * i + 1), 4096) for i in range(count)])
    assert table.locate(_uint64([4096, 8191]), _uint64([0, 0])).tolist() == [0, 0]
    with pytest.raises(RegistrationError):
        table.locate(_uint64([4096, 8192]), _uint64([0, 0]))


def test_no_descriptors_is_fine_and_no_regions_is_not():
    for table in (RegionTable([]), RegionTable([Region("a", 4096, 64)])):
        assert table.locate(_uint64([]), _uint64([])).tolist() == []
    with pytest.raises(RegistrationError):
        RegionTable([]).locate(_uint64([4096]), _uint64([1]))


@examples(150)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=2, max_size=5))
def test_a_table_refuses_exactly_what_overlaps(pairs):
    regions = [Region(f"r{i}", address, nbytes) for i, (address, nbytes) in enumerate(pairs)]
    taken = [b for address, nbytes in pairs for b in range(address, address + nbytes)]
    if len(set(taken)) == len(taken):
        assert len(RegionTable(regions).regions) == len(regions)
    else:
        with pytest.raises(RegistrationError):
            RegionTable(regions)


@pytest.mark.parametrize(
    ("address", "nbytes"),
    [(0, 8), (-1, 8), (4096, 0), (4096, -8), (TOP - 4, 8), (TOP - 4, TOP), (TOP, 1)],
)
def test_impossible_regions_are_typed_errors_that_name_the_region(address, nbytes):
    with pytest.raises(RegistrationError, match="pool-k"):
        Region("pool-k", address, nbytes)


@pytest.mark.parametrize("below", [1, 2, 4096])
def test_a_region_that_can_be_built_can_be_looked_up(below):
    """The last bytes of the address space: a region is refused at once or works."""
    for nbytes in (below - 1, below):
        try:
            region = Region("top", TOP - below, nbytes)
        except RegistrationError:
            assert nbytes in {0, below}
            continue
        table = RegionTable([region])
        last = _uint64([region.end - 1])
        assert table.locate(last, _uint64([1])).tolist() == [0]
        with pytest.raises(RegistrationError):
            table.locate(last, _uint64([2]))


# Granularity and chunks.

P, L, S, H, D = 6, 3, 4, 4, 8


def _pool(*names, **extents):
    sizes = {"component": 2, "page": P, "layer": L, "slot": S, "head": H, "dim": D, **extents}
    return Layout.packed([(name, sizes[name]) for name in names], 2)


POOLS = {
    "layer_first": _pool("component", "layer", "page", "slot", "head", "dim"),
    "page_first": _pool("component", "page", "slot", "layer", "head", "dim"),
    "page_first_direct": _pool("component", "page", "layer", "slot", "head", "dim"),
    "page_head": _pool("component", "page", "head", "slot", "layer", "dim"),
    "page_unified": _pool("page", "group", "layer", "component", "slot", "head", "dim", group=2),
    "mla": _pool("layer", "page", "slot", "dim", dim=72),
    "mla page_first": _pool("page", "layer", "slot", "dim", dim=72),
}
# The same with a row of padding: engines allocate one page or one token more than they use.
POOLS |= {
    f"{name}, one page more": Layout.packed(
        [(a.name, a.extent + (a.name == "page")) for a in layout.axes], 2
    ).narrow("page", 1, P + 1)
    for name, layout in POOLS.items()
}


def _page_runs(layout):
    """Contiguous ranges of every page, found byte by byte; pages stay apart."""
    return [
        run
        for page in range(layout.extents["page"])
        for run in segments(elements(layout, {"page": page}).values(), layout.itemsize)
    ]


@pytest.mark.parametrize("name", POOLS)
def test_no_multiple_of_the_granularity_falls_inside_a_page_run(name):
    layout = POOLS[name]
    step = granularity(layout)
    for start, stop in _page_runs(layout):
        assert (start - layout.offset) // step == (stop - 1 - layout.offset) // step


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("tail", [0, 5])
def test_no_page_run_lies_across_two_chunks(name, tail):
    layout = POOLS[name]
    runs = _page_runs(layout)
    step = granularity(layout)
    region = Region(name, 4096, layout.end + tail)
    for limit in [step, step + 1, 2 * step, 3 * step - 1, 5 * step, region.nbytes, None]:
        parts = chunks(region, step, limit, layout.offset)
        _check_chunks(parts, region, step, limit, layout.offset)
        for start, stop in runs:
            at, end = region.address + start, region.address + stop
            assert sum(p.address <= at and end <= p.end for p in parts) == 1


def _check_chunks(parts, region, step, limit, origin):
    """They tile the region in order, fit the limit and end at steps from the origin."""
    at = region.address
    for part in parts:
        assert part.address == at
        assert part.nbytes >= 1
        assert part.device == region.device
        assert limit is None or part.nbytes <= limit
        at = part.end
    assert at == region.end
    for part in parts[:-1]:
        assert (part.end - region.address - origin) % step == 0
    assert len({part.name for part in parts}) == len(parts)
    assert all(region.name in part.name for part in parts)
    if limit is None or region.nbytes <= limit:
        assert len(parts) == 1
    else:  # as few as whole steps allow, but for a ragged chunk at either end
        assert len(parts) <= region.nbytes // (limit // step * step) + 3


@examples(300)
@given(
    st.integers(1, 400),
    st.integers(1, 60),
    st.one_of(st.none(), st.integers(1, 200)),
    st.integers(0, 120),
)
def test_chunks_tile_the_region_or_are_refused(nbytes, step, limit, origin):
    region = Region("pool", 2**40, nbytes, "cuda:1")
    if limit is not None and limit < step and nbytes > limit:
        with pytest.raises(RegistrationError):
            chunks(region, step, limit, origin)
        return
    _check_chunks(chunks(region, step, limit, origin), region, step, limit, origin)


PADDED = {
    "layers a token longer": Layout(
        (
            Axis("layer", 3, 4 * 64 + 16),
            Axis("page", 4, 64),
            Axis("slot", 4, 16),
            Axis("dim", 8, 2),
        ),
        2,
    ),
    "layers 3 bytes longer": Layout(
        (Axis("layer", 3, 4 * 64 + 3), Axis("page", 4, 64), Axis("slot", 4, 16), Axis("dim", 8, 2)),
        2,
    ),
    "rows padded": Layout((Axis("page", 4, 96), Axis("slot", 4, 24), Axis("dim", 8, 2)), 2, 7),
}


@pytest.mark.parametrize("name", PADDED)
def test_padding_that_breaks_the_step_never_cuts_a_page_run(name):
    layout = PADDED[name]
    step = granularity(layout)
    assert step < layout.end  # a step of the whole pool would be no step
    for start, stop in _page_runs(layout):
        assert (start - layout.offset) // step == (stop - 1 - layout.offset) // step


# Registration as a whole.


class _Registrar:
    """Registers regions, failing where told; keeps what is registered and the order of calls."""

    def __init__(self, fail_at=None, fail_release=(), error=None):
        self.fail_at, self.fail_release = fail_at, fail_release
        self.error = error or OSError(12, "ENOMEM")
        self.live, self.released = [], []

    def register(self, region):
        if len(self.live) == self.fail_at:
            raise self.error
        self.live.append(region)

    def unregister(self, region):
        self.released.append(region)
        if region in self.fail_release:
            raise ValueError("release failed")
        self.live.remove(region)


CHUNKS = chunks(Region("pool-k", 4096, 5 * 64), 64, 64)


def test_all_regions_are_registered_in_order():
    registrar = _Registrar()
    register_all(CHUNKS, registrar.register, registrar.unregister)
    assert registrar.live == list(CHUNKS)
    assert registrar.released == []
    register_all([], registrar.register, registrar.unregister)


@pytest.mark.parametrize("fail_at", range(5))
@pytest.mark.parametrize("error", [OSError(12, "ENOMEM"), ValueError("x"), BackendError("y")])
def test_a_failure_releases_those_done_in_reverse_and_names_the_chunk(fail_at, error):
    registrar = _Registrar(fail_at, error=error)
    with pytest.raises(RegistrationError) as caught:
        register_all(CHUNKS, registrar.register, registrar.unregister)
    assert registrar.released == list(CHUNKS[:fail_at])[::-1]
    assert registrar.live == []
    failed, text = CHUNKS[fail_at], str(caught.value)
    assert failed.name in text
    assert str(failed.nbytes) in text
    assert str(error) in text
    assert "memlock" in text
    assert "max_mr_size" in text
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_failing_release_neither_hides_the_error_nor_stops_the_others(broken):
    registrar = _Registrar(3, fail_release=[CHUNKS[broken]])
    with pytest.raises(RegistrationError) as caught:
        register_all(CHUNKS, registrar.register, registrar.unregister)
    assert registrar.released == list(CHUNKS[:3])[::-1]
    assert registrar.live == [CHUNKS[broken]]
    assert caught.value.__cause__ is registrar.error
    assert CHUNKS[3].name in str(caught.value)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_rolls_back_too(interrupt):
    registrar = _Registrar(3, error=interrupt())
    with pytest.raises((interrupt, RegistrationError)):
        register_all(CHUNKS, registrar.register, registrar.unregister)
    assert registrar.released == list(CHUNKS[:3])[::-1]
    assert registrar.live == []
