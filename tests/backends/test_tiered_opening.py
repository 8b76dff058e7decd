"""Tiered stores by URL, and what the tiers can do together."""

import numpy as np
import pytest

import kvconnect
from kvconnect.backend import Capabilities
from kvconnect.errors import ConfigError
from kvconnect.memory import MemoryBackend
from kvconnect.testing.suite import keys
from kvconnect.testing.suite.base import content, get, put, stored
from kvconnect.tiered import TieredBackend, TieredOptions
from kvconnect.tiered.combine import combined

SIZE = 2304


def test_capabilities_are_what_all_tiers_can():
    one = Capabilities(alignment=8, max_runs_per_object=100, min_run_bytes=256, durable=True,
                       devices=("cuda", "cpu"), lease_seconds=5.0)  # fmt: skip
    two = Capabilities(alignment=12, max_region_bytes=1 << 20, scatter_gather=False)
    both = combined([one, two], TieredOptions())
    assert (both.alignment, both.max_runs_per_object, both.min_run_bytes) == (24, 100, 256)
    assert (both.devices, both.lease_seconds, both.max_region_bytes) == (("cpu",), 5.0, 1 << 20)
    assert not both.scatter_gather
    assert not both.durable
    assert combined([one, two], TieredOptions(require="all")).durable


def test_urls():
    urls = ["memory://tiered-url-a", "memory://tiered-url-b?capacity=1MiB&deadline=5"]
    with kvconnect.open(urls) as store:
        put(store, keys(1), [SIZE])
    one, two = urls[0], urls[1].replace("&", "%26")
    with kvconnect.open(f"tiered://?tier1={one}&tier2={two}&write=back") as store:
        assert store.options.write == "back"
        stored(store, keys(1), [SIZE])
    with kvconnect.open(urls[1]) as alone:
        stored(alone, keys(1), [SIZE])


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("tiered://?tier1=memory://", "two or more"),
        ("tiered://?tier1=memory://&tier3=memory://", "numbered"),
        ("tiered://x?tier1=memory://&tier2=memory://", "no part"),
        ("tiered://?tier1=memory://&tier2=memory://&writ=back", "write"),
        ("tiered://?tier1=memory://&tier2=nothing://", "nothing"),
        ("tiered://?tier1=memory://&tier2=memory://&timeout=0", "timeout"),
        ("tiered://?tier1=memory://&tier2=memory://&write=back&require=all", "require"),
        ("tiered://?tier1=memory://&tier2=memory://&trip_after=0", "trip_after"),
        ("tiered://?tier1=memory://&tier2=memory://&promote_ttl=0", "promote_ttl"),
        ("tiered://?tier1=memory://&tier2=memory://&negative_ttl=-1", "negative_ttl"),
    ],
)
def test_wrong_urls_are_named(url, word):
    with pytest.raises(ConfigError, match=word):
        kvconnect.open(url)


def test_the_outcome_of_many_keys_is_merged_in_order():
    one, two = MemoryBackend(), MemoryBackend()
    with TieredBackend([one, two], TieredOptions(promote_bytes=0)) as store:
        names = keys(300)
        where = np.arange(300) % 3
        put(one, [n for n, w in zip(names, where, strict=True) if w == 0], [64] * 100)
        put(two, [n for n, w in zip(names, where, strict=True) if w == 1], [64] * 100)
        outcome, held = get(store, names, [64] * 300)
        assert (outcome.ok == (where != 2)).all()
        assert all(held.read(i) == content(names[i], 64) for i in np.flatnonzero(where != 2))
