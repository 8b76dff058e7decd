"""Writers of any TP and PP size, readers of any other: byte-exact by global head and layer."""

import numpy as np
import pytest

from kvconnect.backend import Op
from kvconnect.connector import Connector
from kvconnect.memory import MemoryBackend, ObjectStore
from kvconnect.placement import Placement, Span
from kvconnect.wrappers import Wrapper
from tests.unit.held_pools import held, identity_of

SIZES = (1, 2, 4, 8)
PAGES = 3
HASHES = [f"page{number}" for number in range(PAGES)]
WRITE_IDS, READ_IDS = [4, 0, 2], [1, 3, 5]
STAGES = {
    "pp1": [Span(0, 6, 6)],
    "pp2": [Span(0, 3, 6), Span(3, 6, 6)],
    "pp3 uneven": [Span(0, 1, 6), Span(1, 4, 6), Span(4, 6, 6)],
}


class Counting(Wrapper):
    """Notes every key that is handed over to be stored."""

    def __init__(self, inner):
        super().__init__(inner)
        self.stored = []

    def submit(self, batch):
        if batch.op is Op.STORE:
            self.stored += batch.keys
        return super().submit(batch)


def model(total, dims, layers=6, size=2, seed=0):
    """The whole model's KV of every page: {component: (pages, layer, slot, head, dim, 2)}."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.integers(0, 256, (PAGES, layers, size, total, dim, 2), dtype=np.uint8)
        for name, dim in zip(("k", "v"), dims, strict=True)
        if dim
    }


class Rank:
    """One rank of a fleet: its own pool, its own backend handle, one shared store."""

    def __init__(self, objects, order, total, dims, size, number, stage, **options):
        self.placement = Placement.tensor_parallel(
            layers=stage, heads=total, rank=number, size=size
        )
        self.one = held(
            order,
            pages=6,
            layers=stage.extent,
            heads=self.placement.heads.extent,
            dims=dims,
            block=1 if "b" in order else 0,
        )
        self.store = Counting(MemoryBackend(objects))
        identity = identity_of(self.one.pool, self.placement)
        options = {"self_test": False} | options
        self.connector = Connector(self.one.pool, self.placement, identity, self.store, **options)

    def mine(self, content):
        layers, heads = self.placement.layers, self.placement.heads
        return {
            name: whole[:, layers.start : layers.stop, :, heads.start : heads.stop]
            for name, whole in content.items()
        }

    def put(self, content):
        self.one.write(WRITE_IDS, self.mine(content))
        before = self.one.snapshot()
        outcome = self.connector.put(HASHES, WRITE_IDS)
        assert set(outcome.counts()) <= {"OK", "NOT_WRITER"}
        assert self.one.untouched_outside([], before)
        return outcome

    def check_get(self, content):
        before = self.one.snapshot()
        assert self.connector.exists(HASHES).pages.all()
        outcome = self.connector.get(HASHES, READ_IDS)
        assert outcome.ok.all(), outcome
        assert self.one.untouched_outside(READ_IDS, before)
        got, expected = self.one.read(READ_IDS), self.mine(content)
        for name, have in got.items():
            assert (have == expected[name]).all(), name

    def close(self):
        self.connector.close()
        self.store.close()


def fleet(objects, order, total, dims, size, stages="pp1", **options):
    return [
        Rank(objects, order, total, dims, size, number, stage, **options)
        for stage in STAGES[stages]
        for number in range(size)
    ]


def written(order, total, dims, size, content, stages="pp1", **options):
    """Store the model with one fleet; return the store and every key handed over."""
    objects, handed = ObjectStore(), []
    for rank in fleet(objects, order, total, dims, size, stages, **options):
        rank.put(content)
        handed += rank.store.stored
        rank.close()
    assert len(handed) == len(set(handed)), "an object was stored twice"
    return objects, handed


def contents(objects):
    return {key: stored.data for key, stored in objects.objects.items()}


def expected_objects(content):
    """Every canonical object with one head each: head, slot, layer, dim of K, then of V."""
    return sorted(
        b"".join(
            whole[page][:, :, head].transpose(1, 0, 2, 3).tobytes() for whole in content.values()
        )
        for page in range(PAGES)
        for head in range(content["k"].shape[3])
    )


CASES = [
    # writer's pool, reader's pool, K and V dims, object layout
    ("cphsld", "cphsld", (4, 4), "native"),
    ("phsld", "phsld", (6, 4), "native"),
    ("pblcshd", "pblcshd", (4, 4), "native"),
    ("cphsld", "clpshd", (4, 4), "canonical"),
    ("clpshd", "cpslhd", (4, 4), "canonical"),
    ("plcshd", "pblcshd", (4, 4), "canonical"),
    ("lpshd", "phsld", (6, 4), "canonical"),
]


@pytest.mark.parametrize("total", [8, 4, 2])
@pytest.mark.parametrize(("writer", "reader", "dims", "object_layout"), CASES)
def test_every_writer_tp_serves_every_reader_tp(total, writer, reader, dims, object_layout):
    """Case 10, with replication where there are fewer heads than ranks."""
    content = model(total, dims)
    options = {"object_layout": object_layout, "tp_sizes": SIZES}
    stores = [written(writer, total, dims, size, content, **options)[0] for size in SIZES]
    first = contents(stores[0])
    assert len(first) == PAGES * total
    for other in stores[1:]:
        assert contents(other) == first, "objects of all writers are identical"
    if object_layout == "canonical":
        assert sorted(first.values()) == expected_objects(content)
    # The stores are equal, so one reader fleet of each size proves all sixteen pairs.
    for size, objects in zip(SIZES, stores, strict=True):
        for rank in fleet(objects, reader, total, dims, size, **options):
            rank.check_get(content)
            rank.close()


def test_canonical_and_page_head_native_are_the_same_objects():
    """page_head is the split-heads order, so its native objects serve canonical readers."""
    content = model(8, (4, 4))
    native, _ = written("cphsld", 8, (4, 4), 2, content, tp_sizes=SIZES)
    canonical, _ = written(
        "clpshd", 8, (4, 4), 4, content, tp_sizes=SIZES, object_layout="canonical"
    )
    assert contents(native) == contents(canonical)


def test_other_native_orders_share_no_key():
    """A reader of another order finds nothing, rather than bytes in the wrong order."""
    content = model(8, (4, 4))
    stores = [written(order, 8, (4, 4), 1, content)[0] for order in ("cphsld", "clpshd", "cpslhd")]
    keys = [set(store.objects) for store in stores]
    assert not keys[0] & keys[1]
    assert not keys[0] & keys[2]
    assert not keys[1] & keys[2]


@pytest.mark.parametrize("object_layout", ["native", "canonical"])
@pytest.mark.parametrize("order", ["cphsld", "clpshd", "plcshd"])
def test_every_writer_pp_serves_every_reader_pp(order, object_layout):
    """Layers of uneven stages, one layer to a chunk; TP changes on the way, too."""
    content = model(4, (4, 4))
    options = {"layer_chunk": 1, "object_layout": object_layout, "tp_sizes": (1, 2)}
    found = {}
    for stages in STAGES:
        for size in (1, 2):
            objects, _ = written(order, 4, (4, 4), size, content, stages, **options)
            found[stages, size] = objects
    first = contents(found["pp1", 1])
    assert len(first) == PAGES * 6 * 2
    assert all(contents(objects) == first for objects in found.values())
    for (stages, size), objects in zip(found, reversed(found.values()), strict=True):
        for rank in fleet(objects, order, 4, (4, 4), size, stages, **options):
            rank.check_get(content)
            rank.close()


def test_without_chunks_only_the_same_stages_share():
    content = model(4, (4, 4))
    objects, _ = written("cphsld", 4, (4, 4), 1, content, "pp2")
    for rank in fleet(objects, "cphsld", 4, (4, 4), 1, "pp3 uneven"):
        assert not rank.connector.exists(HASHES).pages.any()
        rank.close()
    for rank in fleet(objects, "cphsld", 4, (4, 4), 1, "pp2"):
        rank.check_get(content)
        rank.close()


@pytest.mark.parametrize("size", SIZES)
def test_mla_is_stored_once_by_a_writer_that_rotates(size):
    """One latent head on every rank: the duty goes by page, and each rank reads all pages."""
    global_pages = 60
    objects, writers = ObjectStore(), {}
    rng = np.random.default_rng(3)
    content = {"k": rng.integers(0, 256, (PAGES, 6, 2, 1, 12, 2), dtype=np.uint8)}
    ranks = fleet(objects, "plsd", 1, (12, 0), size)
    for start in range(0, global_pages, PAGES):
        hashes = [f"{start + n}" for n in range(PAGES)]
        for number, rank in enumerate(ranks):
            rank.one.write(WRITE_IDS, rank.mine(content))
            outcome = rank.connector.put(hashes, WRITE_IDS)
            for page, ok in zip(hashes, outcome.ok, strict=True):
                if ok:
                    writers.setdefault(page, []).append(number)
    assert len(objects.objects) == global_pages
    assert sorted(len(w) for w in writers.values()) == [1] * global_pages
    assert {w[0] for w in writers.values()} == set(range(size)), "every rank has its turn"
    assert sum(len(rank.store.stored) for rank in ranks) == global_pages
    for rank in ranks:
        got = rank.connector.get([f"{n}" for n in range(PAGES)], READ_IDS)
        assert got.ok.all()
        assert (rank.one.read(READ_IDS)["k"] == content["k"]).all()
        rank.close()


def test_without_election_every_replica_stores():
    content = model(2, (4, 4))
    objects = ObjectStore()
    ranks = fleet(objects, "cphsld", 2, (4, 4), 8, elect_writer=False)
    for rank in ranks:
        assert rank.put(content).ok.all()
        assert len(rank.store.stored) == PAGES
        rank.close()
    assert len(objects.objects) == PAGES * 2


@pytest.mark.parametrize(("size", "options"), [(2, {"tp_sizes": (1, 2)}), (2, {})])
def test_one_rank_that_did_not_store_leaves_no_joint_prefix(size, options):
    """Case 9: each rank sees its own half; together they can serve nothing."""
    from kvconnect.outcome import joint_prefix

    content = model(8, (4, 4))
    objects = ObjectStore()
    ranks = fleet(objects, "cphsld", 8, (4, 4), size, **options)
    ranks[0].put(content)
    hits = [rank.connector.exists(HASHES).pages for rank in ranks]
    assert [int(h.sum()) for h in hits] == [PAGES, 0]
    assert joint_prefix(hits) == 0
    ranks[1].put(content)
    assert joint_prefix([rank.connector.exists(HASHES).pages for rank in ranks]) == PAGES
    for rank in ranks:
        rank.close()


def test_a_reader_of_tp1_needs_the_shards_of_every_writer():
    """Three of four head shards: the page is a miss, and the pool says it is dirty."""
    content = model(8, (4, 4))
    objects = ObjectStore()
    writers = fleet(objects, "cphsld", 8, (4, 4), 4, tp_sizes=(1, 4))
    for rank in writers[:3]:
        rank.put(content)
    (reader,) = fleet(objects, "cphsld", 8, (4, 4), 1, tp_sizes=(1, 4))
    assert reader.connector.exists(HASHES).prefix == 0
    got = reader.connector.get(HASHES, READ_IDS)
    assert got.counts() == {"PARTIAL": PAGES}
    assert got.nbytes == 0
    assert got.dirty.all()
    writers[3].put(content)
    reader.check_get(content)
    for rank in [*writers, reader]:
        rank.close()
