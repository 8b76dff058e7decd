"""One endpoint in a process of its own, driven by JSON over a pipe, for tests that kill it."""

import os
import threading
import time
from pathlib import Path

import msgspec
import numpy as np

from kvconnect.disagg import messages
from kvconnect.disagg.decode import DecodeEndpoint
from kvconnect.disagg.keys import Keys
from kvconnect.disagg.options import EndpointOptions
from kvconnect.disagg.prefill import PrefillEndpoint
from kvconnect.disagg.shm import ShmTransport
from kvconnect.errors import KVConnectError
from kvconnect.hostpool import HostPool
from kvconnect.identity import Identity
from kvconnect.placement import Placement

GEOMETRY = {"page_size": 16, "layers": 4, "heads": 4, "head_dim": 64}
LAYOUTS = {"prefill": "page_first", "decode": "page_head"}
PAGES = 40


class Paced(ShmTransport):
    """Batches start no faster than one in `pace` seconds, from batch `slow` on in thirty times
    that; tells how many have.
    """

    def __init__(self, pools, pace):
        super().__init__(pools)
        self.pace, self.batches, self.slow = pace, 0, None
        self.changed = threading.Condition()

    def submit(self, peer, way, runs, timeout):
        slow = self.slow is not None and self.batches >= self.slow
        time.sleep(self.pace * (30 if slow else 1))
        transfer = super().submit(peer, way, runs, timeout)
        with self.changed:
            self.batches += 1
            self.changed.notify_all()
        return transfer


def truth(component, tokens, seed):
    """(token, layer, head, dim) int16 by plain arithmetic of the indices."""
    shape = np.arange(tokens), np.arange(4), np.arange(4), np.arange(64)
    token, layer, head, dim = np.meshgrid(*shape, indexing="ij")
    mixed = token * 7919 + layer * 611953 + head * 104729 + dim * 31 + ord(component) * 1299709
    return ((mixed + seed * 15485863) % 65521).astype(np.uint16)


class Rank:
    """What the test may ask for."""

    def __init__(self, role, name, keys, options, pace):
        self.pool = HostPool.allocate(
            layout=LAYOUTS[role], pages=PAGES, dtype="int16", shared=True, **GEOMETRY
        )
        identity = Identity(
            model="m", weights="w", dtype="int16", page_size=16, layers=4, heads=4,
            head_dim=64, v_head_dim=64,
        )  # fmt: skip
        self.transport = Paced([self.pool], pace)
        kind = PrefillEndpoint if role == "prefill" else DecodeEndpoint
        self.end = kind(
            self.pool,
            Placement.whole(layers=4, heads=4),
            identity,
            self.transport,
            keys=Keys(*keys) if keys else None,
            options=EndpointOptions(name=name, fleet=options.pop("fleet", name), **options),
        )
        self.requests = {}

    def listen(self, address):
        return self.end.listen(address)

    def connect(self, addresses, timeout):
        self.end.connect(addresses, timeout)

    def fill(self, tokens, seed):
        for c in "kv":
            rows = self.pool.array(c)[: -(-tokens // 16)]
            rows[...] = truth(c, tokens, seed).reshape(-1, 16, 4, 4, 64).transpose(0, 2, 1, 3, 4)

    def paint(self, pages, value):
        """Use pages for something else."""
        for c in "kv":
            self.pool.array(c)[pages] = value

    def painted(self, pages, value):
        return all(bool((self.pool.array(c)[pages] == value).all()) for c in "kv")

    def holds(self, pages, seed, others):
        """Whether pages hold the truth, and all others one value."""
        tokens, good = len(pages) * 16, True
        for c in "kv":
            array = self.pool.array(c)
            rows = array[pages].transpose(0, 2, 1, 3, 4).reshape(tokens, 4, 4, 64)
            good &= bool((rows == truth(c, tokens, seed)).all())
            good &= bool((np.delete(array, pages, axis=0) == others).all())
        return good

    def send(self, name, pages, timeout):
        self.requests[name] = self.end.send(name, pages, timeout=timeout)

    def receive(self, name, pages, timeout, way):
        self.requests[name] = self.end.receive(name, pages, timeout=timeout, way=way)

    def wait(self, name, timeout):
        started = time.monotonic()
        outcome = self.requests[name].wait(timeout)
        return outcome.state.value, outcome.reason, time.monotonic() - started

    def quiet(self, name, timeout):
        return self.requests[name].quiet(timeout)

    def abort(self, name):
        self.end.abort(name, "the user has left")

    def quarantined(self):
        return self.end.quarantined()

    def slow(self, start):
        self.transport.slow = start

    def batches(self, count, timeout):
        """Wait until so many batches have been started; returns how many."""
        with self.transport.changed:
            self.transport.changed.wait_for(lambda: self.transport.batches >= count, timeout)
            return self.transport.batches

    def counts(self):
        """Everything that must come back to where it was."""
        end = self.end
        return {
            "fds": sum(1 for _ in Path("/proc/self/fd").iterdir()),
            "tasks": sum(1 for _ in Path("/proc/self/task").iterdir()),
            "peers": len(end.peers),
            "slots": end.ring.free,
            "links": self.transport._listener.attached(),
            "moves": len(self.transport._mover.under_way()),
            "regions": len(self.transport.regions),
            "requests": len(getattr(end, "_sendings", ())) + len(getattr(end, "_receivings", ())),
            "orders": len(getattr(end, "_orders", ())),
            "maps": sum("memfd" in line for line in Path("/proc/self/maps").open()),
        }

    def counters(self):
        return self.end.counters()

    def lie(self, kind, number):
        """Say something about memory that is not ours to name; to the first peer or address."""
        end = self.end
        peer = next(iter(end.peers.values()), None)
        if kind == "grant":
            said = messages.Grant(
                f"lie{number}", messages.pack_pages(np.array([PAGES + number], dtype=np.uint64)),
                16, "push", 5.0, False,
            )  # fmt: skip
        elif kind == "back":
            said = messages.Back(number)
        elif kind == "staged":
            said = messages.Staged(f"lie{number}", (0, 4), 0, 1, number)
        else:
            hello = end.hello()
            region, staging = hello.side.regions[0], hello.staging
            if kind == "staging":
                staging = msgspec.structs.replace(staging, address=staging.address + (64 << 20))
            else:
                region = msgspec.structs.replace(region, address=region.address + (64 << 20))
            side = msgspec.structs.replace(hello.side, regions=(region, *hello.side.regions[1:]))
            said = msgspec.structs.replace(hello, staging=staging, side=side)
        end.in_thread(lambda: end.send_to(peer, said))

    def close(self):
        self.end.close()
        self.transport.close()
        self.pool.close()


def main(conn, role, name, keys, options, pace):
    try:
        rank = Rank(role, name, keys, dict(options), pace)
        conn.send_bytes(msgspec.json.encode(["ok", None]))
        while True:
            word, *arguments = msgspec.json.decode(conn.recv_bytes())
            try:
                answer = ["ok", getattr(rank, word)(*arguments)]
            except KVConnectError as error:
                answer = [type(error).__name__, str(error)]
            conn.send_bytes(msgspec.json.encode(answer))
            if word == "close" and answer[0] == "ok":
                return
    except (EOFError, OSError):
        os._exit(3)  # the test is gone
