"""The conformance suite of peer transports: inherit it, say which transport, and run pytest.

    class TestMine(PeerTransportSuite):
        transport = "mine"

What is promised is in `kvconnect.disagg.transport`; every expectation here is computed from
bytes and addresses alone, and every region has canaries on both sides.
"""

from kvconnect.testing.peer_suite.lifecycle import LifecycleCases
from kvconnect.testing.peer_suite.moves import MoveCases
from kvconnect.testing.peer_suite.processes import ProcessCases


class PeerTransportSuite(MoveCases, LifecycleCases, ProcessCases):
    """All cases; see `kvconnect.testing.peer_suite.base` for what a subclass may set."""


__all__ = ["PeerTransportSuite"]
