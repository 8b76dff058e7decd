"""Mooncake's masters elected through etcd, on hosts: the leader is killed, the other goes on."""

import time

import pytest

from kvconnect.testing.cluster.services import make as service
from tests.cluster.l3_fleet import config, lawful, make, start, until

pytestmark = pytest.mark.cluster(hosts=3)

IDS, MORE = tuple(range(8)), tuple(range(8, 16))
PATIENCE = {"deadline": 2.0, "pages": 160}


def whole(call):
    return call.hits == IDS


def test_the_leader_is_killed_and_acknowledged_pages_are_there(cluster):
    hosts = cluster.hosts
    etcd = service("etcd", "etcd", hosts[0], None, {})
    first = service("mooncake-master", "first", hosts[0], etcd, {})
    second = service("mooncake-master", "second", hosts[1], etcd, {})
    owner = service("mooncake-owner", "owner", hosts[2], etcd, {})
    with etcd, first, second, owner:
        for one in (etcd, first, second, owner):
            one.start()
        assert (first.keeps, etcd.keeps, owner.keeps) == ("all", "all", "nothing")
        assert first.url(hosts[1]) == owner.url(hosts[2]) == etcd.url(hosts[0])
        worker = start(hosts[1], config("one", etcd.url(hosts[1]), **PATIENCE))
        assert make(worker, "store", IDS).acked == IDS
        time.sleep(first.settles)
        first.kill()
        calls = until(worker, "load", IDS, whole, 30, every=0.5)
        assert not calls[0].hits
        assert all(map(lawful, calls))
        first.restart()
        assert first.alive
        assert make(worker, "store", MORE).acked == MORE
        told = worker.ask("verify", 25, ids=IDS + MORE, deadline=20.0)
        assert tuple(told["ok"]) == IDS + MORE
        worker.ask("quit")
        assert worker.process.wait(10) == 0
