"""The S3 store against the conformance suite and the state machine, on a real S3 server."""

import itertools

import pytest
from hypothesis import settings

from kvconnect.testing.machine import backend_machine
from kvconnect.testing.suite import BackendSuite
from kvconnect_nixl.s3 import open_backend
from tests.backends.s3_server import S3Server


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory):
    server = S3Server(tmp_path_factory.mktemp("moto"))
    TestS3.server = open_machine_store.server = server
    yield server
    server.stop()


class TestS3(BackendSuite):
    durable = True
    multi_process = True
    corruptible = True
    rounds = 40
    many = 200

    def where(self, path):
        marker = path / "bucket"
        if not marker.exists():
            marker.write_text(self.server.bucket(), encoding="utf-8")
        return f"{marker.read_text(encoding='utf-8')}/team/a"

    def open_store(self, path):
        return open_backend(self.where(path), self.server.options())

    def peer(self, path):
        return "kvconnect_nixl.s3:open_backend", self.where(path), self.server.options()

    def corrupt(self, store, path, name, data):
        """Fetch the object, flip a byte of its payload, and put it back."""
        bucket, _, prefix = self.where(path).partition("/")
        place = {"Bucket": bucket, "Key": f"{prefix}/objects/{name[:16]}/{name[16:]}"}
        stored = bytearray(self.server.client.get_object(**place)["Body"].read())
        assert stored.startswith(data)
        stored[len(data) // 2] ^= 0x40
        self.server.client.put_object(**place, Body=bytes(stored))


numbers = itertools.count()


def open_machine_store():
    server = open_machine_store.server
    location = f"{server.bucket()}/{next(numbers)}"
    return lambda: open_backend(location, server.options())


TestMachine = backend_machine(open_machine_store, durable=True).TestCase
TestMachine.settings = settings(max_examples=6, stateful_step_count=12, deadline=None)
