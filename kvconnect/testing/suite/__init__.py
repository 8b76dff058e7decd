"""`BackendSuite`: the conformance tests of the backend protocol, to be subclassed.

    class TestMine(BackendSuite):
        durable = True

        def open_store(self, path):
            return my_backend.open_backend(str(path), {})

What a backend cannot do is said by class attributes (see `kvconnect.testing.suite.base`); the
tests that need it are then not collected, so nothing is ever skipped.
"""

from kvconnect.testing.suite.base import SuiteBase, key, keys, move, needs
from kvconnect.testing.suite.concurrency import Concurrency
from kvconnect.testing.suite.faults import Faults
from kvconnect.testing.suite.lifecycle import Lifecycle
from kvconnect.testing.suite.namespaces import Namespaces
from kvconnect.testing.suite.regions import Regions
from kvconnect.testing.suite.roundtrips import RoundTrips


class BackendSuite(RoundTrips, Faults, Lifecycle, Regions, Namespaces, Concurrency):
    """Every conformance test; a subclass defines `open_store`."""


__all__ = ["BackendSuite", "SuiteBase", "key", "keys", "move", "needs"]
