"""Stored pages damaged on disk: SGLang gets the good leading pages, never a wrong byte, and a
page that was damaged heals when it is written again.
"""

import os

import pytest

import kvconnect
from kvconnect.find import find
from tests.engines import sglang_damage, sglang_pools
from tests.engines.sglang_damage import places
from tests.engines.sglang_rank import Rank, content, fill, keys, wipe

pytestmark = pytest.mark.sglang

LOSSY = (
    sglang_damage.truncate_half,
    sglang_damage.truncate_all,
    sglang_damage.zero,
    sglang_damage.flip,
)
CUTS = LOSSY[:2]
"""What lies behind the damaged object is lost as well."""

EARLIER, VICTIM, LATER = range(3), range(3, 9), range(9, 12)
TARGET = range(12, 18)


@pytest.fixture
def url(tmp_path):
    return f"nvme://{tmp_path}/store?capacity=8MiB"


@pytest.fixture(params=[{}, {"tp_sizes": [2]}], ids=["one object", "two objects"])
def settings(request):
    """How many objects a page has: the last one of them is damaged."""
    return request.param


@pytest.fixture
def pool(sglang):
    pool = sglang_pools.mha(sglang, "page_head", pages=18, dim=32)
    fill(pool, 7)
    return pool


@pytest.fixture
def names():
    """Hashes of three prompts, by the pool pages that hold them."""
    return {pages: keys(f"prompt {pages}", len(pages)) for pages in (EARLIER, VICTIM, LATER)}


def load(rank, names, source, before):
    """Load a prompt into other pages; return how many came, all of which are right."""
    wipe(rank.pool)
    target = TARGET[: len(source)]
    got = rank.get(names[source], target)
    assert content(rank.pool, target[:got]) == [before[page] for page in source[:got]]
    untouched = [page for page in range(12) if page not in target]
    assert not any(b"".join(content(rank.pool, untouched)))
    return got


def restore(rank):
    """Give the pool its pages back, as if they had been computed again."""
    fill(rank.pool, 7)


def whole(url, names):
    """Tell for each object of each page whether it is intact on disk, according to the store."""
    with kvconnect.open(url) as store:
        hashes = [name for prompt in names.values() for name in prompt]
        return [one.location.intact for name in hashes for one in find(store, name)]


def store_all(rank, names):
    for pages, hashes in names.items():
        assert rank.put(hashes, pages) == len(pages)


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh client", "same client"])
@pytest.mark.parametrize("damage", LOSSY)
def test_a_damaged_page_is_a_miss_and_heals(pool, url, settings, names, damage, fresh):
    before = content(pool, range(18))
    with Rank(pool, url, **settings) as writer:
        store_all(writer, names)
        last = max(places(url, names[VICTIM][3]), key=lambda place: place.offset)
        damage(last)
        assert False in whole(url, names)
        with Rank(pool, url, self_test=False, **settings) if fresh else writer as reader:
            assert reader.exists(names[VICTIM]) == 6, "nobody has looked yet"
            assert load(reader, names, VICTIM, before) == 3
            assert load(reader, names, EARLIER, before) == 3
            assert load(reader, names, LATER, before) == (0 if damage in CUTS else 3)
            restore(reader)
            store_all(reader, names)
            for prompt in names:
                assert load(reader, names, prompt, before) == len(prompt)
    assert whole(url, names) == [True] * (12 * (2 if settings else 1))


@pytest.mark.parametrize("damage", LOSSY)
def test_the_page_is_gone_once_the_damage_was_seen(pool, url, settings, names, damage):
    with Rank(pool, url, **settings) as rank:
        store_all(rank, names)
        damage(places(url, names[VICTIM][3])[0])
        rank.get(names[VICTIM], TARGET)
        assert rank.exists(names[VICTIM]) == 3


def test_a_longer_slab_has_lost_nothing(pool, url, settings, names):
    before = content(pool, range(18))
    with Rank(pool, url, **settings) as rank:
        store_all(rank, names)
        sglang_damage.lengthen(places(url, names[VICTIM][3])[0])
        for prompt in names:
            assert load(rank, names, prompt, before) == len(prompt)
    assert all(whole(url, names))


def test_a_slab_cut_to_nothing_under_an_open_store(pool, url, settings, names):
    """Everything misses, no process dies, and the store is as good as new afterwards."""
    before = content(pool, range(18))
    with Rank(pool, url, **settings) as rank:
        store_all(rank, names)
        os.truncate(places(url, names[VICTIM][0])[0].path, 0)
        for prompt in names:
            assert load(rank, names, prompt, before) == 0
            assert rank.exists(names[prompt]) == 0
        restore(rank)
        store_all(rank, names)
        for prompt in names:
            assert load(rank, names, prompt, before) == len(prompt)
    with kvconnect.open(url) as store:
        report = store.verify()
        assert (report.objects, report.bad, report.recovered) == (12 * (2 if settings else 1), 0, 0)


def test_other_slabs_are_not_touched_by_a_cut(pool, tmp_path, names):
    """Slabs of 64 KiB: the prompts lie in several, and only one is cut."""
    url, before = f"nvme://{tmp_path}/store?capacity=8MiB&slab=64KiB", content(pool, range(18))
    with Rank(pool, url) as rank:
        store_all(rank, names)
        files = [{place.path for name in prompt for place in places(url, name)}
                 for prompt in names.values()]  # fmt: skip
        cut = places(url, names[VICTIM][3])[0]
        os.truncate(cut.path, 0)
        for prompt, paths in zip(names, files, strict=True):
            got = load(rank, names, prompt, before)
            if cut.path not in paths:
                assert got == len(prompt)
        assert any(cut.path not in paths for paths in files)
        restore(rank)
        store_all(rank, names)
        for prompt in names:
            assert load(rank, names, prompt, before) == len(prompt)
