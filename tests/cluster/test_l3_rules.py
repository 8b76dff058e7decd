"""Rules of the store that only a broken one shows, seen by workers that know every byte."""

import pytest

from kvconnect.testing.cluster.services import make as service
from tests.cluster.l3_fleet import PAGE, config, make, start

pytestmark = pytest.mark.cluster(hosts=1, local=True)

IDS = tuple(range(3, 14))
DAMAGED = 5


def flip(folder, words):
    """Change one bit of the only place on the disk that holds these bytes."""
    places = []
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            at = data.find(words)
            while at >= 0:
                places.append((path, at))
                at = data.find(words, at + 1)
    ((path, at),) = places
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([words[0] ^ 1]))


def test_a_bit_that_changed_on_the_disk_is_a_miss(cluster):
    host = cluster.host(0)
    store = service("nvme", "kv", host, None, {"durability": "index"})
    told = config("one", store.url(host))
    worker = start(host, told)
    assert make(worker, "store", IDS).acked == IDS
    worker.ask("quit")
    assert worker.process.wait(10) == 0
    row = told.content.pages([DAMAGED], "k", range(1, 2), range(2, 3))[0, 0, 0, 0]
    flip(host.directory, row.tobytes())
    worker = start(host, told)
    call = make(worker, "load", IDS)
    assert (call.wrong, call.misses) == ((), {"CHECKSUM": 1})
    assert call.hits == tuple(n for n in IDS if n != DAMAGED)
    assert call.nbytes == PAGE * (len(IDS) - 1)
    assert make(worker, "store", (DAMAGED,)).acked == (DAMAGED,)
    assert make(worker, "load", IDS).hits == IDS


def test_what_is_published_is_on_the_disk(cluster):
    host = cluster.host(0)
    # Writes around the page cache are on the disk by themselves: this is the other kind.
    options = {"durability": "index", "direct": "off"}
    told = config("one", service("nvme", "kv", host, None, options).url(host))
    assert make(start(host, told), "store", IDS).acked == IDS
    host.power_cut()
    call = make(start(host, told), "load", IDS)
    assert (call.hits, call.wrong, call.misses) == (IDS, (), {})


def test_half_a_page_is_no_hit_and_heads_are_where_they_belong(cluster):
    host = cluster.host(0)
    url = service("nvme", "kv", host, None, {"durability": "index"}).url(host)
    same = {"object_layout": "canonical", "self_test": False}
    half = {"group": "half", "tp_size": 2, **same}
    first, second = (
        start(host, config(f"half-{rank}", url, tp_rank=rank, **half)) for rank in range(2)
    )
    whole = start(host, config("whole", url, layout="page_first", **same))
    assert make(first, "store", IDS).acked == IDS
    call = make(whole, "load", IDS)
    assert (call.wrong, call.misses) == ((), {"PARTIAL": len(IDS)})
    assert make(second, "store", IDS).acked == IDS
    call = make(whole, "load", IDS)
    assert (call.hits, call.wrong, call.misses) == (IDS, (), {})
