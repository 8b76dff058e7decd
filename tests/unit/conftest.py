"""Fixtures of the connector tests: a held pool, the reference store, a connector on both."""

import pytest

from kvconnect.memory import MemoryBackend
from tests.unit.attached import attach
from tests.unit.held_pools import held


@pytest.fixture
def store():
    with MemoryBackend() as store:
        yield store


@pytest.fixture
def one():
    return held("cplshd", pages=8)


@pytest.fixture
def connector(one, store):
    with attach(one, store) as connector:
        yield connector
