"""What a put that was given up may still do, and what must not come of it."""

import uuid
from types import SimpleNamespace

import pytest

from kvconnect.backend import Op
from kvconnect.errors import TransferTimeoutError, UnavailableError
from kvconnect.testing.suite.base import key, put, stored
from kvconnect_nixl.s3 import open_backend
from tests.backends.s3_server import S3Server

SIZE = 2304


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = S3Server(tmp_path_factory.mktemp("moto"))
    yield server
    server.stop()


@pytest.fixture
def store(server):
    place = f"{server.bucket()}/p{uuid.uuid4().hex[:8]}"
    with open_backend(place, server.options(timeout=0.5)) as store:
        yield store


def given_up(store, name):
    """Have the wire hold a store of `name` that ends when `ended` is set on what is returned."""
    wire = store.core.wire
    state = SimpleNamespace(ended=False)
    flight = SimpleNamespace(
        op=Op.STORE,
        name=store.core.names.of(name),
        slot=wire.slots.take(4096),
        registered=SimpleNamespace(close=lambda: None),
        posted=SimpleNamespace(poll=lambda: state.ended),
    )
    wire._count(1)
    wire.give_up(flight)
    return state


def test_what_is_removed_does_not_come_back_by_a_late_put(store):
    name, other = key("late"), key("other")
    put(store, [name, other], [SIZE] * 2)
    late = given_up(store, name)
    for remove in (lambda: store.remove([other, name]), lambda: store.clear(name[:16])):
        with pytest.raises(UnavailableError, match="bring it back"):
            remove()
    # Said so, and done nothing; what has nothing to do with it goes on.
    stored(store, [name, other], [SIZE] * 2)
    assert store.remove([other]).all()
    late.ended = True
    assert store.remove([name]).all()
    assert store.list_keys() == []
    assert store.stats()["given_up"] == 0


def test_a_close_that_failed_can_be_repeated(store, monkeypatch):
    agent = store.core.wire._agent
    real, asked = agent.close, []

    def late():
        asked.append(len(asked))
        if len(asked) == 1:
            raise TransferTimeoutError("still moving")
        real()

    monkeypatch.setattr(agent, "close", late)
    with pytest.raises(TransferTimeoutError):
        store.core.wire.close()
    store.core.wire.close()
    assert len(asked) == 2
    assert agent._agent is None
