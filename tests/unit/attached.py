"""Connectors on held pools, and what their tests ask again and again."""

import time

from kvconnect.connector import Connector
from tests.unit.held_pools import identity_of, whole


def attach(one, store, *, identity=None, placement=None, **options):
    """Attach a held pool, without the self-test unless asked for."""
    placement = placement or whole(one.pool)
    identity = identity or identity_of(one.pool, placement)
    return Connector(one.pool, placement, identity, store, **({"self_test": False} | options))


def hashes(*numbers):
    return [f"page{number}" for number in numbers]


def same(got, expected):
    return all((got[name] == expected[name]).all() for name in expected)


def wait_for(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def filled(one, connector, count=7):
    """Store pages 0 .. count - 1 and return their content; then overwrite them."""
    content = one.random(count)
    one.write(range(count), content)
    assert connector.put(hashes(*range(count)), range(count)).ok.all()
    one.write(range(count), one.random(count, seed=99))
    return content
