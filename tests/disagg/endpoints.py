"""Endpoints of two fleets in this process, connected, with pools that say what lies in them."""

import contextlib
import threading

import numpy as np

from kvconnect.disagg.decode import DecodeEndpoint
from kvconnect.disagg.options import EndpointOptions
from kvconnect.disagg.prefill import PrefillEndpoint
from kvconnect.disagg.shm import ShmTransport
from kvconnect.disagg.transport import PeerOutcome, PeerStatus
from kvconnect.identity import Identity
from tests.disagg.fleet import expected, rows_of


def identity_of(fleet, **changes):
    dims = fleet.dims[0], fleet.dims[0] if fleet.dims[1] is None else fleet.dims[1]
    fields = {
        "model": "org/m", "weights": "w", "dtype": "int16", "page_size": fleet.page_size,
        "layers": sum(fleet.stages), "heads": fleet.heads, "head_dim": dims[0],
        "v_head_dim": dims[1],
    }  # fmt: skip
    return Identity(**fields | changes)


class Cluster:
    """Both sides, their endpoints and addresses."""

    def __init__(self, prefill, decode, transport=ShmTransport, keys=None, **options):
        self.stack = contextlib.ExitStack()
        self.sources, self.targets = prefill.sides(), decode.sides()
        self.prefills = [
            self.start(
                PrefillEndpoint, side, prefill, f"p{i}", len(self.sources), transport, keys, options
            )
            for i, side in enumerate(self.sources)
        ]
        self.decodes = [
            self.start(
                DecodeEndpoint, side, decode, f"d{i}", len(self.targets), transport, keys, options
            )
            for i, side in enumerate(self.targets)
        ]
        self.addresses = [endpoint.listen() for endpoint in self.prefills]

    def start(self, kind, side, fleet, name, ranks, transport, keys, options):
        carrier = self.stack.enter_context(transport())
        settings = EndpointOptions(name=name, ranks=ranks, **{"timeout": 10.0} | options)
        endpoint = kind(
            side.pool, side.placement, identity_of(fleet), carrier, keys=keys, options=settings
        )
        return self.stack.enter_context(endpoint)

    def connect(self):
        for endpoint in self.decodes:
            endpoint.connect(self.addresses)
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stack.close()

    def blank(self):
        for side in self.targets:
            for component in side.pool.components:
                side.pool.array(component)[...] = 0

    def holds(self, pages, tokens):
        """Tell for each decode rank whether its pages hold the truth, and nothing else changed."""
        return [
            all(
                np.array_equal(
                    rows_of(side, c, pages)[:tokens].view(np.int16),
                    expected(side, c, pages, tokens),
                )
                and not np.delete(side.pool.array(c), pages.astype(np.int64), axis=0).any()
                for c in side.pool.components
            )
            for side in self.targets
        ]


class Stuck:
    """A transfer that fails at once and touches the memory until it is let go."""

    def __init__(self, runs=None):
        self.runs, self.let_go = runs, threading.Event()

    def done(self):
        return self.let_go.is_set()

    def wait(self, timeout):
        self.let_go.wait(timeout)
        return PeerOutcome(PeerStatus.FAILED, 0, "the link is cut")

    def cancel(self):
        pass
