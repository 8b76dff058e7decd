"""Pages written by one split of the model and read by another, byte for byte by global head.

Every element is compared with what its global coordinates say it is, so that a page that went
through a wrong head, layer or component range cannot pass.
"""

import itertools
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

import kvconnect
from kvconnect import Connector, HostPool, Identity, Placement
from kvconnect.memory import MemoryBackend
from kvconnect.placement import Span
from tests.engines import sglang_pools, sglang_truth
from tests.engines.sglang_rank import Rank
from tests.engines.sglang_truth import canonical_object, held_heads

pytestmark = pytest.mark.sglang

SIZES = (1, 2, 4, 8)
HEADS = (8, 4, 2)
LAYERS, SLOTS, DIM = 3, 4, 8
PAGES = 3
TOKENS = range(100, 100 + PAGES * SLOTS)
SRC, DST = [4, 0, 2], [1, 5, 3]
KEYS = [f"{n:064x}" for n in range(PAGES)]
numbers = itertools.count()


class Member(Rank):
    """A rank of some split of the model, its pages filled with the truth and compared with it."""

    def __init__(self, sglang, url, *, total, tp, held=range(LAYERS), **how):
        self.heads, self.held = held_heads(total, *tp), held
        layout, v_dim = how.pop("layout", "page_head"), how.pop("v_dim", DIM)
        shape = {"layers": len(held), "heads": len(self.heads), "dim": DIM, "v_dim": v_dim}
        if layout == "page_unified":
            shape["head_group_num"] = len(self.heads)
        pool = sglang_pools.mha(sglang, layout, pages=6, page_size=SLOTS, **shape)
        pool.start_layer, pool.end_layer = held.start, held.stop
        super().__init__(pool, url, tp=tp, weights="w1", kv_heads=total, **how)
        self.views = sglang_truth.views(pool)

    def write(self):
        """Store all pages; return how many the controller counts."""
        sglang_truth.fill(self.views, SRC, TOKENS, self.held, self.heads)
        return self.put(KEYS, SRC)

    def read(self):
        """Return the leading pages loaded, compared; pages not asked for are untouched."""
        for view in self.views:
            view[...] = 0xDEAD
        present = self.exists(KEYS)
        assert self.get(KEYS, DST) == present
        tokens = TOKENS[: present * SLOTS]
        assert sglang_truth.wrong(self.views, DST[:present], tokens, self.held, self.heads) == 0
        others = [page for page in range(6) if page not in DST]
        assert all((view[others] == 0xDEAD).all() for view in self.views)
        return present


@contextmanager
def fleet(sglang, url, total, size, **how):
    with ExitStack() as stack:
        members = (Member(sglang, url, total=total, tp=(r, size), **how) for r in range(size))
        yield [stack.enter_context(member) for member in members]


def store_url():
    return f"memory://matrix-{next(numbers)}"


def objects(url):
    with kvconnect.open(url) as store:
        return {key: store.objects.find(key).data for key in store.list_keys()}


@pytest.mark.parametrize("total", HEADS)
@pytest.mark.parametrize("writer", SIZES)
def test_page_head_between_all_tp_sizes(sglang, writer, total):
    url, how = store_url(), {"tp_sizes": list(SIZES)}
    with fleet(sglang, url, total, writer, **how) as ranks:
        for rank in ranks:
            assert rank.write() == PAGES
    groups = [held_heads(total, r, min(total, 8)) for r in range(min(total, 8))]
    pages = [TOKENS[i * SLOTS : (i + 1) * SLOTS] for i in range(PAGES)]
    truth = [canonical_object(p, range(LAYERS), g, (DIM, DIM)) for p in pages for g in groups]
    assert sorted(objects(url).values()) == sorted(truth)
    for reader in SIZES:
        with fleet(sglang, url, total, reader, **how) as ranks:
            assert [rank.read() for rank in ranks] == [PAGES] * reader


@pytest.mark.parametrize("total", HEADS)
def test_all_writers_store_the_same_objects(sglang, total):
    stored = []
    for size in SIZES:
        url = store_url()
        with fleet(sglang, url, total, size, tp_sizes=list(SIZES)) as ranks:
            for rank in ranks:
                rank.write()
        stored.append(objects(url))
    assert len(stored[0]) == PAGES * min(total, 8)
    assert all(found == stored[0] for found in stored)


def test_a_page_of_which_one_rank_is_missing_is_a_miss_for_those_who_need_it(sglang):
    url, how = store_url(), {"tp_sizes": list(SIZES)}
    with fleet(sglang, url, 8, 4, **how) as ranks:
        for rank in (ranks[0], ranks[1], ranks[3]):
            rank.write()
    for reader, expected in ((1, [0]), (2, [PAGES, 0]), (4, [PAGES, PAGES, 0, PAGES])):
        with fleet(sglang, url, 8, reader, **how) as ranks:
            assert [rank.read() for rank in ranks] == expected


CANONICAL = {"tp_sizes": [2, 4], "object_layout": "canonical"}
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head", "page_unified")


@pytest.mark.parametrize("v_dim", [DIM, 4])
@pytest.mark.parametrize("writer", LAYOUTS)
def test_every_layout_reads_what_every_layout_wrote(sglang, writer, v_dim):
    """SGLang builds K and V of different width in two layouts, and never splits heads there."""
    layouts = LAYOUTS if v_dim == DIM else LAYOUTS[1:3]
    if writer not in layouts:
        with pytest.raises(ValueError, match="layout"):
            sglang_pools.mha(sglang, writer, v_dim=v_dim)
        return
    url = store_url()
    with fleet(sglang, url, 4, 4, layout=writer, v_dim=v_dim, **CANONICAL) as ranks:
        for rank in ranks:
            assert rank.write() == PAGES
    for reader in layouts:
        with fleet(sglang, url, 4, 2, layout=reader, v_dim=v_dim, **CANONICAL) as ranks:
            assert [rank.read() for rank in ranks] == [PAGES, PAGES]


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_latent_pages_are_stored_once_whatever_the_tp_size(sglang, layout):
    """MLA: every rank holds the same rows, and SGLang lets rank 0 alone write."""
    url, shape = store_url(), {"pages": 6, "page_size": SLOTS, "layers": LAYERS}
    held = (range(LAYERS), range(1))
    for size in SIZES:
        for rank in range(size):
            pool = sglang_pools.mla(sglang, layout, **shape)
            views = sglang_truth.views(pool)
            with Rank(pool, url, tp=(rank, size), mla=True, weights="w1") as member:
                sglang_truth.fill(views, SRC, TOKENS, *held)
                assert member.put(KEYS, SRC) == (PAGES if rank == 0 else None)
                views[0][...] = 0xDEAD
                assert member.get(KEYS, DST) == PAGES
                assert sglang_truth.wrong(views, DST, TOKENS, *held) == 0
    assert len(objects(url)) == PAGES


STAGES = {
    1: [range(6)],
    2: [range(3), range(3, 6)],
    3: [range(1), range(1, 4), range(4, 6)],
}


@contextmanager
def pipeline(sglang, url, stages, tp, **how):
    with ExitStack() as stack:
        ranks = []
        for stage, layers in enumerate(STAGES[stages]):
            parts = {"held": layers, "pp": (stage, stages)}
            members = (Member(sglang, url, total=4, tp=(r, tp), **parts, **how) for r in range(tp))
            ranks += [stack.enter_context(member) for member in members]
        yield ranks


def test_any_pipeline_split_reads_any_other(sglang):
    """Chunks of one layer fit every split; `layers` says how many the whole model has."""
    how = {"tp_sizes": [1, 2], "layer_chunk": 1, "layers": 6}
    for writer in STAGES:
        url = store_url()
        with pipeline(sglang, url, writer, 2, **how) as ranks:
            for rank in ranks:
                assert rank.write() == PAGES
        assert len(objects(url)) == PAGES * 6 * 2
        for reader in STAGES:
            with pipeline(sglang, url, reader, 1, **how) as ranks:
                assert [rank.read() for rank in ranks] == [PAGES] * reader


@pytest.mark.parametrize("writer", STAGES)
def test_without_chunks_stages_share_where_their_layers_are_the_same(sglang, writer):
    url, how = store_url(), {"tp_sizes": [1, 2], "layers": 6}
    with pipeline(sglang, url, writer, 2, **how) as ranks:
        for rank in ranks:
            assert rank.write() == PAGES
    for reader, stages in STAGES.items():
        with pipeline(sglang, url, reader, 1, **how) as ranks:
            same = [PAGES * (held in STAGES[writer]) for held in stages]
            assert [rank.read() for rank in ranks] == same


class Direct:
    """One rank with a pool of kvconnect's own: page_head with K and V of different width."""

    def __init__(self, stack, store, total, rank, size, dims):
        self.heads = held_heads(total, rank, size)
        self.pool = stack.enter_context(
            HostPool.allocate(
                layout="page_head",
                pages=6,
                page_size=SLOTS,
                layers=LAYERS,
                heads=len(self.heads),
                head_dim=dims[0],
                v_head_dim=dims[1],
            )
        )
        place = Placement.tensor_parallel(layers=LAYERS, heads=total, rank=rank, size=size)
        assert place.heads == Span(self.heads.start, self.heads.stop, total)
        identity = Identity(
            model="org/model", weights="w1", dtype="bfloat16", page_size=SLOTS, layers=LAYERS,
            heads=total, head_dim=dims[0], v_head_dim=dims[1],
        )  # fmt: skip
        self.connector = stack.enter_context(
            Connector(self.pool, place, identity, store, tp_sizes=SIZES)
        )
        self.views = sglang_truth.pool_views(self.pool)


@contextmanager
def direct(store, total, size, dims):
    with ExitStack() as stack:
        yield [Direct(stack, store, total, rank, size, dims) for rank in range(size)]


@pytest.mark.parametrize("dims", [(8, 4), (4, 12)], ids=str)
@pytest.mark.parametrize("total", HEADS)
def test_page_head_of_different_widths_between_all_tp_sizes(total, dims):
    truth = None
    for writer in SIZES:
        with MemoryBackend() as store:
            with direct(store, total, writer, dims) as ranks:
                for rank in ranks:
                    sglang_truth.fill(rank.views, SRC, TOKENS, range(LAYERS), rank.heads)
                    status = rank.connector.put(KEYS, SRC).counts()
                    assert set(status) <= {"OK", "NOT_WRITER"}
            found = {key: store.objects.find(key).data for key in store.list_keys()}
            truth = truth or found
            assert found == truth
            for reader in SIZES:
                with direct(store, total, reader, dims) as ranks:
                    for rank in ranks:
                        assert rank.connector.get(KEYS, DST).ok.all()
                        held = (range(LAYERS), rank.heads)
                        assert sglang_truth.wrong(rank.views, DST, TOKENS, *held) == 0
    group = max(total // 8, 1)
    pages = [TOKENS[i * SLOTS : (i + 1) * SLOTS] for i in range(PAGES)]
    expected = [
        canonical_object(page, range(LAYERS), range(head, head + group), dims)
        for page in pages
        for head in range(0, total, group)
    ]
    assert sorted(truth.values()) == sorted(expected)


def test_the_truth_tells_coordinates_apart():
    """Else a page in a wrong place could pass for a right one."""
    values = np.stack([sglang_truth.elements(c, range(16), range(6), range(8), 12) for c in (0, 1)])
    assert len(np.unique(values)) > 0.85 * values.size
    for axis in range(values.ndim):
        assert (np.diff(values.astype(np.int64), axis=axis) != 0).mean() > 0.999
