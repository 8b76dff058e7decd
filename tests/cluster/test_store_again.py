"""Storing pages again while nothing says what is stored of them."""

import pytest

from kvconnect.testing.cluster.services import make as service
from tests.cluster.l3_fleet import config, make, start, until

IDS = tuple(range(3, 11))


@pytest.mark.cluster(hosts=2)
def test_storing_again_while_the_owner_is_cut_off_loses_nothing(cluster):
    """What cannot be read to be compared is not what may be replaced."""
    zero, one = cluster.hosts
    # The master waits longer for its silent owner than the cut lasts.
    master = service("mooncake-master", "master", zero, None, {"client_ttl": 30})
    owner = service("mooncake-owner", "owner", one, master, {"mib": 64})
    with master, owner:
        master.start()
        owner.start()
        worker = start(zero, config("one", master.url(zero, breaker=1.0)))
        assert make(worker, "store", IDS).acked == IDS
        assert make(worker, "load", IDS).hits == IDS
        one.cut()
        assert not make(worker, "store", IDS, 30).acked
        one.heal()
        # The first answer that is one: a page that is there later was gone in between.
        calls = until(worker, "load", IDS, lambda c: not {*c.misses} - {"ABSENT", "PARTIAL"}, 40)
        assert calls[-1].hits == IDS, calls[-1]
