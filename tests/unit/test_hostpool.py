"""Pools that kvconnect allocates: geometry, memory options, sharing, closing."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch

from kvconnect import hostmem, memory_limits
from kvconnect.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    LayoutError,
    UnavailableError,
)
from kvconnect.hostpool import HostPool
from kvconnect.layouts import ORDERS
from kvconnect.pool import Pool

SHAPE = {"layout": "page_head", "pages": 4, "page_size": 4, "layers": 2, "heads": 4, "head_dim": 8}


def open_files():
    return len(list(pathlib.Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("layout", sorted(ORDERS))
@pytest.mark.parametrize("v_head_dim", [None, 4, 12, 0])
def test_components_are_aligned_disjoint_and_all_of_it(layout, v_head_dim):
    heads = 1 if v_head_dim == 0 else 4
    options = SHAPE | {"layout": layout, "heads": heads, "v_head_dim": v_head_dim}
    with HostPool.allocate(**options, components={"scale": 6, "index": 5}) as pool:
        assert isinstance(pool, Pool)
        assert all(region.address % 4096 == 0 for region in pool.regions)
        for number, name in enumerate(pool.components, start=1):
            pool.array(name)[...] = number
        for number, name in enumerate(pool.components, start=1):
            assert (pool.array(name) == number).all()
        assert sum(pool.array(name).nbytes for name in pool.components) == pool.page_nbytes * 4


def test_views_have_the_documented_axes():
    with HostPool.allocate(**SHAPE, components={"scale": 6}) as pool:
        assert tuple(pool.component("k").shape) == (4, 2, 4, 4, 8)
        assert pool.component("v").dtype == torch.bfloat16
        assert tuple(pool.component("scale").shape) == (4, 2, 6)
        assert pool.array("k").dtype == np.uint16
        pool.component("k")[1, 0, 2, 3] = 1.5
        assert (pool.array("k")[1, 0, 2, 3] == 0x3FC0).all()
        with pytest.raises(LayoutError, match="no component 'q'; it has"):
            pool.component("q")
    options = SHAPE | {"layout": "page_unified"}
    with HostPool.allocate(**options, head_blocks=2) as pool:
        assert tuple(pool.component("k").shape) == (4, 2, 4, 2, 2, 8)
    with HostPool.allocate(**options) as pool:
        assert tuple(pool.component("k").shape) == (4, 2, 4, 4, 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pages": 0}, "pages is 0"),
        ({"page_size": -1}, "page_size is -1"),
        ({"layers": 2.0}, "layers is 2.0"),
        ({"heads": True}, "heads is True"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"v_head_dim": -8}, "v_head_dim is -8"),
        ({"v_head_dim": 0}, "heads is 4 with v_head_dim 0"),
        ({"dtype": "bf16"}, "dtype 'bf16' is not one of: .*bfloat16"),
        ({"layout": "page_last"}, "layout 'page_last' is not one of: layer_first"),
        ({"head_blocks": 2}, "layout 'page_head' has no axis 'head_block'"),
        ({"layout": "page_unified", "head_blocks": 3}, "must divide the 4 heads"),
        ({"components": {"scale": 0}}, r"components\['scale'\] is 0"),
        ({"components": {"k": 4}}, "'k' is the name of a KV component"),
    ],
)
def test_case_25_geometry_that_cannot_be(change, words):
    with pytest.raises(LayoutError, match=words):
        HostPool.allocate(**SHAPE | change)


def test_a_plan_says_what_it_takes_before_anything_is_allocated():
    plan = HostPool.plan(**SHAPE | {"pages": 1 << 24}, shared=True)
    assert plan.nbytes == (1 << 24) * 2 * 4 * 2 * 4 * 8 * 2
    assert "16777216 pages x 1024 B in page_head" in str(plan)
    assert "16.00 GiB" in str(plan)
    assert "shared" in str(plan)


def test_more_than_there_is_is_refused(monkeypatch):
    with pytest.raises(CapacityError, match=r"takes \d+ B .* are available; ask for fewer pages"):
        HostPool.allocate(**SHAPE | {"pages": 1 << 40})
    monkeypatch.setattr(hostmem, "available_bytes", lambda: 4095)
    with pytest.raises(CapacityError, match="4095 B"):
        HostPool.allocate(**SHAPE)


def test_closing_twice_and_what_it_means():
    pool = HostPool.allocate(**SHAPE)
    view, raw = pool.component("k"), pool.array("v")
    view.fill_(2)
    with pool:
        assert len(pool.page_ids(range(4))) == 1
    pool.close()
    assert float(view.sum()) == 2 * view.numel()  # views outlive the pool
    assert (raw == 0).all()
    for use in (
        lambda: pool.page_buffer_meta(range(4)),
        lambda: pool.select_buffer_meta(range(4), 2),
        lambda: pool.split_heads_page_buffer_meta(range(4), 2),
        lambda: pool.check_page_ids([0]),
        lambda: pool.component("k"),
    ):
        with pytest.raises(ClosedError, match="closed"):
            use()


def test_memory_goes_back_once_nothing_looks_at_it():
    def mapped():
        maps = pathlib.Path("/proc/self/maps").read_text()
        return sum("kvconnect-gone" in line for line in maps.splitlines())

    pool = HostPool.allocate(**SHAPE, shared=True, label="gone")
    view = pool.component("k")
    pool.close()
    assert mapped() == 1
    del view
    assert mapped() == 0


ATTACH = """
import sys
from kvconnect.hostpool import HostPool
fd = int(sys.argv[1])
with HostPool.attach(fd, layout="page_head", pages=4, page_size=4, layers=2, heads=4,
                     head_dim=8, v_head_dim=6) as pool:
    assert int(pool.array("k")[2, 1, 3, 0, 5]) == 77
    pool.array("v")[3, 0, 0, 3, 1] = 99
assert "torch" not in sys.modules
"""


def test_shared_pools_attach_in_another_process():
    before = open_files()
    with HostPool.allocate(**SHAPE, v_head_dim=6, shared=True) as pool:
        pool.array("k")[2, 1, 3, 0, 5] = 77
        command = [sys.executable, "-c", ATTACH, str(pool.fd)]
        subprocess.run(command, check=True, pass_fds=[pool.fd], timeout=60)
        assert int(pool.array("v")[3, 0, 0, 3, 1]) == 99
        with pytest.raises(LayoutError, match=r"holds \d+ B, this geometry takes \d+ B"):
            HostPool.attach(pool.fd, **SHAPE | {"pages": 4096})
    assert pool.fd is None
    assert HostPool.allocate(**SHAPE).fd is None
    assert open_files() == before


def test_a_failed_allocation_leaves_nothing_behind(monkeypatch):
    before = open_files()

    def refuse(self, node):
        raise ConfigError("no")

    monkeypatch.setattr(hostmem.HostMemory, "bind", refuse)
    with pytest.raises(ConfigError):
        HostPool.allocate(**SHAPE, shared=True, numa_node=0)
    assert open_files() == before


@pytest.mark.parametrize("shared", [False, True])
def test_huge_pages(monkeypatch, shared):
    with pytest.raises(ConfigError, match="huge_pages='4MiB' is not one of: False, 'thp'"):
        HostPool.allocate(**SHAPE, huge_pages="4MiB")
    with HostPool.allocate(**SHAPE, huge_pages="thp", shared=shared) as pool:
        pool.component("k").fill_(1)
    if memory_limits.free_huge_pages(2 << 20) == 0:
        with pytest.raises(CapacityError, match="0 are free; reserve more in /proc/sys/vm/nr_huge"):
            HostPool.allocate(**SHAPE, huge_pages="2MiB", shared=shared)
        monkeypatch.setattr(hostmem, "free_huge_pages", lambda page: 100)
        with pytest.raises(CapacityError, match="/proc/sys/vm/nr_hugepages"):
            HostPool.allocate(**SHAPE, huge_pages="2MiB", shared=shared)
    else:
        with HostPool.allocate(**SHAPE, huge_pages="2MiB", shared=shared) as pool:
            pool.component("k").fill_(1)


def test_numa_node():
    with pytest.raises(ConfigError, match="numa_node=77 is not one of the nodes online"):
        HostPool.allocate(**SHAPE, numa_node=77)
    try:
        with HostPool.allocate(**SHAPE, numa_node=0) as pool:
            pool.component("k").fill_(1)
    except ConfigError as error:  # containers may forbid the call; then it says so
        words = str(error)
        assert "mbind failed" in words


def test_pinning_without_cuda_is_refused():
    if torch.cuda.is_available():
        with HostPool.allocate(**SHAPE, pin=True) as pool:
            assert pool.memory.pinned
            assert pool.component("k").is_pinned()
        return
    with pytest.raises(UnavailableError, match="pin=True needs CUDA"):
        HostPool.allocate(**SHAPE, pin=True)
    with HostPool.allocate(**SHAPE) as pool:
        assert not pool.memory.pinned


def test_memory_limits_are_read_from_where_they_are(tmp_path, monkeypatch):
    assert 0 < memory_limits.available_bytes() < 1 << 50
    limit, used = tmp_path / "max", tmp_path / "current"
    limit.write_text("1000\n")
    used.write_text("900\n")
    monkeypatch.setattr(memory_limits, "_CGROUPS", ((str(limit), str(used)),))
    assert memory_limits.available_bytes() == 100
    limit.write_text("max\n")
    assert memory_limits.available_bytes() > 100
    monkeypatch.setattr(memory_limits, "_text", lambda path: None)
    assert memory_limits.available_bytes() == 1 << 47
    assert memory_limits.online_nodes() == {0}
    monkeypatch.setattr(memory_limits, "_text", lambda path: "0-2,5\n")
    assert memory_limits.online_nodes() == {0, 1, 2, 5}
