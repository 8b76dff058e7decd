"""Memory that is registered in chunks moves as if it were not, and only where it is granted."""

import contextlib
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.disagg.granted import check_granted, cut_runs
from kvconnect.disagg.transport import Runs
from kvconnect.disagg.transports import open_transport
from kvconnect.errors import ConfigError
from kvconnect.region import Region, RegionTable
from tests.disagg.endpoints import Cluster
from tests.disagg.fleet import Fleet, fill, u64

FLEET = Fleet("page_first", 1, 4, 64, (2,), 2, (64, None))
"""K and V of 128 KiB each, in pages of 2 KiB."""


def table(start, sizes):
    bounds = np.cumsum([start, *sizes]).tolist()
    return RegionTable(
        Region(f"r{i}", a, b - a) for i, (a, b) in enumerate(itertools.pairwise(bounds))
    )


sizes = st.lists(st.integers(1, 40), min_size=1, max_size=6).map(lambda s: [*s, 200])
starts = st.integers(0, 60)


@given(
    local=sizes,
    remote=sizes,
    runs=st.lists(st.tuples(starts, starts, st.integers(1, 60)), max_size=5),
)
def test_cut_runs_move_the_same_bytes_and_lie_in_one_region_each(local, remote, runs):
    tables = table(100, local), table(5000, remote)
    columns = u64(runs).reshape(-1, 3) + u64([100, 5000, 0])
    before = Runs(*columns.T)
    after = cut_runs(before, *tables)
    # Byte by byte: from where to where, in the order of the runs.
    pairs = [
        [
            (a + i, b + i)
            for a, b, n in zip(r.local, r.remote, r.nbytes, strict=True)
            for i in range(n)
        ]
        for r in (before, after)
    ]
    assert pairs[0] == pairs[1]
    tables[0].locate(after.local, after.nbytes)
    tables[1].locate(after.remote, after.nbytes)


def test_runs_that_lie_in_one_region_stay_as_they_are():
    runs = Runs(u64([100, 140]), u64([5000, 5160]), u64([40, 40]))
    assert cut_runs(runs, table(100, [40, 40]), table(5000, [160, 160])) is runs


@pytest.mark.parametrize(
    ("grants", "good"),
    [
        ([(100, 300)], True),
        ([(100, 200), (200, 300)], True),
        ([(50, 150), (150, 160), (160, 400)], True),
        ([(100, 200), (201, 300)], False),
        ([(101, 300)], False),
        ([(100, 299)], False),
        ([(300, 400)], False),
        ([], False),
    ],
)
def test_a_region_is_granted_only_without_a_gap(grants, good):
    regions = RegionTable(Region("g", a, b - a) for a, b in grants)
    link = SimpleNamespace(grants=regions)
    expect = (
        contextlib.nullcontext() if good else pytest.raises(ConfigError, match="does not grant")
    )
    with expect:
        check_granted(link, Region("pool", 100, 200))


@pytest.mark.parametrize("stage", ["never", "always"])
def test_pools_in_chunks_move_whole(stage):
    """Also where a joined run of pages lies in two chunks, and the staging memory in several."""

    @contextlib.contextmanager
    def lend():
        # Chunks of 50 pages here and of 30 there, so they end at different pages.
        sizes = {"max_region_bytes": "100KiB" if next(turn) else "60KiB"}
        with open_transport("mooncake", sizes) as transport:
            yield transport

    turn = iter((0, 1))
    options = {"stage": stage, "staging": 256 << 10, "slot": 16 << 10}
    src, dst = u64(range(10, 60)), u64(range(2, 52))
    with Cluster(FLEET, FLEET, transport=lend, **options) as cluster:
        assert all(len(end.transport.regions) > 5 for end in cluster.prefills + cluster.decodes)
        fill(cluster.sources[0], src, 200)
        cluster.connect()
        for way in ("push", "pull"):
            cluster.blank()
            going = [
                cluster.prefills[0].send(way, src),
                cluster.decodes[0].receive(way, dst, way=way),
            ]
            assert all(r.wait(10).ok for r in going), going
            assert cluster.holds(dst, 200) == [True]
