"""A connector on the S3 store: whole pages of real pool shapes, and a server that goes silent."""

import pytest

from kvconnect.descriptors import Mode
from kvconnect_nixl.s3 import open_backend
from tests.backends.s3_server import Plan, Proxy, S3Server, wait_until
from tests.unit.attached import attach, filled, hashes, same
from tests.unit.held_pools import held

WIDE = {"dims": (128, 128), "size": 16}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = S3Server(tmp_path_factory.mktemp("moto"))
    yield server
    server.stop()


@pytest.mark.parametrize(
    ("order", "shape", "mode"),
    [
        ("cplshd", WIDE, Mode.PER_PAGE),
        ("clpshd", WIDE, Mode.SCATTER_GATHER),
        ("cphsld", WIDE, Mode.PER_PAGE),
        ("pclshd", WIDE, Mode.PER_PAGE),
        ("clpshd", {}, Mode.STAGED),
    ],
)
def test_pages_come_back(server, order, shape, mode):
    one = held(order, pages=8, **shape)
    with open_backend(server.bucket(), server.options()) as store:
        with attach(one, store, self_test=True) as connector:
            assert connector.plan.mode is mode
            content = filled(one, connector, 4)
            assert connector.exists(hashes(0, 1, 9, 2)).pages.tolist() == [True, True, False, True]
            got = connector.get(hashes(0, 1, 2, 9, 3), [4, 5, 6, 0, 7])
            assert got.counts() == {"OK": 4, "ABSENT": 1}
            assert same(one.read([4, 5, 6, 7]), content)
        # Another engine, started later, on the same bucket.
        with attach(one, store) as connector:
            assert connector.exists(hashes(0, 1, 2, 3)).prefix == 4
            assert list(store.records()) == [f"identity/{connector.identity.namespace}"]
            assert connector.remove(hashes(1)).pages.all()
            assert connector.exists(hashes(0, 1, 2, 3)).prefix == 1
            assert connector.clear() == 3
            assert store.list_keys() == []


def test_a_silent_server_holds_no_page(server):
    one = held("pclshd", pages=8, **WIDE)
    with Proxy(server.port) as proxy:
        options = server.options(cooldown=0.01) | {"endpoint": proxy.endpoint}
        with open_backend(server.bucket(), options) as store, attach(one, store) as connector:
            content = filled(one, connector, 4)
            before = one.read([4, 5])
            proxy.always = Plan(hold="down", after=1000)
            got = connector.get(hashes(0, 1), [4, 5], timeout=0.3)
            assert got.counts() == {"TIMEOUT": 2}
            # The server is silent still, yet the pages are free: nothing of it will reach them.
            wait_until(lambda: not connector.quarantined(), 5, "the pages are free")
            assert store.stats()["given_up"] == 2
            proxy.release()
            wait_until(lambda: not store.stats()["given_up"], 10, "the late bytes arrive")
            assert same(one.read([4, 5]), before)
            assert connector.get(hashes(0, 1), [4, 5]).ok.all()
            assert same(one.read([4, 5]), {name: part[:2] for name, part in content.items()})
