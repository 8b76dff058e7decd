import pytest

from kvconnect.disagg.shm import ShmTransport
from kvconnect.disagg.transports import known, open_transport
from kvconnect.errors import ConfigError
from kvconnect.testing.peer_suite import PeerTransportSuite


class TestShm(PeerTransportSuite):
    transport = "shm"


def test_transports_are_opened_by_name():
    with open_transport("shm", {"threads": "2"}) as transport:
        assert isinstance(transport, ShmTransport)
    assert {"shm", "mooncake", "nixl"} <= set(known())


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("moncake", {}, "did you mean mooncake"),
        ("tcp", {}, r"no peer transport is called 'tcp'.*known: mooncake, nixl, shm"),
        ("shm", {"thread": 2}, "unknown option 'thread'; did you mean threads"),
        ("shm", {"threads": "0"}, "threads=0"),
        ("shm", {"threads": "two"}, "threads='two'"),
    ],
)
def test_unknown_names_and_options_are_errors(name, options, words):
    with pytest.raises(ConfigError, match=words):
        open_transport(name, options)
